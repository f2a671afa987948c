"""The columns of the table that papers print: which there are, and what stands in them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedtailor._common.errors import FedtailorError
from fedtailor._common.text import epsilon_text, human_bytes
from fedtailor.experiment import NONE
from fedtailor.reporting.column_names import METRIC, check_columns
from fedtailor.studies.captions import target_text
from fedtailor.studies.summary import Line, Summary
from fedtailor.training.metrics import LOSS, METRICS, Metric


@dataclass(frozen=True)
class Column:
    """A column by its name in `--columns`, with its header and what it says of a line."""

    name: str
    header: str
    cell: Callable[[Line], str]
    cost: bool = False  # of what a method costs, and not of what it achieves

    @property
    def heading(self) -> list[str]:
        """The header in two lines of about equal length, where it has several words."""
        words = self.header.split()
        halves = [[" ".join(words[:place]), " ".join(words[place:])] for place in range(1, len(words))]
        return min(halves, key=lambda lines: max(map(len, lines)), default=words)


def columns(summary: Summary, chosen: Sequence[str] | None = None) -> list[Column]:
    """The columns of a table, in the order in which they were `chosen`, or all but the other metrics. Those that no
    line has anything for are left out."""
    usual = {column.name: column for column in _usual(summary)}
    if chosen is None:
        return list(usual.values())
    results = [result for line in summary.lines for result in line.results]
    own = dict.fromkeys(name for result in results for name in result.experiment.evaluation.metrics or ())
    check_columns(chosen, list(own))
    metrics = {**METRICS, **{name: Metric(name, more=True) for name in own}}
    deciding = (summary.metric.name, usual[METRIC].header)  # the loss, where no line has the metric
    names = dict.fromkeys(METRIC if name in deciding else name for name in chosen)
    others = {name: _other(metrics[name]) for name in names if name in metrics and _has(metrics[name], summary)}
    found = {**others, **usual}
    made = [found[name] for name in names if name in found]
    if not made:
        raise FedtailorError(
            f"There is nothing to show in the columns {', '.join(chosen)}: here are {', '.join(usual)}."
        )
    return made


def shown_in(chosen: Sequence[Column]) -> Collection[str]:
    """The names of columns, for the caption."""
    return {column.name for column in chosen}


def _usual(summary: Summary) -> list[Column]:
    lines, metric = summary.lines, summary.metric
    found = [Column(METRIC, metric.title, lambda line: _of(line, _spread(metric, line.value, line.value_std)))]
    if all(line.value is None for line in lines):
        found = [Column(METRIC, "loss", lambda line: _of(line, LOSS.text(line.loss)))]
    if any(line.epsilon is not None for line in lines):
        found.append(Column("epsilon", "ε", lambda line: epsilon_text(line.epsilon)))
    if any(line.chosen for line in lines):
        found.append(Column("validation", "validation", _validation))
    if any(line.p is not None for line in lines):
        found.append(Column("vs-best", "vs best", _versus_best))
    if any(line.gain is not None for line in lines):
        over = f"gain over {summary.base_label}"
        found.append(Column("gain", over, lambda line: _spread(metric, line.gain, line.gain_std, "+")))
        found.append(Column("losing", "clients that lose", _losing))
    if any(line.worst_decile is not None for line in lines):
        found.append(Column("worst-decile", "worst decile", lambda line: metric.text(line.worst_decile)))
    if any(line.results[0].experiment.fairness != NONE for line in lines):
        found.append(Column("std", "std over clients", lambda line: metric.text(line.std)))
    if any(line.hostile_value is not None for line in lines):
        found.append(Column("hostile", "hostile clients", lambda line: metric.text(line.hostile_value)))
    if any(line.backdoor is not None for line in lines):
        found.append(Column("backdoor", "backdoor", _backdoor))
    if any(line.failed for line in lines):
        found.append(Column("failed", "clients that failed", _failed))
    if summary.target is not None:
        reached = target_text(summary)
        found.append(Column("rounds", f"rounds to {reached}", _rounds, cost=True))
        if len(lines) > 1:
            found.append(Column("speed-up", "speed-up", _speed_up, cost=True))
        to_target = Column("bytes-to-target", f"bytes to {reached}", lambda line: _bytes(line.bytes_to_target), True)
        found.append(to_target)
        if any(line.clock_to_target is not None for line in lines):
            found.append(Column("clock-to-target", f"virtual time to {reached}", _clock_to_target, cost=True))
    found.append(Column("bytes", "bytes in all", lambda line: _bytes(line.bytes), cost=True))
    if any(line.passes for line in lines):
        found.append(Column("passes", "passes a round", _passes, cost=True))
    found.append(Column("samples-per-second", "samples/s", lambda line: _rate(line.samples_per_second), cost=True))
    return found


def _values(metric: Metric, line: Line) -> list[float]:
    """A metric in the round that counts, of every seed that has it."""
    records = (result.chosen() for result in line.results)
    return [value for record in records if record and (value := metric.of(record)) is not None]


def _has(metric: Metric, summary: Summary) -> bool:
    return any(_values(metric, line) for line in summary.lines)


def _other(metric: Metric) -> Column:
    """A metric that does not decide."""

    def cell(line: Line) -> str:
        found = _values(metric, line)
        return _spread(metric, fmean(found) if found else None, stdev(found) if len(found) > 1 else None)

    return Column(metric.name, metric.title, cell)


def _of(line: Line, text: str) -> str:
    """Say beside a result of how many clients it is, if some were not measured."""
    return f"{text} ({line.of_clients})" if line.missing else text


def _spread(metric: Metric, mean: float | None, std: float | None, sign: str = "") -> str:
    if mean is None:
        return "–"
    text = metric.text(mean, sign).replace("-", "−")
    return text if std is None else f"{text} ± {metric.text(std)}"


def _validation(line: Line) -> str:
    return line.metric.text(line.validation) + (" ✓" if line.chosen else "")


def _versus_best(line: Line) -> str:
    if line.best:
        return "best"
    if line.p is None:
        return "–"
    p = "< 0.001" if line.p < 0.001 else f"{line.p:.3f}" if line.p < 0.1 else f"{line.p:.2f}"
    return f"{p} ≈" if line.like_best else p


def _losing(line: Line) -> str:
    return "–" if line.losing is None else f"{_short(line.losing)} of {line.clients}"


def _backdoor(line: Line) -> str:
    return "–" if line.backdoor is None else f"{100 * line.backdoor:.1f} %"


def _failed(line: Line) -> str:
    return f"{_short(line.failed)} of {len(line.results[0].names)}" if line.failed else "–"


def _rounds(line: Line) -> str:
    """The rounds to the target, and which of several seeds reach it; more than all rounds, if none does."""
    if line.rounds_to_target is None:
        return f"> {max(len(result.rounds) for result in line.results)}"
    some = "" if line.reached == len(line.results) else f" ({line.reached} of {len(line.results)})"
    return _to_target(line.rounds_to_target, line.rounds_to_target_std, _short) + some


def _clock_to_target(line: Line) -> str:
    return _to_target(line.clock_to_target, line.clock_to_target_std, _time)


def _time(seconds: float) -> str:
    """Format a virtual time: exact arithmetic, of which a rounded minute would show too little."""
    size, unit = next((size, unit) for size, unit in ((3600, "h"), (60, "min"), (0, "s")) if seconds >= 2 * size)
    return f"{seconds / (size or 1):.3g} {unit}"


def _to_target(mean: float | None, std: float | None, text: Callable[[float], str]) -> str:
    if mean is None:
        return "–"
    return text(mean) if std is None else f"{text(mean)} ± {text(std)}"


def _speed_up(line: Line) -> str:
    return "–" if line.speed_up is None else f"{_short(line.speed_up)}×"


def _passes(line: Line) -> str:
    return "–" if line.passes is None else _short(line.passes)


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _bytes(count: float | None) -> str:
    return "–" if count is None else human_bytes(count)


def _rate(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:,.0f}"
