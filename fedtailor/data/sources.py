"""Loading a data set by name (a published one of the catalogue) or by path (the user's own).

The FedProx paper's synthetic(α, β) is made here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from fedtailor._common.errors import FedtailorError, unknown
from fedtailor._common.imports import CODE
from fedtailor.data import (
    arrays,
    cifar,
    digits,
    hugging_face,
    idx,
    images,
    large,
    leaf,
    medmnist,
    natural_groups,
    omniglot,
    own_data,
)
from fedtailor.data.dataset import DataInfo, Dataset, DataSets, Reader
from fedtailor.data.dataset import data_dir as data_root
from fedtailor.data.table import Purpose, TableSettings, column_names, is_table, read_table
from fedtailor.training.streams import numpy_stream

CLIENTS, FEATURES, CLASSES = 30, 60, 10  # of the synthetic data


def catalogue() -> list[DataInfo]:
    """List the data sets that are known by name."""
    return [info for info, _ in DATA_SETS.values()]


def load(
    name: str | Path,
    data_dir: str | Path | None = None,
    *,
    image_size: int | None = None,
    labelled: bool = True,
    regression: bool = False,
    knows: Mapping[str, str] | None = None,
    **settings: Unpack[TableSettings],
) -> Dataset:
    """Read a data set of the catalogue by name, or the user's own npz, table, folder or LEAF's JSON by path.

    `settings` are for a table: `label_column`, `client_column`, `columns` and so on; `image_size` is for a folder. With
    `labelled=False`, data of the user's may come without labels: they then have no classes, and zeros for targets. With
    `regression`, the labels of a table are numbers. `knows` has the kinds of the columns of an earlier table.
    """
    root, name = data_root(data_dir), str(name)
    base, _, variant = name.partition(":")
    if name.startswith(hugging_face.PREFIX):
        place = name.removeprefix(hugging_face.PREFIX)
        return hugging_face.read_hugging_face(place, settings, Purpose(labelled, regression, knows), image_size)
    own = None if base in DATA_SETS else _own_path(name, root)
    json, stored = own is not None and leaf.is_leaf(own), own is not None and large.is_folder(own)
    table, folder = own is not None and is_table(own), own is not None and own.is_dir() and not json and not stored
    kept = own is not None and own_data.is_own(own.name)  # the settings were for what it was made of
    said = next((key for key, value in settings.items() if value not in (None, False)), None)
    if said is not None and not (table or kept):
        option = f"--{said.replace('_', '-')}"
        raise FedtailorError(f"Options like {option} are for CSV files and other tables: leave it out for {name!r}.")
    if image_size is not None and not (folder or kept):
        raise FedtailorError(f"--image-size is for folders of images: leave it out for {name!r}.")
    if own is None:
        info, reader = DATA_SETS[base]
        if variant and not info.variants:
            raise FedtailorError(f"The data set {base!r} has no variants: write {base!r}, not {name!r}.")
        return reader(info, root, variant)
    if stored:
        return arrays.read_npz(own, large.read_folder(own), labelled)
    if json:
        return leaf.read_leaf(own)
    if folder:
        return images.read_folder(own, image_size, labelled)
    return read_table(own, settings, Purpose(labelled, regression, knows)) if table else _read_npz(own, labelled)


def _own_path(name: str, root: Path) -> Path:
    """Find the user's file or folder of this name, here or in the data directory."""
    for path in _places(name, root):
        if path.is_dir() or (path.is_file() and (path.suffix.lower() in (".npz", ".json") or is_table(path))):
            return path
        if path.is_file():
            raise FedtailorError(
                f"The file {path} is neither .npz, .csv, .parquet nor LEAF's .json: these and folders can be read."
            )
    if "/" in name or "\\" in name or Path(name.partition(":")[0]).suffix:
        raise FedtailorError(f"There is no file {name}, neither here nor in {root}: check the path.")
    raise unknown("data set", name, DATA_SETS)


def names_code(name: str, data_dir: str | Path | None = None) -> bool:
    """Find out whether this is `module:name`, and no data set, file or folder."""
    if CODE.fullmatch(name) is None or name.startswith(hugging_face.PREFIX) or name.partition(":")[0] in DATA_SETS:
        return False
    return not any(path.exists() for path in _places(name, data_dir))


