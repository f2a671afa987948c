"""Tables for a model that was trained on another: columns are matched by name, categories by their values."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedtailor._common.errors import FedtailorError, listed, shown
from fedtailor.data.columns import Column
from fedtailor.data.dataset import Dataset
from fedtailor.data.preprocessing import Floats, PreparedColumn, Preprocessing


def match(
    table: Preprocessing,
    x: Floats,
    columns: Sequence[Column],
    name: str,
    strict: bool | NDArray[np.bool_] = True,
    rare: int = 1,
) -> tuple[Floats, list[str]]:
    """Put the samples of the data set `name` into the columns of a preprocessing, categories with its numbers.

    Return the samples, in which -1 is a value that training did not have, and notes for the user.

    `strict` refuses missing cells in columns in which training had none, of all samples or of some. Values that fewer
    than `rare` training samples of each client have are not named.
    """
    places = {column.name: place for place, column in enumerate(columns)}
    _check_names(table, list(places), name)
    matched, notes = x[:, [places[column.name] for column in table.columns]], []
    for place, ours in enumerate(table.columns):
        theirs, values = columns[places[ours.name]], matched[:, place]
        if theirs.kind != ours.kind:
            raise FedtailorError(
                f"{name!r} has {shown(ours.name)} as a {theirs.kind}, but the model was trained with a {ours.kind}: "
                f"say --columns {shown(f'{ours.name}={ours.kind}')}."
            )
        absent = np.isnan(values)
        if absent.any() and not ours.missing:
            _refuse_missing(ours, absent & strict, name)
            notes.append(_missing(ours, int(absent.sum()), name))
        if ours.kind == "category":
            number = {value: code for code, value in enumerate(ours.values)}
            codes = np.array([number.get(value, -1) for value in theirs.values], dtype=np.float64)
            values[~absent] = codes[values[~absent].astype(np.int64)]
            strange = [value for value in theirs.values if value not in number]
            notes += _unseen(ours, int((values == -1).sum()), strange, name, rare)
    return matched, notes


def with_columns(dataset: Dataset, table: Preprocessing) -> Dataset:
    """Take samples without names for those of a table, with its columns in their order."""
    if dataset.columns:
        return dataset
    return replace(dataset, columns=columns_of(table, dataset.cells, dataset.name), x=dataset.cells.double())


def columns_of(table: Preprocessing, x: Tensor, name: str) -> tuple[Column, ...]:
    """Return the columns of a table, for samples that have as many."""
    if x.ndim != 2 or x.shape[1] != len(table.columns):
        shape, names = "×".join(map(str, x.shape[1:])), [column.name for column in table.columns]
        raise FedtailorError(
            f"The samples of {name!r} have the shape {shape}, but the model was trained with the {len(names)} columns "
            f"{listed(names)}: give these in this order, or a table that names them."
        )
    return tuple(Column(column.name, column.kind, column.values) for column in table.columns)


def without_columns(dataset: Dataset) -> Dataset:
    """Take a table for plain samples, if it has nothing but numbers."""
    if any(column.kind != "number" for column in dataset.columns) or dataset.cells.isnan().any():
        raise FedtailorError(
            f"The table {dataset.name!r} has categories or missing cells, but the model was not trained on a table: "
            "give nothing but numbers."
        )
    return replace(dataset, columns=())


def _check_names(table: Preprocessing, given: list[str], name: str) -> None:
    known, there = {column.name for column in table.columns}, set(given)
    for column in table.columns:
        if column.name not in there:
            raise FedtailorError(
                f"{name!r} has no column {shown(column.name)}, which the model was trained with: its columns are "
                f"{listed(given)}."
            )
    for strange in (column for column in given if column not in known):
        raise FedtailorError(
            f"{name!r} has a column {shown(strange)}, which the model was not trained with: leave it out, or say "
            f"--columns {shown(f'{strange}=ignore')}."
        )


def _refuse_missing(column: PreparedColumn, missing: NDArray[np.bool_], name: str) -> None:
    if missing.any():
        raise FedtailorError(
            f"{name!r} has nothing in column {shown(column.name)} in {missing.sum()} samples, the first is sample "
            f"{missing.argmax()}: training had no missing cells there, so fill them in."
        )


def _missing(column: PreparedColumn, count: int, name: str) -> str:
    instead = "the mean" if column.kind == "number" else "none of its values"
    return (
        f"In {name}, cells of {shown(column.name)} are missing ({count}), but not in training: they count as {instead}."
    )


def _unseen(column: PreparedColumn, count: int, strange: list[str], name: str, rare: int) -> Iterator[str]:
    known = f": {listed(strange[:3])}{', …' if len(strange) > 3 else ''}"
    what, known = ("that are rare in training, or not there", "") if rare > 1 else ("that training did not have", known)
    if count:
        cells = f"{count} cell{'' if count == 1 else 's'}"
        yield (
            f"In {name}, cells of {shown(column.name)} have values {what} ({cells}{known}): they count as none of its "
            "values."
        )
