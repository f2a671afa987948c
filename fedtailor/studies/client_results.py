"""The clients of a comparison, by name: each one's result with each line, and which line is best for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedtailor.engines.result import RunResult
from fedtailor.server.records import SPLITS, Plain
from fedtailor.studies.captions import missing_in_words
from fedtailor.studies.measures import client_values
from fedtailor.studies.summary import Summary
from fedtailor.training.metrics import LOSS, Metric


@dataclass(frozen=True)
class ClientRow:
    """One client: its samples and its result with each line, mean over seeds; None: it was not measured."""

    name: str
    n_train: float
    n_test: float
    values: tuple[float | None, ...]
    best: tuple[bool, ...]  # the lines that are best for it; none if there is only one
    hostile: bool = False  # its results as a hostile client, which are in no average

    @property
    def title(self) -> str:
        """The name, marked if the results are those of a hostile client."""
        return f"{self.name} (hostile)" if self.hostile else self.name


@dataclass(frozen=True)
class ClientTable:
    """Clients × lines."""

    metric: Metric
    titles: tuple[str, ...]  # of the lines
    labels: tuple[str, ...]  # the same for readers, with the methods' names as their papers write them
    overall: tuple[float | None, ...]  # each line's result, as the comparison's table has it
    rows: tuple[ClientRow, ...]  # in the order of the clients' numbers; at the end those of hostile ones
    seeds: int
    same: bool  # a name stands for the same samples with all seeds
    notes: str = ""  # on lines that are not shown, and on clients that were not measured
    ranked_lines: tuple[int, ...] = ()  # places of the lines of which one may be the best

    def shown(self, value: float | None) -> str:
        """Format a result."""
        return self.metric.text(value)

    @property
    def shown_lines(self) -> tuple[int, ...]:
        """Places of the lines that tables for readers have: those that are ranked; all, where none is."""
        return self.ranked_lines or tuple(range(len(self.titles)))

    @property
    def shown_rows(self) -> list[ClientRow]:
        """The rows that tables for readers have: not those of hostile clients of lines that are not shown."""
        shown = self.shown_lines
        return [row for row in self.rows if not row.hostile or any(row.values[n] is not None for n in shown)]

    @property
    def leader(self) -> int:
        """The line that is best in general; the first if there is none."""
        known = [place for place in self.ranked_lines if self.overall[place] is not None]
        return max(known, key=lambda place: self.metric.score(self.overall[place] or 0.0), default=0)

    def best_lines(self) -> list[int]:
        """Places of the lines that readers see, the best in general first; those without a value last."""
        found, score = self.overall, self.metric.score
        return sorted(self.shown_lines, key=lambda line: (found[line] is None, -score(found[line] or 0.0)))

    def ranked(self) -> list[ClientRow]:
        """The clients from the worst to the best with the line that is best in general; unmeasured ones last."""
        leader, score = self.leader, self.metric.score
        return sorted(self.shown_rows, key=lambda row: (row.values[leader] is None, score(row.values[leader] or 0.0)))

    @property
    def caption(self) -> str:
        """Say what the numbers are, what is best in general, and for how many clients each line is best."""
        what = f"Test {self.metric.title}{' in %' if self.metric.percent else ''}"
        said = [f"{what} of each client{f', mean over {self.seeds} seeds' if self.seeds > 1 else ''}."]
        if len(self.ranked_lines) > 1 and (overall := self.overall[self.leader]) is not None:
            said.append(f"Best in general: {self.labels[self.leader]} ({self.shown(overall)}).")
            wins = {title: sum(row.best[place] for row in self.rows) for place, title in enumerate(self.labels)}
            most = ", ".join(f"{title} {n}" for title, n in sorted(wins.items(), key=lambda win: -win[1]) if n)
            honest = [row for row in self.rows if not row.hostile]
            who = "clients" if len(honest) == len(self.rows) else "honest clients"
            said.append(f"Best for so many of {len(honest)} {who} (equals count for each): {most}.")
        if not self.same:
            said.append("The partition differs from seed to seed: clients of the same name are averaged all the same.")
        return " ".join([*said, self.notes] if self.notes else said)

    def plain(self) -> Plain:
        """All numbers as JSON has them."""
        rows = [
            {
                "name": row.name,
                "hostile": row.hostile,
                "n_train": row.n_train,
                "n_test": row.n_test,
                "values": dict(zip(self.titles, row.values, strict=True)),
                "best": best_of(self.titles, row),
            }
            for row in self.rows
        ]
        return {"metric": self.metric.name, "clients": rows}


def best_of(names: Sequence[str], row: ClientRow) -> list[str]:
    """Name the lines that are best for a client."""
    return [name for name, best in zip(names, row.best, strict=True) if best]


def client_table(summary: Summary) -> ClientTable:
    """Make the table of clients × lines: the metric, or the loss where there is none."""
    metric = summary.metric if any(line.value is not None for line in summary.lines) else LOSS
    of_line = [_by_name(line.results, metric, hostile=False) for line in summary.lines]
    hostile = [_by_name(line.results, metric, hostile=True) for line in summary.lines]
    results = [result for line in summary.lines for result in line.results]
    rows, missing = [], {name for result in results for name in result.missing}
    counts = _samples(results)
    ranked = tuple(place for place, line in enumerate(summary.lines) if line.ranked)
    for name, (train, test) in counts.items():
        if name in missing or any(name in found for found in of_line):
            own = tuple(found.get(name) for found in of_line)
            rows.append(ClientRow(name, train, test, own, _best(own, metric, ranked)))
    for name, (train, test) in counts.items():
        if any(name in found for found in hostile):
            own = tuple(found.get(name) for found in hostile)
            rows.append(ClientRow(name, train, test, own, (False,) * len(own), hostile=True))
    overall = tuple(line.loss if metric is LOSS else line.value for line in summary.lines)
    titles, labels = (tuple(getattr(line, name) for line in summary.lines) for name in ("title", "label"))
    same = same_clients(results)
    seeds = len({result.experiment.seed for result in results})
    notes = [*(_not_shown(summary) if ranked else ()), *missing_in_words(summary.lines)]
    return ClientTable(metric, titles, labels, overall, tuple(rows), seeds, same, " ".join(notes), ranked)


def _not_shown(summary: Summary) -> Iterator[str]:
    """Say which lines tables for readers do not have."""
    if any(line.chosen is False for line in summary.lines):
        yield "Of several settings of a method, the line is shown that validation data choose."
    if any(not line.ranked and line.chosen is not False for line in summary.lines):
        yield "Lines under attack are not shown beside those without one."


def _by_name(results: Sequence[RunResult], metric: Metric, hostile: bool) -> dict[str, float]:
    """Average each client's result over the seeds with which it is honest, or hostile. By name: with new clients,
    numbers differ from seed to seed."""
    found: dict[str, list[float]] = {}
    for result in results:
        for client, value in client_values(result, metric, hostile).items():
            found.setdefault(result.names[client], []).append(value)
    return {name: fmean(values) for name, values in found.items()}


def _samples(results: Sequence[RunResult]) -> dict[str, tuple[float, float]]:
    """Count each client's training and test samples, mean over seeds."""
    of_seed = {result.experiment.seed: result for result in results}
    found: dict[str, list[tuple[int, int]]] = {}
    for result in of_seed.values():
        counts = zip(result.names, result.partition["train"], result.partition["test"], strict=True)
        for name, train, test in counts:
            found.setdefault(name, []).append((sum(train), sum(test)))
    return {name: (fmean(n for n, _ in both), fmean(n for _, n in both)) for name, both in found.items()}


def same_clients(results: Sequence[RunResult]) -> bool:
    """Find out whether a name stands for the same client in all runs."""
    return len({_totals(result) for result in results}) == 1


def _totals(result: RunResult) -> str:
    """Write down how many samples of each class every client has: the same with all seeds if the clients are."""
    splits = zip(*(result.partition[split] for split in SPLITS), strict=True)
    totals = [[sum(of_class) for of_class in zip(*rows, strict=True)] for rows in splits]
    return str(sorted(zip(result.names, totals, strict=True)))


def _best(values: tuple[float | None, ...], metric: Metric, ranked: tuple[int, ...]) -> tuple[bool, ...]:
    """Mark the best values of the ranked lines; equals share the place. Rounded, as averaging may leave equals
    different last bits."""
    values = tuple(value if place in ranked else None for place, value in enumerate(values))
    known = [round(value, 12) for value in values if value is not None]
    if len(known) < 2:
        return (False,) * len(values)
    best = metric.best(known)
    return tuple(value is not None and round(value, 12) == best for value in values)
