"""Partitions of the user's own: a function or a CSV file that says which client each sample belongs to."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor._common.errors import FedtailorError, explained, shown
from fedtailor._common.files import checksum
from fedtailor._common.imports import CODE, import_object, object_name
from fedtailor.data.arrays import as_array, encode
from fedtailor.data.csv_file import CsvFile
from fedtailor.data.dataset import Dataset, Ints
from fedtailor.data.partitions import PARTITIONS
from fedtailor.data.shifts import divided
from fedtailor.training.streams import numpy_stream

# Called with (labels, clients, rng). It returns a client for each sample, or the samples of each client.
Assignment = Callable[[Any, int, np.random.Generator], Any]
USUAL = 20  # clients, unless said
MOST_LETTERS = 1_000  # of a client's name


@dataclass(frozen=True)
class Assigned:
    """Each sample's client, -1 for none, and the clients' names."""

    client: Ints
    names: tuple[str, ...]

    @property
    def checksum(self) -> str:
        """A checksum of who has which sample, by which a run knows its partition again."""
        return checksum(self.client.tobytes(), json.dumps(self.names).encode())


def names_code(partition: str) -> bool:
    """Find out whether this is `module:function`, with shifts or without, and not one of ours with a parameter."""
    partition, _ = divided(partition)
    return CODE.fullmatch(partition) is not None and partition.partition(":")[0] not in PARTITIONS


def is_own(partition: "str | Path | Assignment") -> bool:
    """Find out whether a partition is the user's own."""
    return not isinstance(partition, str) or names_code(partition) or partition.lower().endswith((".csv", ".csv.gz"))


def partition_name(partition: "str | Path | Assignment") -> str:
    """Name a partition for the record."""
    return str(partition) if isinstance(partition, str | Path) else object_name(partition)


def assign(dataset: Dataset, partition: "str | Path | Assignment", clients: int | None, seed: int) -> Assigned:
    """Find each sample's client by a partition of the user's own. `clients` is their number, if it is asked for."""
    what = f"The partition {partition_name(partition)}"
    if callable(partition) or names_code(str(partition)):
        function = partition if callable(partition) else import_object(str(partition), "partition")
        if not callable(function):
            raise FedtailorError(f"{what} is not a function of (labels, clients, rng).")
        labels, rng = dataset.y.numpy().copy(), numpy_stream(seed, "partition", "own")
        try:
            given = function(labels, USUAL if clients is None else clients, rng)
        except Exception as error:  # whatever the user's code does
            raise FedtailorError(f"{what} fails: {explained(error)}.") from error
        found = _read_given(given, len(dataset), what)
    else:
        found = _read_file(Path(str(partition)), len(dataset), what)
    if clients not in (None, len(found.names)):
        raise FedtailorError(f"{what} makes {len(found.names)} clients, not {clients}: leave the number out.")
    _check_groups(dataset, found, what)
    return found


def _check_groups(dataset: Dataset, found: Assigned, what: str) -> None:
    units, first = dataset.units()
    if len(torn := np.flatnonzero(found.client != found.client[first][units])):
        sample = int(torn[0])
        raise FedtailorError(
            f"{what} divides a group among clients (samples {int(first[units][sample])} and {sample}): keep each group "
            "together, or leave the groups out."
        )


# --- what a function returns ---


def _read_given(given: Any, samples: int, what: str) -> Assigned:
    if isinstance(given, Mapping):
        return _of_lists(list(given.values()), tuple(map(str, given)), samples, what)
    if isinstance(given, list | tuple) and given and all(np.ndim(part) == 1 for part in given):
        return _of_lists(list(given), tuple(map(str, range(len(given)))), samples, what)
    client = as_array(given, what)
    if client.shape != (samples,):
        raise FedtailorError(
            f"{what} returns values of the shape {client.shape} for {samples} samples: return one client for each, or "
            "a list of the samples of each client."
        )
    if client.dtype.kind == "O" and all(isinstance(name, str) for name in client):
        client = client.astype(str)
    kept = client != -1 if client.dtype.kind == "i" else np.ones(samples, dtype=bool)
    if client.dtype.kind not in "iuU" or (client.dtype.kind == "i" and (client < -1).any()):
        raise FedtailorError(
            f"{what} returns values that are no clients: give each sample a whole number from 0, a name, or -1 to "
            "leave it out."
        )
    if not kept.any():
        raise FedtailorError(f"{what} leaves all samples out: give them to clients.")
    return _named(client[kept], kept, what)


