"""The display of commands: progress bars during a run, tables after it."""

import os
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fedtailor._common.text import (
    SafeConsole,
    decimals,
    epsilon_text,
    human_bytes,
    human_count,
    human_time,
    json_text,
    percent,
    plain_table,
    visible,
)
from fedtailor.cli import loudness

if TYPE_CHECKING:
    from fedtailor.data import FederatedData
    from fedtailor.engines.preparation import Prepared
    from fedtailor.engines.result import RunResult
    from fedtailor.server.loop import Loop
    from fedtailor.server.records import RoundRecord
    from fedtailor.server.setup import Setup
    from fedtailor.training.metrics import Metric

__all__ = [
    "Bars", "RoundProgress", "announce", "complain", "data_lines", "decimals", "definition_table", "epsilon_text",
    "human_bytes", "human_count", "human_time", "in_cell", "interrupted", "json_text", "marked", "network_lines", "out",
    "percent", "plain_table", "print_json", "print_setup", "progress_bars", "results_table", "say", "setup_lines",
    "table_of", "visible", "working",
]  # fmt: skip

COLUMNS = ("± std", "worst\ndecile", "best on\nvalidation", "loss", "up", "down", "time")  # after the metric's
FALL = 0.02  # of the accuracy from one round to the next: the last round alone is then no measure
NARROW = 76  # characters that all columns need; on a narrower page the last ones are left out
LINES, PAUSE, MINUTE = 10, 1.0, 60.0  # of progress: lines a task, and seconds at least and at most between them
PIPE_WIDTH = 120  # columns where the output is no terminal, and COLUMNS does not say

INTERRUPTED = 130  # exit code: as shells have it after Ctrl-C

out = SafeConsole(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH, highlight=False)
err = SafeConsole(stderr=True, highlight=False)


def say(text: str | Text, style: str = "") -> None:
    """Print a text without breaking its lines: a path in it can be copied."""
    out.print(text, style=style or None, soft_wrap=True)


def complain(label: str, text: object, style: str = "yellow") -> None:
    """Print a labelled sentence, such as a warning, on stderr."""
    err.print(marked(label, style, text), soft_wrap=True)


def interrupted(sentence: str = "Interrupted.") -> NoReturn:
    """End a command after Ctrl-C, and say how to go on."""
    err.print(sentence, soft_wrap=True)
    raise typer.Exit(INTERRUPTED) from None


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print a value for programs."""
    typer.echo(json_text(value, indent))


def marked(label: str, style: str, text: object) -> Text:
    """Put a label in this style before a text of anybody's."""
    return Text.assemble((label, style), " ", visible(text))


@dataclass
class _Told:
    """The last line of a task's progress."""

    title: str
    total: float
    first: float  # steps that were done when it began
    began: float
    done: float  # steps in the last line


class Bars(Progress):
    """The progress of work: bars at a terminal. Elsewhere lines on stderr, so that a log shows it too: one when a task
    begins and one when it ends, about ten between them, and one a minute. None with --quiet."""

    def __init__(self) -> None:
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            TimeRemainingColumn(),
            console=out,
            disable=not out.is_terminal or loudness.quiet,
        )
        self._told: dict[TaskID, _Told] = {}
        self._kinds: dict[TaskID, tuple[str, str]] = {}
        self._last = self.get_time()  # when the last line was written

    def add_task(self, description: str, *, unit: str = "", lines: str = "some", **options: Any) -> TaskID:  # type: ignore[override]
        """Add a task of steps of this unit. `lines` is how many it gets: none, some, or each step's with --verbose."""
        task = super().add_task(description, **options)
        self._kinds[task] = unit, lines
        self._tell(task)
        return task

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def reset(self, task_id: TaskID, **changes: Any) -> None:
        self._tell(task_id, ended=True)
        super().reset(task_id, **changes)
        self._told.pop(task_id, None)
        self._tell(task_id)

    def remove_task(self, task_id: TaskID) -> None:
        self._tell(task_id, ended=True)
        super().remove_task(task_id)

    def stop(self) -> None:
        for task in self.task_ids:
            self._tell(task, ended=True)
        super().stop()

    def say(self, text: str) -> None:
        """Write a line beside the bars or among the lines."""
        if not loudness.quiet:
            (out if out.is_terminal else err).print(visible(text), soft_wrap=True)

    def _tell(self, task_id: TaskID, ended: bool = False) -> None:
        """Write the line of a task, if one is due."""
        task, (unit, lines) = next(task for task in self.tasks if task.id == task_id), self._kinds[task_id]
        each = loudness.verbose and lines == "each"
        if task.total is None or lines == "none" or (out.is_terminal and not each):
            return
        now, told = self.get_time(), self._told.get(task_id)
        if told is None or (told.title, told.total) != (task.description, task.total) or task.completed < told.done:
            told = _Told(task.description, task.total, task.completed, now, task.completed)
            self._told[task_id], self._last = told, now
            many = f"{task.total:.0f} {unit or 'step'}{'s' if task.total != 1 else ''}"
            self.say(f"{task.description}: {self._so_far(task, unit) if task.completed else many}")
        elif task.completed > told.done:
            tenth = task.completed * LINES // task.total > told.done * LINES // task.total
            pause = now - self._last
            if each or ended or task.completed >= task.total or (tenth and pause >= PAUSE) or pause >= MINUTE:
                told.done, self._last = task.completed, now
                seconds = now - told.began
                said = [self._so_far(task, unit), *task.fields["status"].split("  "), task.fields.get("took", "")]
                if not out.is_terminal:  # where the bar says it
                    said.append(human_time(seconds))
                if not (ended or out.is_terminal) and task.completed < task.total:
                    left = seconds / (task.completed - told.first) * (task.total - task.completed)
                    said.append(f"about {human_time(left)} left")
                self.say(f"{task.description}: {', '.join(part for part in said if part)}")

    @staticmethod
    def _so_far(task: Task, unit: str) -> str:
        return f"{unit} {task.completed:.0f} of {task.total:.0f}".strip()


