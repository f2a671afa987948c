"""A data set before it is read: its files, where they are published, where they are looked for."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedtailor._common.errors import FedtailorError
from fedtailor.data.dataset import Dataset


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