def _named(values: Any, kept: Any, what: str) -> Assigned:
    """Number the clients of the samples that are kept, in the order of their names."""
    if any(not name.strip() or len(name) > MOST_LETTERS for name in map(str, np.unique(values).tolist())):
        raise FedtailorError(f"{what} has a client without a name, or with one of more than {MOST_LETTERS:,} letters.")
    numbers, names = encode(values, f"{what}: its clients")
    client = np.full(len(kept), -1, dtype=np.int64)
    client[kept] = numbers.numpy()
    return Assigned(client, names)


def _of_lists(lists: list[Any], names: tuple[str, ...], samples: int, what: str) -> Assigned:
    client = np.full(samples, -1, dtype=np.int64)
    for number, (name, part) in enumerate(zip(names, lists, strict=True)):
        indices = as_array(part, what)
        if indices.size == 0:
            raise FedtailorError(f"{what} gives the client {shown(name)} no samples: leave it out, or give it some.")
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise FedtailorError(f"{what} gives the client {shown(name)} no list of samples' numbers, as in [0, 5, 7].")
        if len(strange := indices[(indices < 0) | (indices >= samples)]):
            raise FedtailorError(f"{what} names the sample {strange[0]}: they are numbered from 0 to {samples - 1}.")
        unique, times = np.unique(indices, return_counts=True)
        if len(twice := unique[(times > 1) | (client[unique] >= 0)]):
            raise FedtailorError(f"{what} names the sample {twice[0]} twice: give each to one client.")
        client[unique] = number
    _check_complete(client, what)
    if len(set(names)) < len(names) or not all(name.strip() for name in names):
        raise FedtailorError(f"{what} has two clients of the same name, or one without a name: name each differently.")
    return Assigned(client, names)


def _check_complete(client: Ints, what: str) -> None:
    if len(missing := np.flatnonzero(client < 0)):
        raise FedtailorError(
            f"{what} lacks {len(missing)} of {len(client)} samples, the first is sample {missing[0]}: give each to one "
            "client."
        )


# --- a CSV file ---


def _read_file(path: Path, samples: int, what: str) -> Assigned:
    """Read a file with the columns sample and client, a line for each sample in any order."""
    if not path.is_file():
        raise FedtailorError(f"There is no file {path} for the partition: check the path.")
    file = CsvFile.of(path)
    header = file.header()
    if sorted(header) != ["client", "sample"]:
        raise FedtailorError(f"{what} has the columns {', '.join(map(shown, header))}, but it needs sample and client.")
    place, owners, seen = header.index("sample"), [""] * samples, np.full(samples, -1, dtype=np.int64)
    for line, cells in file.rows(header):
        text, name = cells[place].strip(), cells[1 - place].strip()
        if not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) < samples):
            raise FedtailorError(
                f"Line {line} of {path} names the sample {shown(text)}: they are numbered from 0 to {samples - 1}."
            )
        if not name or len(name) > MOST_LETTERS:
            raise FedtailorError(
                f"Line {line} of {path} names no client, or one of more than {MOST_LETTERS:,} letters."
            )
        if seen[number := int(text)] >= 0:
            raise FedtailorError(f"Line {line} of {path} names the sample {number} again: give each to one client.")
        owners[number], seen[number] = name, line
    _check_complete(seen, what)
    numbers, names = encode(owners, f"The clients of {path}")
    return Assigned(numbers.numpy(), names)