class RoundProgress:
    """The progress of one run: rounds, its metric, bytes, time left."""

    def __init__(self, progress: Bars, title: str, rounds: int | None) -> None:
        self.progress = progress
        self.bytes = 0
        self.metric: Metric | None = None
        self.task = progress.add_task(title, total=rounds, status="setting up", unit="round", lines="each")

    def start(self, loop: "Loop") -> None:
        """Show how far the run is when it begins or goes on."""
        self.bytes, self.metric = sum(record.bytes for record in loop.rounds), loop.metric
        self.progress.update(self.task, total=loop.experiment.rounds, completed=loop.finished, status="")
        if loudness.verbose and loop.directory is not None:
            self.progress.say(f"{loop.experiment.method}: recorded in {loop.directory.path}")

    def round(self, record: "RoundRecord") -> None:
        """Show a round that is finished."""
        self.bytes += record.bytes
        if self.metric and (value := self.metric.of(record)) is not None:
            quality = self.metric.shown(value)
        else:
            quality = "" if record.loss is None else f"loss {record.loss:.4g}"
        if record.missing:
            quality = f"{quality} {record.of_clients}" if record.evaluated else "no client was measured"
        if record.epsilon is not None:
            quality += f"  ε {epsilon_text(record.epsilon)}"
        if record.clock is not None:
            quality += f"  at {human_time(record.clock)}"
        took = f"this round {record.seconds:.2f} s" if loudness.verbose else ""
        status = f"{quality}  {human_bytes(self.bytes)}"
        self.progress.update(self.task, completed=record.round, status=status, took=took)


@contextmanager
def progress_bars() -> Iterator[Bars]:
    """Show the progress of one or several runs, and warnings above it, each once."""
    bars, said = Bars(), set[str]()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        from fedtailor._common.errors import ClientNote

        note = issubclass(category, ClientNote)
        text = f"{message} ({Path(filename).name}, line {lineno})" if loudness.verbose else str(message)
        if text in said or (note and loudness.quiet):
            return
        said.add(text)
        label = ("Note:", "cyan") if note else ("Warning:", "yellow")
        (bars.console if out.is_terminal else err).print(marked(*label, text), soft_wrap=True)

    with warnings.catch_warnings(), bars:
        warnings.simplefilter("always", category=UserWarning)
        warnings.showwarning = show
        yield bars


def working(text: str) -> AbstractContextManager[object]:
    """Show that something takes its time, unless --quiet."""
    return nullcontext() if loudness.quiet else out.status(text)


def results_table(results: Sequence["RunResult"]) -> Table:
    """A table of the results of several runs."""
    table = plain_table(_title(results[0]), caption=" ".join(_caption(results)))
    metric, private = results[0].metric, any(result.epsilon is not None for result in results)
    shown = (metric.title, *COLUMNS) if out.width >= NARROW else (metric.title, *COLUMNS[:3])
    table.add_column("method", style="bold", no_wrap=True, min_width=max(len(r.method) for r in results))
    for name in (*(["ε"] if private else []), *shown):
        table.add_column(name, justify="right", no_wrap=True)
    best = metric.best(result.value for result in results if result.value is not None)
    for result in results:
        method, *cells = _row(result, best if len(results) > 1 else None)[: 1 + len(shown)]
        table.add_row(method, *([epsilon_text(result.epsilon)] if private else []), *cells)
    return table


