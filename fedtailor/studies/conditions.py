"""Methods under conditions that are not theirs to choose: a table of each over attacks, or over privacy budgets."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fedtailor.experiment import NONE
from fedtailor.metric import Metric
from fedtailor.studies.summary import Line, Summary

# Settings that make another question of a run: lines that differ in them are not chosen from by validation data.
ALONG = {"attack": "under attack", "epsilon": "over the privacy budget ε"}
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
            f"Of the honest clients. ✓: at most {100 * WITHIN:g} points below the same method with the plain mean and "
            "no attack."
        )

    def text(self, row: str, place: int) -> str:
        """Format a cell."""
        value = self.rows[row][place]
        return "–" if value is None else self.metric.text(value) + (" ✓" if self.kept[row][place] else "")


def conditions(summary: Summary) -> Iterator[Conditions]:
    """Yield a table for each condition in which the lines of a comparison differ."""
    for along in ALONG:
        values = list(dict.fromkeys(value_of(line, along) for line in summary.lines))
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
    return ", ".join([line.method, *rest])


def _table(summary: Summary, along: str, values: list[Any]) -> Conditions:
    rows: dict[str, list[float | None]] = {}
    for line in summary.lines:
        row = rows.setdefault(without(line, along), [None] * len(values))
        row[values.index(value_of(line, along))] = line.value
    plain = {
        without(line, "attack", "aggregation"): line.value
        for line in summary.lines
        if line.results[0].experiment.attack is None and line.results[0].experiment.aggregation == "mean"
    }
    kept = {title: [False] * len(values) for title in rows}
    if along == "attack" and summary.metric.percent:
        for line in summary.lines:
            reference, place = plain.get(without(line, "attack", "aggregation")), values.index(value_of(line, along))
            if reference is not None and line.value is not None and values[place] != NONE:
                kept[without(line, along)][place] = line.value >= reference - WITHIN
    return Conditions(along, values, rows, kept, summary.metric)
