"""Features that tell something else than they seem to: who the client is, or what the label is."""

import shlex
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fedtailor._common.errors import listed, shown
from fedtailor.data.columns import Column

FIRST = 10_000  # samples in which nearly every column shows that it does not determine the label
REPEATS = 5  # samples of each value, on average, without which a column proves nothing: an id has one
CHANCE = 20.0  # bits by which the labels must have more information than a list of values with their labels
COPY = 0.9999  # correlation of a number with the target from which on it is taken for a copy

Numbers = NDArray[np.float64]
Ints = NDArray[np.int64]


def notes(
    table: str, x: Numbers, columns: Sequence[Column], client: Ints | None, label: str | None, y: NDArray[np.generic]
) -> Iterator[str]:
    """Say which features of a table are functions of the client column, and which give the label away."""
    named = list(zip([column.name for column in columns], x.T, strict=True))
    if client is not None and (names := [name for name, values in named if _tells_the_client(values, client)]):
        which, has = ("columns", "have") if len(names) > 1 else ("column", "has")
        yield (
            f"The {which} {listed(names)} of {table} {has} one value in each client, as a copy of the client column "
            f"has: to leave out what is one, say {_ignore(names)}."
        )
    labels = np.unique(y.ravel(), return_inverse=True)[1].astype(np.int64)
    target = y.ravel().astype(np.float64) if y.dtype.kind == "f" else None
    if label is not None and (names := [name for name, values in named if _tells_the_label(values, labels, target)]):
        which, give = ("columns", "give") if len(names) > 1 else ("column", "gives")
        yield (
            f"The {which} {listed(names)} of {table} {give} the label {shown(label)} away: each value has one label. "
            f"To leave out what is not known before the label, say {_ignore(names)}."
        )


def _ignore(names: Sequence[str]) -> str:
    parts = [f'"{name}=ignore"' if "," in name else f"{name}=ignore" for name in names]
    return f"--columns {shlex.quote(','.join(parts))}"


def _tells_the_client(values: Numbers, client: Ints) -> bool:
    """Find out whether a column has one value in each client, and not the same in all."""
    n_clients = int(client.max()) + 1
    if n_clients < 2 or len(client) < REPEATS * n_clients:
        return False
    of_client = np.full(n_clients, np.nan)
    of_client[client] = values
    return _same(values, of_client[client]) and not _same(values, np.full_like(values, values[0]))


def _same(one: Numbers, other: Numbers) -> bool:
    return np.array_equal(one, other, equal_nan=True)


def _tells_the_label(values: Numbers, labels: Ints, target: Numbers | None) -> bool:
    """Find out whether each value of a column has one label, beyond chance, or the column is the target of a regression
    in another unit. A missing cell is a value too."""
    if target is not None and _is_copy(values, target):
        return True
    for rows in (slice(FIRST), slice(None)):
        found, places = np.unique(values[rows], return_inverse=True)
        of_value = np.empty(len(found), dtype=np.int64)
        of_value[places] = labels[rows]
        if (of_value[places] != labels[rows]).any():
            return False
    share = np.bincount(labels) / len(labels)
    bits, needed = -len(labels) * float((share * np.log2(share)).sum()), len(found) * float(np.log2(len(share)))
    return len(labels) >= REPEATS * len(found) and bits >= needed + CHANCE


def _is_copy(values: Numbers, target: Numbers) -> bool:
    there = ~np.isnan(values)
    values, target = values[there], target[there]
    if len(values) < CHANCE or not (np.ptp(values) and np.ptp(target)):
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(abs(np.corrcoef(values, target)[0, 1]) >= COPY)