def _caption(results: Sequence["RunResult"]) -> Iterator[str]:
    """Say what the metrics mean, and what stands in the way of acting on them."""
    from fedtailor.server.records import failures_in_words, joined_in_words, late_in_words

    metric = results[0].metric
    yield results[0].experiment.evaluation.in_words(metric)
    yield from dict.fromkeys(whom for result in results if (whom := result.averages_of))
    for result in results:
        if words := result.hostile_outcome:
            yield f"{result.method}: {words}."
    if known := results[0].known_for:
        yield known
    if came := joined_in_words(results[0].partition["joined"]):
        yield f"{came}."
    for result in results:
        if words := result.measured_for:
            yield f"{result.method}: {words}" if len(results) > 1 else words
    yield from dict.fromkeys(words for result in results if (words := result.privacy_in_words))
    for result in results:
        if result.stopped:
            yield f"{result.method}: {result.stopped}."
    clients = len(results[0].names)
    for result in results:
        if words := failures_in_words([result.failures], clients):
            yield f"{result.method}: {words}."
        if words := late_in_words(result.rounds):
            yield f"{result.method}: {words}."
    last = [[v for r in result.rounds if (v := metric.of(r)) is not None][-5:] for result in results]
    fall = max((before - after for few in last for before, after in pairwise(few)), default=0.0)
    if metric.percent and results[0].experiment.evaluation.choose == "last" and fall > FALL:
        yield f"In the last five rounds an {metric.title} fell by {100 * fall:.1f} points: --choose last-5 is steadier."
    same = results[0].experiment.evaluation.of_the_same
    if absent := same and max(len(result.never_called) for result in results):
        yield f"{absent} of {clients} clients were never called: they count with what a new client gets."


def _row(result: "RunResult", best: float | None) -> list[str | Text]:
    from fedtailor.server.records import Averages

    counted, best_validated = result.chosen(), result.chosen("best-validation")
    chosen, on_validation = counted or Averages(), best_validated or Averages()
    metric, rounds = result.metric, result.rounds
    value = metric.text(result.value) + in_cell(counted)
    return [
        result.method,
        Text(value, style="bold green") if best is not None and result.value == best else value,
        metric.text(chosen.std),
        metric.text(chosen.worst_decile),
        metric.text(metric.of(on_validation)) + in_cell(best_validated),
        decimals(chosen.loss),
        human_bytes(sum(record.bytes_up for record in rounds)),
        human_bytes(sum(record.bytes_down for record in rounds)),
        f"{sum(record.seconds for record in rounds):.1f} s",
    ]


def in_cell(record: "RoundRecord | None") -> str:
    """Say below a number in a table of how many clients it is, if some were not measured."""
    return f"\n{record.of_clients.removesuffix(' clients')}" if record and record.missing else ""


def _title(result: "RunResult") -> str:
    experiment = result.experiment
    return f"{result.data_title}, {len(result.rounds)} of {experiment.rounds} rounds, seed {experiment.seed}"


def setup_lines(prepared: Sequence["Prepared"]) -> list[str]:
    """Say what the columns of a table are, which layers are body, head and frozen, and what leaves a client."""
    said = data_lines([ready.data for ready in prepared])
    return list(dict.fromkeys([*said, *network_lines([ready.setup for ready in prepared])]))


def network_lines(setups: Sequence["Setup"]) -> list[str]:
    """Say which layers are body, head and frozen, and what leaves a client in a round."""
    lines = [(line == lines[-1], line) for setup in setups for lines in [setup.lines()] for line in lines]
    ordered = [line for last, line in lines if not last] + [line for last, line in lines if last]
    return [visible(line) for line in dict.fromkeys(ordered)]


def data_lines(data: Sequence["FederatedData"]) -> list[str]:
    """Say what the columns of a table are, and what the user should know of the data."""
    lines = [f"Table {of.name}: {of.preprocessing.in_words()}." for of in data if of.preprocessing]
    return list(dict.fromkeys([*lines, *(f"Note: {note}" for of in data for note in of.notes)]))


def print_setup(lines: Iterable[str]) -> None:
    """Print these lines: wrapped between words at a terminal, and whole elsewhere."""
    for line in lines:
        out.print(line, soft_wrap=not out.is_terminal)


def announce(lines: Iterable[str]) -> None:
    """Print what is about to be done, unless --quiet."""
    if not loudness.quiet:
        print_setup(lines)


def table_of(
    title: str | None,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    left: Collection[str] | None = None,
    caption: str | None = None,
) -> Table:
    """A table of these columns and rows. Columns in `left` hold words and are aligned to the left; by default it is the
    first. If the first is one of them, it is bold."""
    table = plain_table(title or "", caption=caption and Text(visible(caption)))
    table.title = table.title if title else None
    words = columns[:1] if left is None else left
    for number, name in enumerate(columns):
        is_left = name in words
        table.add_column(name, justify="left" if is_left else "right", style="bold" if is_left and number == 0 else "")
    for row in rows:
        table.add_row(*row)
    return table


def definition_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of names in the first column, and text that may be wrapped in the others."""
    table = table_of(title, columns, rows, left=columns)
    table.columns[0].no_wrap = True
    return table
