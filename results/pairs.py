"""Differences between two rows of a table on the same clients: what the sentences of the results page rest on."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, TypeVar

from fedtailor.studies.measures import LEVEL, holm, wilcoxon

HEAD = ("", "difference in points", "standard error", "clients better, worse", "p", "")
Client = TypeVar("Client", bound=Hashable)
Values = Mapping[Client, float]


@dataclass(frozen=True)
class Pair:
    """One row beside another, over the clients that both have: `p` is Wilcoxon's, not yet corrected."""

    title: str
    mean: float
    error: float
    better: int
    worse: int
    p: float

    @classmethod
    def of(cls, title: str, one: Values[Client], other: Values[Client]) -> "Pair":
        """Compare two rows; values are shares, differences are in points."""
        both = [client for client in one if client in other]
        # Rounded, as equal values may differ in the last bit after averaging.
        differences = [round(100 * (one[client] - other[client]), 10) for client in both]
        numbers = range(len(both))
        first, second = ({n: of[both[n]] for n in numbers} for of in (one, other))
        p = wilcoxon(first, second)
        better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
        error = stdev(differences) / len(both) ** 0.5 if len(both) > 1 else float("nan")
        return cls(title, fmean(differences), error, better, worse, 1.0 if p is None else p)

    def verdict(self, p: float) -> str:
        """Say what the corrected p decides."""
        if p >= LEVEL:
            return "not decided"
        # Ranks and means may disagree where a few clients differ by much.
        if (self.mean > 0) != (self.better > self.worse):
            return "not decided"
        return "ahead" if self.mean > 0 else "behind"


def of_clients(clients: Sequence[dict[str, Any]], line: str) -> dict[str, float]:
    """Read a line's values of the clients that were measured."""
    return {client["name"]: value for client in clients if (value := client["values"].get(line)) is not None}


def decided(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs whose corrected p decides that they are ahead."""
    corrected = holm([pair.p for pair in pairs])
    return [pair for pair, p in zip(pairs, corrected, strict=True) if pair.verdict(p) == "ahead"]


def points(value: float) -> str:
    """Write a difference with its sign, with more digits where it is small."""
    return (f"{value:+.3f}" if abs(value) < 0.1 else f"{value:+.2f}").replace("-", "−")


def rows(pairs: Sequence[Pair]) -> Iterator[list[str]]:
    """Write the rows of a table, with p corrected for the number of pairs."""
    for pair, p in zip(pairs, holm([pair.p for pair in pairs]), strict=True):
        said = f"{p:.3f}" if p >= 0.001 else f"{p:.0e}".replace("e-0", "e-")
        error = f"{pair.error:.3f}" if pair.error < 0.1 else f"{pair.error:.2f}"
        yield [pair.title, points(pair.mean), error, f"{pair.better}, {pair.worse}", said, pair.verdict(p)]
