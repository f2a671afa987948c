"""Loading a data set by name (a published one of the catalogue) or by path (the user's own)."""

from collections.abc import Mapping
from csv import reader as csv_reader
from pathlib import Path

from fedtailor.data import arrays, cifar, idx, images, large, leaf, medmnist, omniglot, synthetic, table
from fedtailor.data import info as information
from fedtailor.data.dataset import Dataset
from fedtailor.data.info import DataInfo, Reader
from fedtailor.errors import FedtailorError, unknown

MODULES = (synthetic, idx, cifar, medmnist, omniglot)
DATA_SETS: dict[str, tuple[DataInfo, Reader]] = {
    info.name: (info, reader) for module in MODULES for info, reader in module.DATA_SETS
}


def catalogue() -> list[DataInfo]:
    """List the data sets that are known by name."""
    return [info for info, _ in DATA_SETS.values()]


def load(
    name: str,
    data_dir: str | Path | None = None,
    *,
    label_column: str | None = None,
    client_column: str | None = None,
    image_size: int | None = None,
    labelled: bool = True,
) -> Dataset:
    """Read a data set of the catalogue by name, or the user's own npz, CSV, folder or LEAF's JSON by path.

    `label_column` and `client_column` are for a CSV, `image_size` for a folder. With `labelled=False`, data of the
    user's may come without labels: they then have no classes, and zeros for targets.
    """
    root = information.data_dir(data_dir)
    base, _, variant = name.partition(":")
    own = None if base in DATA_SETS else _own_path(name, root)
    csv, json = (own is not None and own.suffix.lower() == ".csv"), (own is not None and leaf.is_leaf(own))
    stored, folder = own is not None and large.is_folder(own), own is not None and own.is_dir() and not json
    if (label_column or client_column) and not csv:
        raise FedtailorError(f"--label-column and --client-column are for CSV files: leave them out for {name!r}.")
    if image_size is not None and (stored or not folder):
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
    return table.read_csv(own, label_column, client_column, labelled) if csv else _read_npz(own, labelled)


def _own_path(name: str, root: Path) -> Path:
    """Find the user's file or folder of this name, here or in the data directory."""
    for path in (Path(name), root / name):
        if path.is_dir() or (path.is_file() and path.suffix.lower() in (".npz", ".csv", ".json")):
            return path
        if path.is_file():
            raise FedtailorError(
                f"The file {path} is neither .npz nor .csv nor LEAF's .json: these and folders can be read."
            )
    if "/" in name or "\\" in name or Path(name.partition(":")[0]).suffix:
        raise FedtailorError(f"There is no file {name}, neither here nor in {root}: check the path.")
    raise unknown("data set", name, DATA_SETS)


def _read_npz(path: Path, labelled: bool) -> Dataset:
    contents = arrays.read_arrays(path)
    if medmnist.is_medmnist(contents):
        return medmnist.from_arrays(path.stem, path, contents)
    return arrays.read_npz(path, contents, labelled)


def columns_in(data: str, data_dir: str | None, columns: Mapping[str, str | None]) -> dict[str, str | None]:
    """Select those of the columns that the CSV file of this name has; none if it is another kind of data."""
    for path in (Path(data), information.data_dir(data_dir) / data):
        if path.suffix.lower() == ".csv" and path.is_file():
            with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
                header = [cell.strip() for cell in next(csv_reader(file), [])]
            return {name: column for name, column in columns.items() if column in header}
    return {}
