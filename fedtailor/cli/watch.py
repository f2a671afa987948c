"""`fedtailor watch`: it reads what runs write, and writes nothing itself."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedtailor._common.errors import FedtailorError, listed
from fedtailor.cli.completion import runs_and_comparisons
from fedtailor.cli.display import epsilon_text, human_bytes, human_time, in_cell, out, plain_table, visible
from fedtailor.cli.presence import STATUS, sites_line

if TYPE_CHECKING:
    from fedtailor.server.records import RoundRecord
    from fedtailor.training.metrics import Metric

BLOCKS = "▁▂▃▄▅▆▇█"
SPARKS, CURVE = 20, 8  # rounds in a line's sparkline; lines of the curve below the table
FAILING = 5  # clients that are named
BAR, NARROW = 12, 90  # columns of a run's bar, and of a page that has no room for it
PATIENCE = 60.0  # seconds without a round, and five times its usual length, that make one ask whether it still runs


def watch(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="a run, several runs, or a comparison", autocompletion=runs_and_comparisons),
    ],
) -> None:
    """Watch a run or a comparison from another terminal: progress, metric, bytes, time left.

    It ends when all is finished, or with Ctrl-C, which does not touch the run. Where the output is not a terminal, it
    is shown once.

    [bold]Examples[/]
      fedtailor watch runs/ditto-digits-1
      fedtailor watch comparisons/digits-1
    """
    with suppress(KeyboardInterrupt):
        watched = Watched(directory)
        if not out.is_terminal:
            out.print(watched.look())
            return
        with Live(watched.look(), console=out, auto_refresh=False, vertical_overflow="crop") as live:
            while not watched.finished:
                time.sleep(1)
                live.update(watched.look(), refresh=True)


@dataclass
class Seen:
    """One run as it was last read."""

    title: str
    path: Path
    rounds: int
    records: list["RoundRecord"]
    news: float  # when the last round was written
    names: Sequence[str] = ()  # of the clients
    metric: "Metric | None" = None
    stopped: str | None = None  # why it ended before its last round

    @property
    def finished(self) -> bool:
        return len(self.records) >= self.rounds or self.stopped is not None

    @property
    def pace(self) -> float | None:
        """Seconds a round, the mean of the last ten."""
        last = [record.seconds for record in self.records[-10:]]
        return sum(last) / len(last) if last else None

    @property
    def failing(self) -> str:
        """The clients that failed, by name, and in how many of their rounds; the first few of many."""
        from fedtailor.server.records import failures

        failed = failures(self.records)
        worst = sorted(failed, key=lambda client: -failed[client][0])[:FAILING]
        said = [f"{self.names[client]} ({failed[client][0]} of {failed[client][1]} rounds)" for client in worst]
        more = [f"and {len(failed) - FAILING} more"] if len(failed) > FAILING else []
        return ", ".join([*said, *more])

    @property
    def missing(self) -> str:
        """The clients that were not measured in the last evaluated round, by name; the first few of many."""
        last = next((record for record in reversed(self.records) if record.evaluated or record.missing), None)
        return listed([self.names[client] for client in last.missing if client < len(self.names)]) if last else ""

    def values(self) -> list[float]:
        """The metric in every round that was evaluated."""
        found = [self.metric.of(record) for record in self.records] if self.metric else []
        return [value for value in found if value is not None]

    def text(self, value: float | None) -> str:
        return self.metric.text(value) if self.metric else "–"

    @property
    def last(self) -> str:
        """The metric's last value, and of how many clients it is if some were not measured."""
        found = [record for record in self.records if self.metric and self.metric.of(record) is not None]
        text = self.text(self.values()[-1] if found else None)
        return f"{text}{in_cell(found[-1])}" if found else text


