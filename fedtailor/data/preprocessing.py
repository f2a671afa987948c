"""Preprocessing of tables, agreed on as a federation would: each client declares a few facts about its own training
samples, and the constants follow from these alone.

Numbers are standardised and categories one-hot encoded with the agreed constants, to the bits of scikit-learn's
transformers. All that is here is plain data: it is part of a run's record and of every model file.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, sqrt
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedtailor._common.errors import FedtailorError, listed, shown
from fedtailor.data.columns import Column, Kind

How = Literal["federated", "per-client", "none"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
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


@dataclass(frozen=True, eq=False)
class ColumnOfClients:
    """The facts of one column of many clients, as arrays with an entry for each client."""

    column: Column
    count: Ints
    missing: Ints
    mean: Floats
    squares: Floats
    values: Ints  # of a category: the numbers of each client's values, client by client
    ends: Ints  # where those of a client end

    def of(self, client: int) -> ColumnFacts:
        """The facts that one client declares."""
        own = self.values[self.ends[client - 1] if client else 0 : self.ends[client]].tolist()
        return ColumnFacts(
            name=self.column.name,
            kind=self.column.kind,
            count=int(self.count[client]),
            missing=int(self.missing[client]),
            mean=float(self.mean[client]),
            squares=float(self.squares[client]),
            values=tuple(sorted(self.column.values[value] for value in own)),
        )

    def merged(self, clients: int) -> ColumnFacts:
        """Merge the facts of the first clients."""
        values = np.unique(self.values[: self.ends[clients - 1]]).tolist()
        return _merged(
            self.column,
            zip(self.count[:clients].tolist(), self.mean.tolist(), self.squares.tolist(), strict=False),
            int(self.missing[:clients].sum()),
            (self.column.values[value] for value in values),
        )


@dataclass(frozen=True, eq=False)
class FactsOfClients(Sequence[Facts]):
    """What each client declares of its training samples. A client's facts are made when they are asked for: those of a
    million clients would fill the memory."""

    columns: tuple[ColumnOfClients, ...]

    def __len__(self) -> int:
        return len(self.columns[0].count)

    @overload
    def __getitem__(self, key: int) -> Facts: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Facts, ...]: ...
    def __getitem__(self, key: int | slice) -> Facts | tuple[Facts, ...]:
        clients = range(len(self))[key]
        if isinstance(clients, range):
            return tuple(self[client] for client in clients)
        return tuple(column.of(clients) for column in self.columns)

    def agreed(self, clients: int, how: How, ignored: Sequence[str]) -> Preprocessing:
        """Make the constants of a federation of the first clients."""
        return _agreed([column.merged(clients) for column in self.columns], how, ignored)


def facts_of_clients(x: Floats, sizes: Ints, columns: Sequence[Column], rare: int = 1) -> FactsOfClients:
    """Compute what clients declare of their training samples, which are so many rows of each: nothing that fewer than
    `rare` of a client's samples have."""
    return FactsOfClients(
        tuple(_facts(values, sizes, column, rare) for values, column in zip(x.T, columns, strict=True))
    )


def facts(x: Floats, columns: Sequence[Column], rare: int = 1) -> Facts:
    """Compute what one client declares of its training samples."""
    return facts_of_clients(x, np.array([len(x)]), columns, rare)[0]


def _facts(values: Floats, sizes: Ints, column: Column, rare: int) -> ColumnOfClients:
    client = np.arange(len(sizes)).repeat(sizes)
    there = ~np.isnan(values)
    present, of = values[there], client[there]
    count = np.bincount(of, minlength=len(sizes))
    missing, mean, squares = sizes - count, np.zeros(len(sizes)), np.zeros(len(sizes))
    none, ends = np.zeros(0, np.int64), np.zeros(len(sizes), np.int64)
    if column.kind == "category":
        width = max(len(column.values), 1)
        found, times = np.unique(of * width + present.astype(np.int64), return_counts=True)
        owner, codes = np.divmod(found[times >= rare], width)
        ends = np.searchsorted(owner, np.arange(len(sizes)), side="right")
        return ColumnOfClients(column, count, missing, mean, squares, codes, ends)
    count[count < rare] = 0
    starts = np.searchsorted(of, np.arange(len(sizes)))
    with np.errstate(over="ignore", invalid="ignore"):
        for n in np.unique(count[count > 0]).tolist():  # clients with as many cells together, in rows of their own
            alike = (count == n).nonzero()[0]
            cells = present[starts[alike, None] + np.arange(n)]
            mean[alike] = cells.mean(axis=1)
            away = cells - mean[alike, None]
            squares[alike] = (away**2).sum(axis=1) - away.sum(axis=1) ** 2 / n
    if not (np.isfinite(mean).all() and np.isfinite(squares).all()):
        raise _too_large(column.name)
    return ColumnOfClients(column, count, missing, mean, squares.clip(min=0.0), none, ends)


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
    merged = []
    for name, first in tables[0].items():
        theirs = [table[name] for table in tables]
        each = ((one.count, one.mean, one.squares) for one in theirs)
        values = (value for one in theirs for value in one.values)
        merged.append(_merged(Column(name, first.kind), each, sum(one.missing for one in theirs), values))
    return _agreed(merged, how, ignored)


def _agreed(merged: Sequence[ColumnFacts], how: How, ignored: Sequence[str]) -> Preprocessing:
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


def _merged(
    column: Column, each: Iterable[tuple[int, float, float]], missing: int, values: Iterable[str]
) -> ColumnFacts:
    """Merge all clients' counts, means and squares of one column, in their order (Chan, Golub, LeVeque 1979)."""
    count, mean, squares = 0, 0.0, 0.0
    for n, own_mean, own_squares in each:
        if n:
            away, total = own_mean - mean, count + n
            mean += away * n / total
            squares += own_squares + away * away * count * n / total
            count = total
    if not isfinite(squares):
        raise _too_large(column.name)
    return ColumnFacts(
        name=column.name,
        kind=column.kind,
        count=count,
        missing=missing,
        mean=mean,
        squares=squares,
        values=tuple(sorted({*values})),
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
