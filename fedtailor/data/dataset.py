"""A data set as every loader returns it: all samples in two tensors, with the authors' split and clients. Before that:
its files, where they are published, and where they are looked for.

A `Dataset` is checked when it is made. So the code that uses it need not check its samples again.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor._common.errors import FedtailorError, shown
from fedtailor.data.columns import Column
from fedtailor.training.inputs import Inputs, Lazy, Several
from fedtailor.training.metrics import Targets

TRAIN, VALIDATION, TEST = 0, 1, 2
PIECE = 4096  # samples that are checked together
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples with their classes and, where known, the authors' split and the natural clients."""

    name: str
    x: Inputs  # uint8 images (n, channels, height, width), features (n, ...), float32 or float64, or int64 numbers
    y: Tensor  # int64 class numbers, float targets (regression), or float labels of 0 and 1 (n, classes)
    classes: tuple[str, ...]  # names in the order of the class numbers or labels; () for regression
    part: Tensor | None = None  # uint8: TRAIN, VALIDATION or TEST in the split that comes with the data
    client: Tensor | None = None  # int64: index into client_names
    client_names: tuple[str, ...] = ()
    group: Tensor | None = None  # int64: a client's samples of one group are partitioned and split together
    own_split: bool = False  # the split is the user's own: it is kept unless another is asked for
    tokens: int | None = None  # number of different tokens, if x holds these; token 0 is padding
    columns: tuple[Column, ...] = ()  # of a table: x is float64, a category its number, a missing cell NaN
    ignored: tuple[str, ...] = ()  # columns of a table that are neither features nor labels nor clients
    notes: tuple[str, ...] = ()  # what the user should know of how the data were read
    group_names: tuple[str, ...] = ()  # by their number, where they have any

    targets: Targets = field(init=False)  # their kind

    def __post_init__(self) -> None:
        vars(self)["targets"] = kind_of_targets(self.y, self.classes)  # as the class is frozen
        _check_inputs(self)
        _check_labels(self)
        if self.group is not None and self.part is not None:
            _check_groups(self)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def cells(self) -> Tensor:
        """The samples of a table, or others that are one tensor in memory."""
        if not isinstance(self.x, Tensor):
            raise FedtailorError(
                f"The samples of {self.name!r} are no table: they have several inputs, or are on a disk."
            )
        return self.x

    def units(self) -> tuple[Ints, Ints]:
        """Find the units of a partition: single samples, or groups, where equal ones of two clients are different.

        Returns each sample's unit, and each unit's first sample.
        """
        if self.group is None:
            each = np.arange(len(self.y))
            return each, each
        _, group = np.unique(self.group.numpy(), return_inverse=True)
        client = 0 if self.client is None else self.client.numpy()
        _, first, units = np.unique(
            group * max(len(self.client_names), 1) + client, return_index=True, return_inverse=True
        )
        return units, first


def kind_of_targets(y: Tensor, classes: tuple[str, ...]) -> Targets:
    """Tell one class a sample from several labels of 0 or 1 (floating-point, as the loss needs them) and numbers."""
    return "numbers" if not classes else "labels" if y.is_floating_point() else "classes"


def without_labels(name: str, x: Inputs, client: Tensor | None = None, client_names: tuple[str, ...] = ()) -> Dataset:
    """Make a data set of samples without labels: it has no classes, and zeros for targets."""
    return Dataset(
        name,
        x,
        torch.zeros(x.shape[:1] if isinstance(x, Tensor) else len(x)),
        (),
        client=client,
        client_names=client_names,
    )


def _check_inputs(data: Dataset) -> None:
    scalar = isinstance(data.x, Tensor) and data.x.ndim == 0
    if scalar or data.y.ndim == 0 or len(data.y) == 0:
        raise FedtailorError(f"The data set {data.name!r} has no samples: it needs at least one.")
    for name in ("x", "part", "client", "group"):
        values = getattr(data, name)
        if values is not None and len(values) != len(data.y):
            raise FedtailorError(
                f"The data set {data.name!r} has {len(data.y)} labels but {len(values)} entries in "
                f"{name!r}: give one of each per sample."
            )
    if data.columns:
        _check_table(data)
        return
    parts = data.x.parts if isinstance(data.x, Several) else (data.x,)
    for part in parts:
        if len(part) != len(parts[0]):
            raise FedtailorError(
                f"The inputs of {data.name!r} have {len(parts[0])} and {len(part)} samples: give each as many."
            )
        if isinstance(part, Tensor):  # others are checked where they are read
            check_samples(data.name, part, alone=len(parts) == 1)


def check_samples(name: str, x: Inputs, alone: bool = True) -> None:
    """Refuse samples of another type or shape than networks take, and NaN. Booleans are not for a single input."""
    if isinstance(x, Several):
        for part in x.parts:
            check_samples(name, part, alone=False)
        return
    kind = x.like if isinstance(x, Lazy) else x
    assert isinstance(kind, Tensor)  # a file has one input
    if kind.dtype == torch.uint8:
        if kind.ndim != 4:
            raise FedtailorError(
                f"The images of {name!r} have shape {(len(x), *kind.shape[1:])}: "
                "give them as (samples, channels, height, width)."
            )
        return
    if kind.dtype == torch.int64 or (kind.dtype == torch.bool and not alone):
        return
    if kind.dtype not in (torch.float32, torch.float64):
        raise FedtailorError(
            f"The features of {name!r} are {kind.dtype}: give int64, float32 or float64 features or uint8 images."
        )
    pieces = [piece for piece in x.split(PIECE) if isinstance(piece, Tensor)]
    bad = torch.cat([(~torch.isfinite(piece)).reshape(len(piece), -1).any(1) for piece in pieces])
    if bad.any():
        raise FedtailorError(
            f"The features of {name!r} are not all finite: {int(bad.sum())} of {len(bad)} samples hold "
            f"NaN or Inf, the first is sample {int(bad.nonzero()[0])}; clean the data first."
        )