class Watched:
    """The runs of a directory, looked at again and again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.finished = False
        self._seen: dict[Path, Seen] = {}
        self._expected = self._find()

    def _find(self) -> dict[Path, tuple[str, int]]:
        """Find the title and the number of rounds of every run that is or will be there."""
        from fedtailor.studies.comparison import RUNS, planned_runs

        if (self.directory / RUNS).is_file():
            return planned_runs(self.directory)
        own = [self.directory] if (self.directory / "experiment.toml").is_file() else []
        files = [*self.directory.glob("*/experiment.toml"), *self.directory.glob("runs/*/experiment.toml")]
        below = sorted(path.parent for path in files)
        if (self.directory / STATUS).is_file():  # a federation, whose sites may still be joining
            return {self.directory: ("", 0)}
        if not own and not below:
            raise FedtailorError(f"{self.directory} is no run and no comparison: there is nothing to watch.")
        return dict.fromkeys(own or below, ("", 0))

    def _read(self, path: Path) -> Seen:
        """Read a run; one that is finished is read only once."""
        from fedtailor.server.records import stop_in_words
        from fedtailor.server.run_directory import RunDirectory

        if path in self._seen and self._seen[path].finished:
            return self._seen[path]
        title, rounds = self._expected[path]
        if not (path / "experiment.toml").is_file():
            return Seen(title, path, rounds, [], 0)
        run = RunDirectory(path)
        experiment, record = run.experiment(), path / "rounds.jsonl"
        news = (record if record.exists() else path / "experiment.toml").stat().st_mtime
        title = title or f"{experiment.method}, seed {experiment.seed}"
        metric, records = run.metric(), run.rounds()
        stopped = stop_in_words(records, experiment.rounds)
        self._seen[path] = Seen(title, path, experiment.rounds, records, news, run.partition().clients, metric, stopped)
        return self._seen[path]

    def look(self) -> Group:
        """Read all runs and draw their present state."""
        runs = [self._read(path) for path in self._expected]
        begun = [run for run in runs if run.news]
        if not begun and (sites := sites_line(self.directory)):
            return Group(Text(sites))
        present = max(begun, key=lambda run: (not run.finished, run.news), default=runs[0])
        written = self.directory / "result.json"  # a comparison with runs that failed is finished with it
        over = written.exists() and len(runs) > 1 and written.stat().st_mtime >= max(run.news for run in runs)
        self.finished = over or all(run.finished for run in runs)
        parts: list[Table | Text] = [_table(str(self.directory), _near(runs, present))]
        if present.metric and (curve := _curve(present.values(), out.width - 12, present.text)):
            name, unit = present.metric.title, " in %" if present.metric.percent else ""
            parts += [Text(f"\n{name[0].upper()}{name[1:]} of {present.title}{unit}", style="bold"), Text(curve)]
        if failing := present.failing:
            parts.append(Text(f"\nClients that failed in {present.title}: {visible(failing)}", style="yellow"))
        if sites := sites_line(present.path):
            parts.append(Text(f"\n{sites}"))
        if missing := present.missing:
            parts.append(Text(f"\nClients not measured in {present.title}: {visible(missing)}", style="yellow"))
        return Group(*parts, Text("\n" + self._state(runs, present)))

    def _state(self, runs: Sequence[Seen], present: Seen) -> str:
        many = f"{sum(run.finished for run in runs)} of {len(runs)} runs finished. " if len(runs) > 1 else ""
        if self.finished:
            table = self.directory / "table.txt"
            stopped = f" It {visible(present.stopped)}." if present.stopped and len(runs) == 1 else ""
            return f"{many}Finished.{stopped}" + (f" The table is in {table}." if table.is_file() else "")
        left = _left(runs)
        text = many + ("No round is finished yet." if left is None else f"About {human_time(left)} left.")
        silence = time.time() - present.news if present.news else 0.0
        if silence > max(PATIENCE, 5 * (present.pace or 0)):
            return f"{text} No news for {human_time(silence)}: if it was stopped, start it again to go on."
        return text


def _left(runs: Sequence[Seen]) -> float | None:
    """Estimate the seconds that are left, by the pace of the same run or else of the others."""
    paces = [run.pace for run in runs if run.pace is not None]
    if not paces:
        return None
    usual = sum(paces) / len(paces)
    return sum((run.rounds - len(run.records)) * (usual if run.pace is None else run.pace) for run in runs)


def _near(runs: Sequence[Seen], present: Seen) -> Sequence[Seen]:
    """Choose as many runs as fit on the page, around the present one."""
    room = max(3, out.height - CURVE - 12) if out.is_terminal else len(runs)
    first = max(0, min(list(runs).index(present) - room // 2, len(runs) - room))
    return runs[first : first + room]


def _table(title: str, runs: Sequence[Seen]) -> Table:
    table = plain_table(title)
    table.add_column("run", style="bold", no_wrap=True)
    bars = out.width >= NARROW
    if bars:
        table.add_column("", width=BAR)
    titles = {run.metric.title for run in runs if run.metric}
    for name in ("rounds", titles.pop() if len(titles) == 1 else "metric"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"last {SPARKS} rounds", width=SPARKS, no_wrap=True)
    private = any(run.records and run.records[-1].epsilon is not None for run in runs)
    for name in (*(["ε"] if private else []), "sent", "a round"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        values, pace = run.values(), run.pace
        table.add_row(
            Text(run.title),
            *([ProgressBar(run.rounds, len(run.records), width=BAR)] if bars else []),
            f"{len(run.records)}/{run.rounds}",
            run.last,
            _sparks(values[-SPARKS:]),
            *([epsilon_text(run.records[-1].epsilon) if run.records else "–"] if private else []),
            human_bytes(sum(record.bytes for record in run.records)),
            "–" if pace is None else f"{pace:.2f} s",
        )
    return table


def _sparks(values: Sequence[float]) -> str:
    """Draw values as a line of blocks, from the least to the greatest."""
    least, span = min(values, default=0), (max(values, default=0) - min(values, default=0)) or 1
    return "".join(BLOCKS[round((len(BLOCKS) - 1) * (value - least) / span)] for value in values)


def _curve(values: Sequence[float], width: int, text: Callable[[float], str]) -> str:
    """Draw the last values as a curve of several lines, with the least and the greatest beside it."""
    shown = list(values)[-width:]
    if len(shown) < 2:
        return ""
    least, most = min(shown), max(shown)
    heights = [1 + round((8 * CURVE - 1) * (value - least) / ((most - least) or 1)) for value in shown]
    lines = []
    for row in reversed(range(CURVE)):
        label = {CURVE - 1: text(most), 0: text(least)}.get(row, "")
        filled = [min(8, max(0, height - 8 * row)) for height in heights]
        lines.append(f"{label:>6} " + "".join(" " if not part else BLOCKS[part - 1] for part in filled))
    return "\n".join(lines)
