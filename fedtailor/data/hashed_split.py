"""The split by content: a hash of a sample says whether it is for training, validation or testing."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from math import isfinite

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.data.arrays import exact_number
from fedtailor.data.cells import number
from fedtailor.data.columns import Column
from fedtailor.data.dataset import PIECE, TEST, TRAIN, VALIDATION, Dataset, Ints
from fedtailor.training.inputs import held, tensors

Codes = NDArray[np.uint64]


def hashed_sides(dataset: Dataset, first: Ints, test: float, validation: float, seed: int) -> Ints:
    """Return each unit's side, of the units with these first samples: by its group's name, or else by its content.

    So a new sample never moves another, equal ones are on the same side, and neither other clients nor the order of
    rows and columns have a say: clients that are read together have the sides that each of them has alone.
    """
    salt = sha256(f"fedtailor split {seed}\n".encode())
    places = []
    for content in _groups(dataset, first) if dataset.group is not None else _samples(dataset):
        salted = salt.copy()
        salted.update(content)
        places.append((int.from_bytes(salted.digest()[:8]) >> 11) * 2.0**-53)  # from 0 to 1, and never 1
    place = np.array(places)
    sides: Ints = np.where(place < test, TEST, np.where(place < test + validation, VALIDATION, TRAIN))
    return sides


def _groups(dataset: Dataset, first: Ints) -> Iterator[bytes]:
    assert dataset.group is not None
    names = dataset.group_names
    for group in dataset.group.numpy()[first].tolist():
        yield _plain(names[group] if names else str(group))


def _samples(dataset: Dataset) -> Iterator[bytes]:
    """Yield the content of each sample: its inputs, and its label."""
    labels = _labels(dataset)
    inputs = _rows(dataset) if dataset.columns else _inputs(dataset)
    return (content + label for content, label in zip(inputs, labels, strict=True))


def _rows(dataset: Dataset) -> Iterator[bytes]:
    """Yield the cells of each row of a table by the names of their columns. Missing ones are left out: a column that
    is empty at one client may not be there at all."""
    columns = sorted(enumerate(dataset.columns), key=lambda pair: pair[1].name)
    names = np.array([_code(column.name.encode("utf-8", "surrogatepass")) for _, column in columns], dtype="<u8")
    codes = [(place, _cell_codes(column)) for place, column in columns]
    for piece in dataset.cells.split(PIECE):
        x = piece.numpy()
        cells = np.empty((*x.shape, 2), dtype="<u8")
        cells[..., 0] = names
        for k, (place, code) in enumerate(codes):
            cells[:, k, 1] = code(x[:, place])
        present = ~np.isnan(x[:, [place for place, _ in columns]])
        for row, there in zip(cells, present, strict=True):
            yield row[there].tobytes()


def _cell_codes(column: Column) -> Callable[[NDArray[np.float64]], Codes]:
    """Make the function from a column's cells to their codes: numbers by value, texts by a hash.

    A category whose text is a number has that number's code: at another client the column may have nothing else.
    """
    if column.kind == "number":
        return _number_codes
    table = np.array([*map(_text_code, column.values), 0], dtype="<u8")  # the last is for missing cells
    return lambda cells: table[np.where(np.isnan(cells), len(table) - 1, cells).astype(np.int64)]


def _number_codes(numbers: NDArray[np.float64]) -> Codes:
    return (np.asarray(numbers, dtype="<f8") + 0.0).view("<u8")  # −0 is 0


def _text_code(text: str) -> int:
    value = next((value for mark in ".," if (value := number(text, mark)) is not None), None)
    if value is not None and value == value:
        return int(_number_codes(np.array([value]))[0])
    return _code(text.encode("utf-8", "surrogatepass"))


def _code(content: bytes) -> int:
    return int.from_bytes(sha256(content).digest()[:8], "little")


def _inputs(dataset: Dataset) -> Iterator[bytes]:
    """Yield the bytes of each sample's inputs, in single precision: so do npz files hold them."""
    for piece in dataset.x.split(PIECE):
        parts = [_single(part) for part in tensors(held(piece))]
        yield from (b"".join(part[sample].tobytes() for part in parts) for sample in range(len(parts[0])))


def _labels(dataset: Dataset) -> Iterator[bytes]:
    """Yield the label of each sample: by the names of its classes, or its numbers."""
    if dataset.targets == "numbers":
        y = dataset.y.numpy().astype("<f8") + 0.0 if dataset.columns else _single(dataset.y)
        return (row.tobytes() for row in y)
    names = [_code(_plain(name)).to_bytes(8, "little") for name in dataset.classes]
    if dataset.targets == "classes":
        return (names[label] for label in dataset.y.tolist())
    return (b"".join(sorted(names[k] for k in row.nonzero().flatten().tolist())) for row in dataset.y)


def _single(x: Tensor) -> NDArray[np.generic]:
    array = x.contiguous().numpy()
    return array.astype("<f4") + np.float32(0) if x.is_floating_point() else array


def _plain(name: str) -> bytes:
    """Write a name; one that is a number by its value: 1, 01 and 1.0 are the same."""
    value = exact_number(name)
    return (str(value) if value is not None and isfinite(value) else name).encode("utf-8", "surrogatepass")
