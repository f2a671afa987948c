"""A data set as every loader returns it: all samples in two tensors, with the authors' split and clients.

A `Dataset` is checked when it is made. So the code that uses it need not check its samples again.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedtailor.errors import FedtailorError
from fedtailor.metric import Targets

TRAIN, VALIDATION, TEST = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples with their classes and, where known, the authors' split and the natural clients."""

    name: str
    x: Tensor  # uint8 images (n, channels, height, width), or features (n, ...), float32 or float64
    y: Tensor  # int64 class numbers, float targets (regression), or float labels of 0 and 1 (n, classes)
    classes: tuple[str, ...]  # names in the order of the class numbers or labels; () for regression
    part: Tensor | None = None  # uint8: TRAIN, VALIDATION or TEST in the authors' own split
    client: Tensor | None = None  # int64: index into client_names
    client_names: tuple[str, ...] = ()
    group: Tensor | None = None  # int64: samples of one group are partitioned and split together

    def __post_init__(self) -> None:
        _check_lengths(self)
        _check_features(self)
        _check_labels(self)
        _check_groups(self)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def targets(self) -> Targets:
        """The kind of the targets."""
        return kind_of_targets(self.y, self.classes)


def kind_of_targets(y: Tensor, classes: tuple[str, ...]) -> Targets:
    """Tell one class a sample from several labels of 0 or 1 (floating-point, as the loss needs them) and numbers."""
    return "numbers" if not classes else "labels" if y.is_floating_point() else "classes"


def without_labels(name: str, x: Tensor, client: Tensor | None = None, client_names: tuple[str, ...] = ()) -> Dataset:
    """Make a data set of samples without labels: it has no classes, and zeros for targets."""
    return Dataset(name, x, torch.zeros(x.shape[:1]), (), client=client, client_names=client_names)


def _check_lengths(data: Dataset) -> None:
    if data.x.ndim == 0 or data.y.ndim == 0 or len(data.y) == 0:
        raise FedtailorError(f"The data set {data.name!r} has no samples: it needs at least one.")
    for field in ("x", "part", "client", "group"):
        values = getattr(data, field)
        if values is not None and len(values) != len(data.y):
            raise FedtailorError(
                f"The data set {data.name!r} has {len(data.y)} labels but {len(values)} entries in "
                f"{field!r}: give one of each per sample."
            )


def _check_features(data: Dataset) -> None:
    if data.x.dtype == torch.uint8:
        if data.x.ndim != 4:
            raise FedtailorError(
                f"The images of {data.name!r} have shape {tuple(data.x.shape)}: "
                "give them as (samples, channels, height, width)."
            )
        return
    if data.x.dtype not in (torch.float32, torch.float64):
        raise FedtailorError(
            f"The features of {data.name!r} are {data.x.dtype}: give float32 or float64 features or uint8 images."
        )
    bad = (~torch.isfinite(data.x)).reshape(len(data.x), -1).any(dim=1)
    if bad.any():
        raise FedtailorError(
            f"The features of {data.name!r} are not all finite: {int(bad.sum())} of {len(bad)} samples hold "
            f"NaN or Inf, the first is sample {int(bad.nonzero()[0])}; clean the data first."
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
    else:
        _check_range(data, "labels", data.y, len(data.classes))
    if data.part is not None:
        _check_range(data, "parts", data.part, 3)
    if data.client is not None:
        _check_range(data, "clients", data.client, len(data.client_names))


def _check_multi_label(data: Dataset) -> None:
    if data.y.shape[1] != len(data.classes) or not ((data.y == 0) | (data.y == 1)).all():
        raise FedtailorError(
            f"The labels of {data.name!r} have shape {tuple(data.y.shape)} for {len(data.classes)} classes: give a 0 "
            "or 1 for each class and sample."
        )


def _check_range(data: Dataset, what: str, values: Tensor, end: int) -> None:
    low, high = int(values.min()), int(values.max())
    if values.ndim != 1 or low < 0 or high >= end:
        raise FedtailorError(
            f"The {what} of {data.name!r} go from {low} to {high} in shape {tuple(values.shape)}: "
            f"each sample needs one number from 0 to {end - 1}."
        )


def _check_groups(data: Dataset) -> None:
    if data.group is None:
        return
    _, first, group = np.unique(data.group.numpy(), return_index=True, return_inverse=True)
    for field in ("part", "client"):
        values = getattr(data, field)
        if values is not None and not torch.equal(values, values[first[group]]):
            raise FedtailorError(
                f"A group of {data.name!r} has samples of more than one {field}: give each its own group."
            )
