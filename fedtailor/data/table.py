"""The user's own table: a CSV file with a header, a label column and perhaps a client column."""

import csv
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.arrays import encode
from fedtailor.data.dataset import Dataset, without_labels
from fedtailor.errors import FedtailorError

LABELS = ("label", "y", "class", "target")
CLIENT = "client"
Rows = list[tuple[int, list[str]]]  # the line in the file, and its cells


def read_csv(path: Path, label_column: str | None, client_column: str | None, labelled: bool = True) -> Dataset:
    """Read a table. Columns are features, but for the client's and the label's (needed only if `labelled`)."""
    header, rows = _rows(path)
    needed = labelled or label_column or any(name in header for name in LABELS)
    label = _label_column(path, header, label_column) if needed else None
    client = client_column or (CLIENT if CLIENT in header else None)
    if client is not None and client not in header:
        raise FedtailorError(f"The file {path} has no column {client!r}: its columns are {', '.join(header)}.")
    features = [column for column in header if column not in (label, client)]
    if not features:
        raise FedtailorError(f"The file {path} has no columns but label and client: it needs features.")
    x = _features(path, header, rows, features)
    clients, names = _names(path, header, rows, client) if client else (None, ())
    if label is None:
        return without_labels(path.name, x, clients, names)
    y, classes = _names(path, header, rows, label)
    return Dataset(path.name, x, y, classes, client=clients, client_names=names)


def _rows(path: Path) -> tuple[list[str], Rows]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [cell.strip() for cell in next(reader, [])]
            rows = [(reader.line_num, cells) for cells in reader if cells]
    except (UnicodeDecodeError, csv.Error) as error:
        raise FedtailorError(f"The file {path} is not a CSV text in UTF-8 ({error}): save it as one.") from None
    if not header or all(_is_number(cell) for cell in header):
        raise FedtailorError(f"The file {path} has no header: its first line must name the columns.")
    if len(set(header)) < len(header):
        raise FedtailorError(f"The file {path} names a column twice in {', '.join(header)}: name each differently.")
    for line, cells in rows:
        if len(cells) != len(header):
            raise FedtailorError(
                f"Line {line} of {path} has {len(cells)} cells, but the header {len(header)}: mend that line."
            )
    if not rows:
        raise FedtailorError(f"The file {path} has a header but no samples: it needs at least one line below it.")
    return header, rows


def _label_column(path: Path, header: list[str], asked: str | None) -> str:
    label = asked or next((name for name in LABELS if name in header), None)
    if label is None or label not in header:
        wanted = f"label column {asked!r}" if asked else f"label column (one of {', '.join(LABELS)})"
        raise FedtailorError(
            f"The file {path} has no {wanted}: its columns are {', '.join(header)}; "
            "say which one holds the labels with --label-column."
        )
    return label


def _names(path: Path, header: list[str], rows: Rows, column: str) -> tuple[Tensor, tuple[str, ...]]:
    index = header.index(column)
    for line, cells in rows:
        if not cells[index].strip():
            raise FedtailorError(f"Line {line} of {path} has nothing in column {column!r}: fill it in.")
    values = np.array([cells[index].strip() for _, cells in rows])
    return encode(values, f"The values in column {column!r} of {path}")


def _features(path: Path, header: list[str], rows: Rows, columns: list[str]) -> Tensor:
    indices = [header.index(column) for column in columns]
    try:
        x = np.array([[float(cells[index]) for index in indices] for _, cells in rows])
    except ValueError:
        line, column, cell = next(
            (line, header[index], cells[index])
            for line, cells in rows
            for index in indices
            if not _is_number(cells[index])
        )
        raise FedtailorError(
            f"Line {line} of {path} has {cell!r} in column {column!r}: features must be numbers (if it names the "
            f"client, say --client-column {column})."
        ) from None
    return torch.from_numpy(x).float()


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
