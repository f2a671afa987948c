"""Preprocessing of tables, agreed on as a federation would: each client declares a few facts about its own training
samples, and the constants follow from these alone.

Numbers are standardised and categories one-hot encoded with the agreed constants, to the bits of scikit-learn's
transformers. All that is here is plain data: it is part of a run's record and of every model file.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isfinite, sqrt
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedtailor._common.errors import FedtailorError, listed, shown
from fedtailor.data.columns import Column, Kind

How = Literal["federated", "per-client", "none"]
Floats = NDArray[np.float64]
MOST_COLUMNS = 1_000_000


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ColumnFacts(_Plain):
    """The facts that a client declares of one column of its training samples."""

    name: str
    kind: Kind
    count: int = Field(ge=0, description="cells that are not missing; 0 for numbers that are rare")
    missing: int = Field(ge=0, description="cells that are")
    mean: float = 0.0
    squares: float = Field(0.0, ge=0, description="sum of squares about the mean")
    values: tuple[str, ...] = Field((), description="of a category, sorted, without rare ones")


Facts = tuple[ColumnFacts, ...]


class PreparedColumn(_Plain):
    """A column of a table, and the constants that make features of it."""

    name: str
    kind: Kind
    mean: float = Field(0.0, description="of a number; it stands for missing cells too")
    scale: float = Field(1.0, gt=0, description="of a number: its standard deviation")
    values: tuple[str, ...] = Field((), description="of a category: one feature each")
    missing: bool = Field(False, description="cells were missing in training: a feature says of which samples")


class Preprocessing(_Plain):
    """The way from the columns of a table to the features of a network."""

    how: How
    columns: tuple[PreparedColumn, ...] = Field(min_length=1, max_length=MOST_COLUMNS)
    ignored: tuple[str, ...] = Field((), description="columns of the table that are no features")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise ValueError("two columns have the same name")
        if any((column.kind == "number") == bool(column.values) for column in self.columns):
            raise ValueError("categories have values, and numbers have none")
        if any(len(set(column.values)) < len(column.values) for column in self.columns):
            raise ValueError("a category has the same value twice")
        return self

    @cached_property
    def numbers(self) -> list[int]:
        """The places of the number columns."""
        return [place for place, column in enumerate(self.columns) if column.kind == "number"]

    @cached_property
    def flagged(self) -> list[int]:
        """The places of the number columns of which cells were missing in training."""
        return [place for place in self.numbers if self.columns[place].missing]

    @cached_property
    def categories(self) -> list[int]:
        """The places of the category columns."""
        return [place for place, column in enumerate(self.columns) if column.kind == "category"]

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the features: all numbers, which of them are missing, then each value of each category."""
        numbers = [self.columns[place].name for place in self.numbers]
        flags = [f"{self.columns[place].name} is missing" for place in self.flagged]
        values = [
            feature
            for column in (self.columns[place] for place in self.categories)
            for feature in (
                *(f"{column.name}={value}" for value in column.values),
                *([f"{column.name} is missing"] if column.missing else []),
            )
        ]
        return (*numbers, *flags, *values)

    @property
    def n_features(self) -> int:
        values = sum(len(column.values) + column.missing for column in self.columns if column.kind == "category")
        return len(self.numbers) + len(self.flagged) + values

    def kinds(self) -> dict[str, str]:
        """Return what each column is, as the user would say it."""
        return {**dict.fromkeys(self.ignored, "ignore"), **{column.name: column.kind for column in self.columns}}

    def in_words(self) -> str:
        """List the columns by what they are."""
        parts = []
        if self.numbers:
            parts.append("numbers " + listed([self.columns[place].name for place in self.numbers]))
        if self.categories:
            of = [self.columns[place] for place in self.categories]
            parts.append("categories " + listed([f"{column.name} ({len(column.values)} values)" for column in of]))
        if self.ignored:
            parts.append("ignored " + listed(self.ignored))
        return "; ".join(parts)

    def transform(self, x: Floats) -> Floats:
        """Make features of samples in our columns: categories by their number in `values`, any other number for a value
        that training did not have, and NaN for missing cells."""
        mean = np.array([self.columns[place].mean for place in self.numbers])
        scale = np.array([self.columns[place].scale for place in self.numbers])
        with np.errstate(over="ignore"):
            numbers = (x[:, self.numbers] - mean) / scale
        if (infinite := np.isinf(numbers).any(axis=0)).any():
            raise _too_large(self.columns[self.numbers[int(infinite.argmax())]].name)
        numbers[np.isnan(numbers)] = 0.0  # the mean, after scaling
        pieces: list[NDArray[Any]] = [numbers, np.isnan(x[:, self.flagged])]
        for place in self.categories:
            column, codes = self.columns[place], x[:, [place]]
            pieces.append(codes == np.arange(len(column.values)))
            if column.missing:
                pieces.append(np.isnan(codes))
        # Row by row in memory, whatever the columns are: matrix products have other last bits in another order.
        return np.concatenate(pieces, axis=1, out=np.empty((len(x), self.n_features)))

    def personal(self, own: Facts) -> "Preprocessing":
        """Replace mean and scale by those of one client. The features stay the same."""
        of = {facts.name: facts for facts in own if facts.kind == "number" and facts.count}
        changes = {name: {"mean": facts.mean, "scale": _scale(facts)} for name, facts in of.items()}
        columns = (column.model_copy(update=changes.get(column.name)) for column in self.columns)
        return Preprocessing(how=self.how, columns=tuple(columns), ignored=self.ignored)