def _places(name: str, data_dir: str | Path | None) -> tuple[Path, Path]:
    """Where a file of the user's may be: here, or in the data directory."""
    return Path(name), data_root(data_dir) / name


def table_path(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Find the table of this name; None if it is another kind of data, or not there."""
    return next((path for path in _places(name, data_dir) if is_table(path) and path.is_file()), None)


def _read_npz(path: Path, labelled: bool) -> Dataset:
    contents = arrays.read_arrays(path)
    if own_data.is_own(path.name) or own_data.ABOUT in contents:
        return own_data.read_own(path, contents)
    if medmnist.is_medmnist(contents):
        return medmnist.from_arrays(path.stem, path, contents)
    return arrays.read_npz(path, contents, labelled)


def columns_in(
    data: str, data_dir: str | None, columns: Mapping[str, str | None], settings: Mapping[str, Any]
) -> dict[str, str | None]:
    """Select those of the columns that the table of this name has; none if it is another kind of data."""
    if (path := table_path(data, data_dir)) is None:
        return {}
    header = column_names(path, settings)  # type: ignore[arg-type]
    return {name: column for name, column in columns.items() if column in header}


# --- a data set that is always there ---


def read_synthetic(info: DataInfo, root: Path, variant: str) -> Dataset:
    """Draw Synthetic(α, β) of Li et al. 2020 (also in LEAF): 30 clients, each with a linear model of its own.

    A client has y = argmax(W x + b) with W, b ~ N(u, 1) and u ~ N(0, α), and x ~ N(v, Σ) with v ~ N(B, 1),
    B ~ N(0, β) and Σ = diag(j^-1.2): α says how much models differ between clients, β how much features do.
    As in the authors' code α and β are standard deviations, and client sizes are 50 plus a log-normal number.
    Always the same draw.
    """
    alpha, beta = _parameters(variant or "0.5:0.5")
    rng = numpy_stream(0, "synthetic")
    sizes = 50 + rng.lognormal(4, 2, CLIENTS).astype(np.int64)
    deviation = np.arange(1, FEATURES + 1) ** -0.6
    xs, ys = [], []
    for size in sizes:
        u, b = alpha * rng.standard_normal(), beta * rng.standard_normal()
        weight = rng.normal(u, 1, (FEATURES, CLASSES))
        bias = rng.normal(u, 1, CLASSES)
        x = rng.normal(b, 1, FEATURES) + deviation * rng.standard_normal((size, FEATURES))
        xs.append(x)
        ys.append((x @ weight + bias).argmax(axis=1))
    return Dataset(
        name=f"synthetic:{alpha:g}:{beta:g}",
        x=torch.from_numpy(np.concatenate(xs)).float(),
        y=torch.from_numpy(np.concatenate(ys)),
        classes=tuple(map(str, range(CLASSES))),
        client=torch.from_numpy(np.repeat(np.arange(CLIENTS), sizes)),
        client_names=tuple(map(str, range(CLIENTS))),
    )


def _parameters(variant: str) -> tuple[float, float]:
    try:
        alpha, beta = map(float, variant.split(":"))
    except ValueError:
        alpha = beta = -1.0
    if not (0 <= alpha < float("inf") and 0 <= beta < float("inf")):
        raise FedtailorError(f"'synthetic:{variant}' needs two numbers from 0: write for example 'synthetic:0.5:0.5'.")
    return alpha, beta


SYNTHETIC: DataSets = (
    (
        DataInfo("synthetic", "linear models that differ by client", 10, bundled=True, variants="ALPHA:BETA"),
        read_synthetic,
    ),
)
DATA_SETS: dict[str, tuple[DataInfo, Reader]] = {
    info.name: (info, reader)
    for known in (
        digits.DATA_SETS[:1],
        SYNTHETIC,
        digits.DATA_SETS[1:],
        idx.DATA_SETS,
        cifar.DATA_SETS,
        medmnist.DATA_SETS,
        omniglot.DATA_SETS,
        natural_groups.DATA_SETS,
    )
    for info, reader in known
}