def _check_table(data: Dataset) -> None:
    x = data.cells
    if x.dtype != torch.float64 or x.ndim != 2 or x.shape[1] != len(data.columns):
        raise FedtailorError(
            f"The samples of {data.name!r} are {x.dtype} of shape {tuple(x.shape)}: a table of "
            f"{len(data.columns)} columns needs a float64 matrix with one for each."
        )
    for values, column in zip(x.numpy().T, data.columns, strict=True):
        end = len(column.values)
        wrong = np.isinf(values)
        if column.kind == "category":
            wrong |= (values < 0) | (values >= end) | (values != np.floor(values)) & ~np.isnan(values)
        if wrong.any():
            needed = "finite numbers" if column.kind == "number" else f"whole numbers from 0 to {end - 1}"
            raise FedtailorError(
                f"The column {shown(column.name)} of {data.name!r} has {values[wrong.argmax()]:g} in sample "
                f"{int(wrong.argmax())}: it needs {needed}, or nothing where a cell is missing."
            )


def _check_labels(data: Dataset) -> None:
    if data.y.is_floating_point():
        if data.classes and data.y.dim() == 2:
            _check_multi_label(data)
        elif data.classes:
            raise FedtailorError(f"The labels of {data.name!r} are fractions: classes need whole numbers.")
        if not torch.isfinite(data.y).all():
            raise FedtailorError(f"The targets of {data.name!r} hold NaN or Inf: clean the data first.")
    elif not data.classes:
        raise FedtailorError(f"The labels of {data.name!r} are whole numbers: name their classes.")
    for what, values, end in (
        ("labels", None if data.y.is_floating_point() else data.y, len(data.classes)),
        ("parts", data.part, 3),
        ("clients", data.client, len(data.client_names)),
        ("groups", data.group if data.group_names else None, len(data.group_names)),
    ):
        if values is None:
            continue
        low, high = int(values.min()), int(values.max())
        if values.ndim != 1 or low < 0 or high >= end:
            raise FedtailorError(
                f"The {what} of {data.name!r} go from {low} to {high} in shape {tuple(values.shape)}: "
                f"each sample needs one number from 0 to {end - 1}."
            )


def _check_multi_label(data: Dataset) -> None:
    if data.y.shape[1] != len(data.classes) or not ((data.y == 0) | (data.y == 1)).all():
        raise FedtailorError(
            f"The labels of {data.name!r} have shape {tuple(data.y.shape)} for {len(data.classes)} classes: give a 0 "
            "or 1 for each class and sample."
        )


def _check_groups(data: Dataset) -> None:
    """Refuse a split with samples of one group in two of its parts."""
    assert data.part is not None
    units, first = data.units()
    if len(bad := np.flatnonzero(data.part.numpy() != data.part.numpy()[first[units]])):
        raise FedtailorError(
            f"A group of {data.name!r} has samples in more than one part of the split (sample {bad[0]} is of another "
            f"than sample {first[units][bad[0]]}): give each its own group, or put the group into one part."
        )


# --- a data set before it is read ---


@dataclass(frozen=True)
class DataInfo:
    """A data set of the catalogue."""

    name: str
    description: str
    classes: int
    files: tuple[str, ...] = ()  # relative to the data directory
    source: str = ""  # where they are published
    bundled: bool = False  # comes with fedtailor: needs no files
    variants: str = ""  # what may follow the name after a colon
    also: tuple[tuple[str, ...], ...] = ()  # other sets of files that do as well


Reader = Callable[[DataInfo, Path, str], Dataset]  # (info, data directory, variant)
DataSets = tuple[tuple[DataInfo, Reader], ...]


def data_dir(directory: str | Path | None = None) -> Path:
    """Return the directory of the data sets: the one given, else FEDTAILOR_DATA, else `data`."""
    return Path(directory or os.environ.get("FEDTAILOR_DATA") or "data")


def found(info: DataInfo, directory: str | Path | None = None) -> bool:
    """Find out whether all files of this data set are there, in one of the forms that are read."""
    root = data_dir(directory)
    return any(all(there(root / file) for file in files) for files in (info.files, *info.also))


def there(path: Path) -> Path | None:
    """Find this file, or the same one without its .gz; None if there is neither."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    return next((candidate for candidate in (path, plain) if candidate.exists()), None)


def require(info: DataInfo, root: Path) -> None:
    """Refuse to go on without the files of this data set."""
    if not found(info, root):
        missing = ", ".join(file for file in info.files if not there(root / file))
        raise FedtailorError(
            f"The data set {info.name!r} is missing: get {missing} from {info.source} and put that "
            f"under {root} (or name another directory with --data-dir or FEDTAILOR_DATA)."
        )