def facts(x: Floats, columns: Sequence[Column], rare: int = 1) -> Facts:
    """Compute what a client declares of its training samples: nothing that fewer than `rare` of them have."""
    return tuple(_facts(values, column, rare) for values, column in zip(x.T, columns, strict=True))


def _facts(values: Floats, column: Column, rare: int) -> ColumnFacts:
    present = values[~np.isnan(values)]
    counts: dict[str, Any] = {"count": len(present), "missing": len(values) - len(present)}
    if column.kind == "category":
        codes, times = np.unique(present, return_counts=True)
        found = tuple(sorted(column.values[code] for code in codes[times >= rare].astype(np.int64)))
        return ColumnFacts(name=column.name, kind="category", values=found, **counts)
    if len(present) < max(rare, 1):
        return ColumnFacts(name=column.name, kind="number", count=0, missing=counts["missing"])
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(present.mean())
        away = present - mean
        squares = float((away**2).sum() - away.sum() ** 2 / len(present))
    if not (isfinite(mean) and isfinite(squares)):
        raise _too_large(column.name)
    return ColumnFacts(name=column.name, kind="number", mean=mean, squares=max(squares, 0.0), **counts)


def _too_large(column: str) -> FedtailorError:
    return FedtailorError(f"The column {shown(column)} has numbers that are too large to standardise: scale it.")


def agree(
    declared: Sequence[Facts], how: How = "federated", ignored: Sequence[str] = (), names: Sequence[str] = ()
) -> Preprocessing:
    """Make the constants of a federation from what its clients declare.

    Columns go by name, in the order of the first client. `names` are those of the clients in errors.
    """
    names = names or [f"client {client}" for client in range(len(declared))]
    tables = [{column.name: column for column in theirs} for theirs in declared]
    for client, (name, table) in enumerate(zip(names, tables, strict=True)):
        who = name[:1].upper() + name[1:]
        if len(table) < len(declared[client]):
            raise FedtailorError(f"{who} declares a column twice: name each differently.")
        _check_columns(table, tables[0], who, names[0])
    merged = [_merged([table[column] for table in tables]) for column in tables[0]]
    return Preprocessing(how=how, columns=tuple(_prepared(one, how) for one in merged), ignored=tuple(ignored))


def _check_columns(theirs: Mapping[str, ColumnFacts], first: Mapping[str, ColumnFacts], who: str, one: str) -> None:
    """Refuse columns that are not those of the first client."""
    for name, column in first.items():
        kind, ignored = (shown(f"{name}={what}") for what in (column.kind, "ignore"))
        if name not in theirs:
            raise FedtailorError(
                f"{who} has no column {shown(name)}, which {one} has: add it there, or say columns {ignored} for all."
            )
        if theirs[name].kind != column.kind:
            raise FedtailorError(
                f"{who} has {shown(name)} as a {theirs[name].kind}, but {one} as a {column.kind}: say columns "
                f"{kind}, or {ignored}, for all."
            )
    if strange := [name for name in theirs if name not in first]:
        ignored = shown(f"{strange[0]}=ignore")
        raise FedtailorError(
            f"{who} has a column {shown(strange[0])}, which {one} does not have: say columns {ignored} there, or add "
            "it to the others."
        )


def _merged(declared: Sequence[ColumnFacts]) -> ColumnFacts:
    """Merge one column's facts of all clients, in their order (Chan, Golub, LeVeque 1979)."""
    count, mean, squares = 0, 0.0, 0.0
    for one in declared:
        if one.count:
            away, total = one.mean - mean, count + one.count
            mean += away * one.count / total
            squares += one.squares + away * away * count * one.count / total
            count = total
    if not isfinite(squares):
        raise _too_large(declared[0].name)
    return ColumnFacts(
        name=declared[0].name,
        kind=declared[0].kind,
        count=count,
        missing=sum(one.missing for one in declared),
        mean=mean,
        squares=squares,
        values=tuple(sorted({value for one in declared for value in one.values})),
    )


def _prepared(column: ColumnFacts, how: How) -> PreparedColumn:
    name = shown(column.name)
    if how == "none":
        if column.kind == "category" or column.missing:
            what = "categories" if column.kind == "category" else "missing cells"
            raise FedtailorError(
                f"The column {name} has {what}, of which --preprocessing none makes no numbers: ignore the column, or "
                "leave that setting out."
            )
        return PreparedColumn(name=column.name, kind="number")
    if not (column.values if column.kind == "category" else column.count):
        raise FedtailorError(f"The column {name} is empty, or rare, in the training samples of all clients: ignore it.")
    if column.kind == "category":
        return PreparedColumn(name=column.name, kind="category", values=column.values, missing=column.missing > 0)
    return PreparedColumn(
        name=column.name, kind="number", mean=column.mean, scale=_scale(column), missing=column.missing > 0
    )


def _scale(column: ColumnFacts) -> float:
    """Return the standard deviation; 1 for a column that is constant but for rounding (scikit-learn's rule)."""
    if not column.count:
        return 1.0
    eps, variance = float(np.finfo(np.float64).eps), column.squares / column.count
    rounding = column.count * column.mean * eps
    return 1.0 if variance <= column.count * eps * variance + rounding * rounding else sqrt(variance)
