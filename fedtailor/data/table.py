"""The user's own table: a CSV file with a header, a label column and perhaps a client column."""

import csv
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.arrays import encode
from fedtailor.data.dataset import Dataset, without_labels
from fedtailor.data.unpacking import check_size, reading
from fedtailor.errors import FedtailorError, listed, shown

LABELS = ("label", "y", "class", "target")
CLIENT = "client"
LONGEST = 1_000  # characters of a label or of a client's name


def read_csv(path: Path, label_column: str | None, client_column: str | None, labelled: bool = True) -> Dataset:
    """Read a table. Columns are features, but for the client's and the label's (needed only if `labelled`)."""
    with reading(path), path.open(newline="", encoding="utf-8-sig") as file:
        try:
            return _read(path, csv.reader(file), label_column, client_column, labelled)
        except (UnicodeDecodeError, csv.Error) as error:
            raise FedtailorError(f"The file {path} is not a CSV text in UTF-8 ({error}): save it as one.") from None


def _read(path: Path, reader: Any, label_column: str | None, client_column: str | None, labelled: bool) -> Dataset:
    header = _header(path, next(reader, []))
    needed = labelled or label_column or any(name in header for name in LABELS)
    label = _label_column(path, header, label_column) if needed else None
    client = client_column or (CLIENT if CLIENT in header else None)
    if client is not None and client not in header:
        raise FedtailorError(f"The file {path} has no column {client!r}: its columns are {listed(header)}.")
    features = [index for index, column in enumerate(header) if column not in (label, client)]
    if not features:
        raise FedtailorError(f"The file {path} has no columns but label and client: it needs features.")
    x, names = _samples(path, header, reader, features, [column for column in (label, client) if column])
    found = {column: encode(names[column], f"The values in column {column!r} of {path}") for column in names}
    clients, client_names = found[client] if client else (None, ())
    if label is None:
        return without_labels(path.name, x, clients, client_names)
    return Dataset(path.name, x, *found[label], client=clients, client_names=client_names)


def _header(path: Path, cells: list[str]) -> list[str]:
    header = [cell.strip() for cell in cells]
    if not any(header) or all(_is_number(cell) for cell in header):
        raise FedtailorError(f"The file {path} has no header: its first line must name the columns.")
    if len(set(header)) < len(header):
        twice = next(name for name, times in Counter(header).items() if times > 1)
        raise FedtailorError(f"The file {path} names a column twice, {twice!r}: name each differently.")
    return header


def _label_column(path: Path, header: list[str], asked: str | None) -> str:
    label = asked or next((name for name in LABELS if name in header), None)
    if label is None or label not in header:
        wanted = f"label column {asked!r}" if asked else f"label column (one of {', '.join(LABELS)})"
        raise FedtailorError(
            f"The file {path} has no {wanted}: its columns are {listed(header)}; "
            "say which one holds the labels with --label-column."
        )
    return label


def _samples(
    path: Path, header: list[str], reader: Any, features: list[int], named: list[str]
) -> tuple[Tensor, dict[str, list[str]]]:
    """Read all lines: the numbers of the features, and the texts of the named columns."""
    choose = itemgetter(*features) if len(features) > 1 else lambda cells: [cells[features[0]]]
    places = {column: header.index(column) for column in named}
    names: dict[str, list[str]] = {column: [] for column in named}
    rows = []
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            raise FedtailorError(
                f"Line {reader.line_num} of {path} has {len(cells)} cells, but the header {len(header)}: mend that "
                "line."
            )
        for column, index in places.items():
            names[column].append(_name(path, reader.line_num, column, cells[index]))
        chosen = choose(cells)
        try:
            if "_" in "".join(chosen):  # Python would read 1_000
                raise ValueError
            rows.append(np.fromiter(map(float, chosen), np.float64, len(features)))
        except ValueError:
            index = next(index for index in features if not _is_number(cells[index]))
            raise FedtailorError(
                f"Line {reader.line_num} of {path} has {shown(cells[index])} in column {header[index]!r}: features "
                f"must be numbers (if it names the client, say --client-column {header[index]})."
            ) from None
        check_size(path, 8 * len(rows) * len(features))
    if not rows:
        raise FedtailorError(f"The file {path} has a header but no samples: it needs at least one line below it.")
    with np.errstate(over="ignore"):  # what is too large for float32 becomes Inf, which is refused
        return torch.from_numpy(np.stack(rows, dtype=np.float32, casting="same_kind")), names


def _name(path: Path, line: int, column: str, cell: str) -> str:
    if not (name := cell.strip()):
        raise FedtailorError(f"Line {line} of {path} has nothing in column {column!r}: fill it in.")
    if "\0" in name or len(name) > LONGEST:
        raise FedtailorError(
            f"Line {line} of {path} has {shown(name)} in column {column!r}: give a name of at most {LONGEST} "
            "characters."
        )
    return name


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell
