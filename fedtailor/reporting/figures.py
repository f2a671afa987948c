"""The figures that every comparison has: learning curves, clients, gains over Local, and each client's data."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from statistics import fmean

import numpy as np

from fedtailor.data.partitions import NATURAL, PARTITIONS, WITHIN, partitions_catalogue
from fedtailor.data.shifts import divided
from fedtailor.engines.result import RunResult
from fedtailor.reporting.axes import Along, Axis, axes
from fedtailor.reporting.marks import Array, Bars, Curve, Figure, Heat, Mark, Panel, Points, Style
from fedtailor.server.records import RoundRecord, counted_classes, joined_in_words
from fedtailor.studies.client_results import same_clients
from fedtailor.studies.conditions import conditions, without
from fedtailor.studies.measures import client_values, individual_gains
from fedtailor.studies.summary import Line, Summary
from fedtailor.training.metrics import LOSS, Metric

POINTS = 250  # of one curve, at most
SHOWN = 200  # clients in one figure, at most
NARROW, ROOMY = 12, 18  # named bars in a panel of which four, or three, stand side by side, at most
WRITTEN = 400  # cells whose values can still be read

Styles = dict[str, Style]
Value = Callable[[RoundRecord], float | None]


def evenly(count: int, most: int) -> list[int]:
    """Choose at most so many of `count` places, evenly spaced, the first and the last among them."""
    return list(range(count)) if count <= most else sorted(set(np.linspace(0, count - 1, most).round().astype(int)))


def samples(result: RunResult) -> Array:
    """Training samples of each client."""
    total: Array = np.array(result.partition["n_train"])
    return total


def in_order(result: RunResult, training: bool = False) -> list[int]:
    """Put the clients in the order of all figures: by their commonest class, so that those who are alike are
    neighbours. With `training`, the new ones are left out. At most SHOWN of them."""
    counts = np.array(result.partition["train"])
    left_out = set(result.partition["new"]) if training else set()
    clients = sorted((c for c in range(len(counts)) if c not in left_out), key=lambda c: (counts[c].argmax(), c))
    return [clients[place] for place in evenly(len(clients), SHOWN)]


# --- learning curves ---


def curves(summary: Summary, styles: Styles, first: Along = "rounds") -> list[Figure]:
    """The metric and the loss over everything that curves can be drawn over, this one first."""
    found = axes(summary)
    order = sorted(found, key=lambda name: name != first)
    return [_curves(summary, styles, found[name]) for name in order]


def _measures(metric: Metric) -> list[tuple[Value, str, str, float]]:
    """What is drawn of a record, with its name and unit: the metric that decides, and the losses."""
    first = (metric.of, f"test {metric.title}", "%" if metric.percent else "", 100 if metric.percent else 1)
    losses: list[tuple[Value, str, str, float]] = [
        (LOSS.of, "test loss", "", 1.0),
        (lambda record: record.train_loss, "training loss", "", 1.0),
    ]
    return [first, *losses[metric.name == LOSS.name :]]


def _curves(summary: Summary, styles: Styles, axis: Axis) -> Figure:
    panels = []
    for of, name, unit, factor in _measures(summary.metric):
        marks = [_curve(line, styles[line.title], axis.along, of, factor) for line in summary.lines]
        shown = [mark for mark in marks if len(mark.y)]
        if shown:
            label = f"{name}, {unit}" if unit else name
            panels.append(
                Panel(
                    f"{name[0].upper()}{name[1:]}", shown, axis.title, label, y_limits=_window(shown) if unit else None
                )
            )
    seeds = any(len(line.results) > 1 for line in summary.lines)
    caption = {
        "rounds": "How the methods learn, round by round.",
        "bytes": "The same curves against what was sent in both directions until then: further left is cheaper. "
        "Methods that send nothing (Local) stand at 0.",
        "time": "The same curves against the time of the rounds, evaluation included, on the machine that ran them.",
        "clock": "The same curves against the virtual time that rounds take by the clients' systems, whatever the "
        "machine that ran them.",
    }[axis.name]
    timeless = [line.label for line in summary.lines if not any(np.isfinite(axis.along(r)).any() for r in line.results)]
    if timeless:
        caption += f" Not here, as they have no virtual clock: {', '.join(timeless)}."
    if came := joined_in_words(summary.lines[0].results[0].partition["joined"]):
        caption += f" {came}: means are over more clients from then on."
    if any(record.missing for line in summary.lines for result in line.results for record in result.rounds):
        caption += " In some rounds not all clients were measured: means there are over fewer clients."
    if seeds:
        caption += " Lines are means over seeds, bands one standard deviation to both sides."
    return Figure(f"curves-{axis.name}", "Learning curves", caption, panels, max(2, len(panels)), tab=axis.tab)


def _curve(line: Line, style: Style, along: Callable[[RunResult], Array], of: Value, factor: float) -> Curve:
    """The mean over the seeds that have come so far, and the spread around it."""
    found: dict[int, list[tuple[float, float]]] = {}
    for result in line.results:
        for record, x in zip(result.rounds, along(result), strict=True):
            if (value := of(record)) is not None and np.isfinite(x):
                found.setdefault(record.round, []).append((float(x), factor * value))
    rounds = sorted(found)
    rounds = [rounds[place] for place in evenly(len(rounds), POINTS)]
    x = np.array([np.mean([x for x, _ in found[round]]) for round in rounds])
    y = np.array([np.mean([y for _, y in found[round]]) for round in rounds])
    spread = np.array([np.std([y for _, y in found[round]], ddof=len(found[round]) > 1) for round in rounds])
    seeds = len(line.results) > 1
    low, high = (y - spread, y + spread) if seeds else (None, None)
    return Curve(x, y, line.label, style, low, high, choice=line.title)


def _window(curves: Sequence[Curve]) -> tuple[float, float]:
    """The range of the curves with a little air, within 0 and 100 %."""
    low = min(np.nanmin(curve.y if curve.low is None else curve.low) for curve in curves)
    high = max(np.nanmax(curve.y if curve.high is None else curve.high) for curve in curves)
    air = max(0.05 * (high - low), 0.5)
    return max(float(low - air), 0.0), min(float(high + air), 100 + air)


# --- clients ---


def clients(summary: Summary, styles: Styles) -> Figure | None:
    """Every client's value of the metric (or loss, where there is none), sorted, a panel for each line. Hostile clients
    have panels of their own."""
    metric = summary.metric if any(line.value is not None for line in summary.lines) else LOSS
    what, unit = metric.title, metric.unit
    drawn = []
    same = same_clients([result for line in summary.lines for result in line.results])
    attacked = any(result.hostile for line in summary.lines for result in line.results)
    for line, hostile in product(summary.lines, (False, True) if attacked else (False,)):
        each = sorted(_of_clients(line, metric, hostile) if same else _of_seeds(line, metric, hostile))
        if not each:
            continue
        heights = np.array([height for height, _, _ in each])
        kept = evenly(len(each), 2 * SHOWN)
        mean = Curve(
            np.array([-0.5, len(kept) - 0.5]), np.full(2, heights.mean()), "mean", Style(dash="dot"), kind="fit"
        )
        names = [each[place][1] for place in kept] if same else []
        bars = Bars(heights[kept], [each[place][2] for place in kept], styles[line.title], names)
        of_clients = f" ({line.of_clients})" if line.missing and not hostile else ""
        title = f"{line.label}, hostile clients" if hostile else line.label
        drawn.append((f"{title}: {heights.mean():.4g}{unit}{of_clients}", line.title, bars, mean))
    if not drawn:
        return None
    ends = [end for _, _, bars, _ in drawn for end in (float(bars.y.min()), float(bars.y.max()))]
    limits = (min(0.0, *ends), 100.0 if metric.percent else max(0.0, *ends))
    panels = [Panel(title, [bars, mean], choice=choice, y_limits=limits) for title, choice, bars, mean in drawn]
    several = any(len(line.results) > 1 for line in summary.lines)
    whose = ", mean over seeds" if several and same else " of one seed" if several else ""
    caption = (
        f"Each bar is the test {what} of one client{whose}, in rising order; the dotted line is their mean. Two "
        "methods with the same mean may treat their worst clients very differently."
    )
    if attacked:
        caption += " Hostile clients are apart: no average counts them."
    most = max(len(bars.names) for _, _, bars, _ in drawn)
    columns = 2 if most > ROOMY else 3 if most > NARROW else min(4, max(3, len(panels)))
    return Figure("clients", f"Every client's {what}{unit and ', %'}", caption, panels, columns)


def _of_seeds(line: Line, metric: Metric, hostile: bool) -> list[tuple[float, str, str]]:
    """Every client of every seed: its value, its name, and what is said of it."""
    found = []
    for result in line.results:
        counts, seed = samples(result), _seed(line, result)
        for client, value in _values(result, metric, hostile).items():
            name = result.names[client]
            found.append((value, name, f"client {name}{seed}, {counts[client]} samples"))
    return found


def _of_clients(line: Line, metric: Metric, hostile: bool) -> list[tuple[float, str, str]]:
    """Every client, mean over seeds. By name: with new clients, numbers differ from seed to seed."""
    values: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    for result in line.results:
        for client, value in _values(result, metric, hostile).items():
            values.setdefault(result.names[client], []).append(value)
            counts.setdefault(result.names[client], samples(result)[client])
    seeds = {name: f", mean over {len(each)} seeds" if len(each) > 1 else "" for name, each in values.items()}
    return [(fmean(each), name, f"client {name}, {counts[name]} samples{seeds[name]}") for name, each in values.items()]


def _values(result: RunResult, metric: Metric, hostile: bool) -> dict[int, float]:
    found = client_values(result, metric, hostile)
    return {client: (100 if metric.percent else 1) * value for client, value in found.items()}


def _seed(line: Line, result: RunResult) -> str:
    return f" of seed {result.experiment.seed}" if len(line.results) > 1 else ""


def gains(summary: Summary, styles: Styles) -> Figure | None:
    """Each client's gain over Local against its number of training samples."""
    base = next((line for line in summary.lines if line.title == summary.base), None)
    if base is None:
        return None
    of_seed = {result.experiment.seed: result for result in base.results}
    metric = summary.metric
    factor, unit = (100, "points") if metric.percent else (1, metric.title)
    marks: list[Mark] = []
    for line in (line for line in summary.lines if line is not base):
        x, y, text = [], [], []
        for result in (result for result in line.results if result.experiment.seed in of_seed):
            counts = samples(result)
            for client, gain in individual_gains(result, of_seed[result.experiment.seed]).items():
                x.append(float(counts[client]))
                y.append(factor * gain)
                text.append(f"{line.label}, client {result.names[client]}{_seed(line, result)}")
        if x:
            kept = evenly(len(x), 3 * SHOWN)
            style = styles[line.title]
            some_x, some_y = np.array(x)[kept], np.array(y)[kept]
            marks.append(Points(some_x, some_y, [text[place] for place in kept], style, line.title, line.label))
            if (fitted := regression(np.array(x), np.array(y))) is not None:
                marks.append(Curve(fitted[0], fitted[1], line.label, style, choice=line.title, kind="fit"))
    if not marks:
        return None
    lower = "" if metric.higher_is_better else " (lower is better: a gain is a fall)"
    what = f"{'points of ' if metric.percent else ''}test {metric.title}{lower}"
    caption = (
        f"Each point is a client: what it gains over {base.label}, in {what}, against its number of "
        "training samples. Below 0 it would have done better alone. The lines are least squares: a falling one says "
        "that clients with little data gain most."
    )
    panel = Panel("", marks, "training samples of the client", f"gain over {base.label}, {unit}")
    return Figure("gains", f"Gain over {base.label}", caption, [panel], columns=1)


def privacy(summary: Summary, styles: Styles) -> Figure | None:
    """The metric over the privacy budget, a curve for each method; the run without privacy as a dotted line."""
    metric, factor = summary.metric, 100 if summary.metric.percent else 1
    found: dict[str, list[Line]] = {}
    for line in (line for line in summary.lines if line.value is not None):
        found.setdefault(without(line, "epsilon"), []).append(line)
    spent = {title: [line for line in lines if line.epsilon] for title, lines in found.items()}
    ends = [line.epsilon for lines in spent.values() for line in lines if line.epsilon]
    if len(set(ends)) < 2:
        return None
    marks: list[Mark] = []
    for title, lines in found.items():
        style = styles[lines[0].title]
        ordered = sorted(spent[title], key=lambda line: line.epsilon or 0.0)
        y, std = (np.array([factor * (of or 0.0) for of in column]) for column in
                  ([line.value for line in ordered], [line.value_std for line in ordered]))  # fmt: skip
        x = np.array([line.epsilon for line in ordered], dtype=float)
        if len(ordered):
            low, high = (y - std, y + std) if std.any() else (None, None)
            marks.append(Curve(x, y, title, style, low, high, choice=lines[0].title))
        for line in (line for line in lines if not line.epsilon):  # without privacy, or nothing leaves
            level = np.full(2, factor * (line.value or 0.0))
            marks.append(
                Curve(np.array([min(ends), max(ends)]), level, title, style, choice=lines[0].title, kind="fit")
            )
    caption = (
        f"The test {metric.title} against the ε that the runs have spent: further left is more private. Level lines "
        "are the same methods without privacy (Local sends nothing, and needs none)."
    )
    label = f"test {metric.title}{', %' if metric.percent else ''}"
    return Figure("privacy", "Over the privacy budget", caption, [Panel("", marks, "ε", label)], columns=1)


def attacked(summary: Summary) -> Figure | None:
    """The metric of the honest clients under each attack, as a matrix."""
    table = next((table for table in conditions(summary) if table.along == "attack"), None)
    if table is None:
        return None
    factor = 100 if table.metric.percent else 1
    values = np.array([[np.nan if v is None else round(factor * v, 2) for v in row] for row in table.rows.values()])
    heat = Heat(list(table.rows), table.columns, {"": values}, f"test {table.metric.title}", written=True)
    return Figure("attacks", table.title, table.caption.split(" ✓")[0], [Panel("", [heat], "attack")], columns=1)


def regression(x: Array, y: Array) -> tuple[Array, Array, float] | None:
    """The least-squares line at its two ends, and the correlation; None where x or y does not vary."""
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    slope, level = np.polyfit(x, y, 1)
    ends = np.array([x.min(), x.max()])
    return ends, level + slope * ends, float(np.corrcoef(x, y)[0, 1])


# --- data ---


def partitions(summary: Summary) -> list[Figure]:
    """Training samples by client and class, for each seed that partitions them differently."""
    of_seed = {r.experiment.seed: r for line in reversed(summary.lines) for r in line.results}
    figures: list[Figure] = []
    known = set()
    for seed, result in sorted(of_seed.items()):
        if (counts := str(result.partition["train"])) not in known:
            known.add(counts)
            figures.append(_partition(seed, result))
    return figures


def _partition(seed: int, result: RunResult) -> Figure:
    order, counts = in_order(result), np.array(result.partition["train"])
    classes = counted_classes(result.partition)
    names = classes or ["all"]
    mark = dict.fromkeys(result.partition["new"], " (new)") | dict.fromkeys(result.hostile, " (hostile)")
    rows = [result.names[client] + mark.get(client, "") for client in order]
    written = len(rows) * len(names) <= WRITTEN
    heat = Heat(rows, names, {"": counts[order]}, "training samples", limits=(0, counts.max()), written=written)
    totals = counts.sum(1)
    how = "each client has"
    if classes:
        how = f"of which class {how}; clients are ordered by their commonest class, here and in all figures below"
    elif result.partition["classes"]:
        how += "; their classes are not known here"
    caption = (
        f"How many training samples {how}. A client has {totals.min()} to {totals.max()} of them, "
        f"{np.median(totals):.0f} in the median. Partition: {partition_in_words(result)}.{left_out(result, order)}"
    )
    panel = Panel("", [heat], "class" if classes else "", "client")
    return Figure(f"partition-seed{seed}", "Who has which data", caption, [panel], columns=1, tab=f"seed {seed}")


def partition_in_words(result: RunResult) -> str:
    """Say how the clients share the samples: by the partition that was used, which need not be the one asked for."""
    spec = result.partition.get("partition") or result.experiment.partition
    if spec is None:  # an older record, of a run that asked for none
        named = list(result.names) != [str(client) for client in range(len(result.names))]
        spec = NATURAL if named else "the default (dirichlet:0.3, or natural where the data name their clients)"
    spec, shifts = divided(spec)
    if shifts:
        return f"{_shared_in_words(spec)}; features shift ({', '.join(shifts)})"
    return _shared_in_words(spec)


def _shared_in_words(spec: str) -> str:
    if spec == NATURAL:
        return f"{spec}, {partitions_catalogue()[NATURAL]}"
    within = "each client that the data itself names divided further: " if spec.startswith(WITHIN) else ""
    name, _, parameter = spec.removeprefix(WITHIN).partition(":")
    if name not in PARTITIONS:
        return spec
    words = PARTITIONS[name].description
    for placeholder in ("ALPHA", "K"):
        words = re.sub(rf"\b{placeholder}\b", parameter, words)
    return f"{spec}, {within}{words}"


def left_out(result: RunResult, order: Iterable[int]) -> str:
    """A note for the caption if not all clients are in a figure."""
    shown, there = len(list(order)), len(result.names)
    return f" Shown are {shown} of {there} clients." if shown < there and there > SHOWN else ""
