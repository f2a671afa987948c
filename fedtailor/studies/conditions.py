"""Methods under conditions that are not theirs to choose: a table of each over attacks, or over privacy budgets."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any

from fedtailor.experiment import NONE
from fedtailor.studies.measures import client_values
from fedtailor.studies.summary import Line, Summary
from fedtailor.training.metrics import Metric

# Settings that make another question of a run: lines that differ in them are not chosen from by validation data.
ALONG = {"attack": "under attack", "epsilon": "over the privacy budget ε"}
DEFENDED = ("attack", "aggregation")
WITHIN = 0.03  # of the method's result without an attack, as a mean: what a defence is expected to keep


@dataclass(frozen=True)
class Conditions:
    """The results of lines that differ in one condition alone: a row for each, a column for each value of it.

    `kept` marks results under attack that stay within three points of the method's plain mean without one.
    """

    along: str
    columns: list[str]
    rows: dict[str, list[float | None]]
    kept: dict[str, list[bool]]
    metric: Metric

    @property
    def title(self) -> str:
        return f"{self.metric.title.capitalize()} {ALONG[self.along]}"

    @property
    def caption(self) -> str:
        """The text below the table."""
        if self.along == "epsilon":
            return "∞ is the same run without privacy. A smaller ε is more private."
        return (
            "Of the clients that are honest in all columns. ✓: at most "
            f"{100 * WITHIN:g} points below the same method with the plain mean and no attack."
        )

    def text(self, row: str, place: int) -> str:
        """Format a cell."""
        value = self.rows[row][place]
        return "–" if value is None else self.metric.text(value) + (" ✓" if self.kept[row][place] else "")


def conditions(summary: Summary) -> Iterator[Conditions]:
    """Yield a table for each condition in which the lines of a comparison differ."""
    for along in ALONG:
        values = list(dict.fromkeys(value_of(line, along) for line in summary.lines))
        if along == "epsilon":
            values.sort(key=lambda value: -inf if value == "∞" else -float(value))
        else:
            values.sort(key=lambda value: value != NONE)
        if len(values) > 1:
            yield _table(summary, along, values)


def value_of(line: Line, along: str) -> Any:
    """The value of a condition, in words; none is the first."""
    value = getattr(line.results[0].experiment, along)
    if along == "epsilon":
        return "∞" if value in (None, "inf") else f"{value:g}"
    return NONE if value is None else value


def without(line: Line, *names: str) -> str:
    """The title of a line without these settings."""
    rest = [f"{name}={value}" for name, value in line.settings.items() if name not in names]
    return ", ".join([line.name, *rest])


def _table(summary: Summary, along: str, values: list[Any]) -> Conditions:
    rows: dict[str, list[float | None]] = {}
    plain: dict[str, float | None] = {}
    found = {line.title: _value(line, summary) for line in summary.lines}
    for line in summary.lines:
        row = rows.setdefault(without(line, along), [None] * len(values))
        row[values.index(value_of(line, along))] = found[line.title]
        if (experiment := line.results[0].experiment).attack is None and experiment.aggregation == "mean":
            plain[without(line, *DEFENDED)] = found[line.title]
    kept = {title: [False] * len(values) for title in rows}
    for line in summary.lines if along == "attack" and summary.metric.percent else ():
        reference, value = plain.get(without(line, *DEFENDED)), found[line.title]
        if reference is not None and value is not None and value_of(line, along) != NONE:
            kept[without(line, along)][values.index(value_of(line, along))] = value >= reference - WITHIN
    return Conditions(along, values, rows, kept, summary.metric)


def _value(line: Line, summary: Summary) -> float | None:
    """The result of a line over the clients that no line has as hostile ones: with and without an attack it is then of
    the same clients. (An average over samples stays as it is.)"""
    if line.results[0].experiment.evaluation.average != "client":
        return line.value
    means = []
    for result in line.results:
        seed = result.experiment.seed
        others = (other for each in summary.lines for other in each.results if other.experiment.seed == seed)
        hostile = {client for other in others for client in other.hostile}
        if honest := [value for client, value in client_values(result).items() if client not in hostile]:
            means.append(fmean(honest))
    return fmean(means) if means else None
