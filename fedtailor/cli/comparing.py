"""`fedtailor compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, TaskID

from fedtailor.cli.display import RoundProgress, err, marked, out, progress_bars, setup_lines
from fedtailor.cli.options import Assignments, experiment_options, parse_assignments
from fedtailor.cli.running import INTERRUPTED, check_assignment, word_settings
from fedtailor.errors import FedtailorError
from fedtailor.experiment import SETTING_NAMES, Experiment, in_sections, merged, read_experiment

if TYPE_CHECKING:
    from fedtailor.server.loop import Loop
    from fedtailor.server.records import RoundRecord
    from fedtailor.studies.comparison import Comparing

FAILED = 1  # exit code: there is a table, but not all runs are in it


@experiment_options("Data", "Model", "Training", "Evaluation", "Execution", without="seed")
def compare(
    what: Annotated[
        list[str],
        typer.Argument(metavar="METHOD…|FILE.toml", show_default=False, help="methods, or one file with a comparison"),
    ],
    settings: dict[str, Any],
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N,…", help=r"a run of every line for each \[0,1,2]", show_default=False)
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help=r"the value of the metric to which rounds and bytes are counted, like 0.9 \[what all runs reach]",
            show_default=False,
        ),
    ] = None,
    assignments: Assignments = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help=r"the comparison's directory \[comparisons/DATA-1, -2, …]", show_default=False
        ),
    ] = None,
) -> None:
    """Run methods on the same clients with several seeds, and print the table that papers print.

    It has the metric over seeds (the accuracy, unless --metric says another),
    the gain over Local, the worst decile, rounds and bytes to a target, and
    says which methods differ from the best by more than chance. DIR holds it as text, Markdown, LaTeX and
    CSV, with all runs.

    [bold]Examples[/]

    fedtailor compare local fedavg ditto pgfed --data digits --rounds 20

    fedtailor compare local ditto --set lam=0.5 --seeds 0,1 --target 0.9

    fedtailor compare grid.toml --out comparisons/grid

    A file has the settings of an experiment file, and:

    methods = \\["local", "ditto"]   seeds = \\[0, 1, 2]

    \\[grid]   lr = \\[0.1, 0.01]   every combination is a line of the table

    \\[parameters.ditto]   lam = 0.5

    After Ctrl-C or a crash, the same command with the same --out goes on:
    what is finished is not run again. With more methods or seeds, it is
    extended by them.
    """
    from fedtailor.reporting.tables import rich_table, write_tables
    from fedtailor.server.record import new_directory
    from fedtailor.studies.comparison import Comparing, make_comparison

    work: Comparing | None = None
    try:
        with out.status("setting up"):
            comparison = make_comparison(_asked(what, settings, parse_assignments(assignments or []), seeds, target))
            stem = Path(str(comparison.settings["data"]).replace(":", "-")).stem
            work = Comparing(comparison, to or new_directory(stem, "comparisons"))
            todo, lines = work.todo(), dict[str, None]()
            work.begin(todo, lambda prepared: lines.update(dict.fromkeys(setup_lines([prepared]))))
        for line in lines:
            out.print(line, highlight=False, soft_wrap=True)
        _perform(work, todo)
        summary = work.finish()
        write_tables(summary, work.out, work.extra)
    except KeyboardInterrupt:
        begun = work is not None and (file := work.out / "comparison.toml").is_file()
        hint = f" Continue with: fedtailor compare {file} --out {file.parent}" if begun else ""
        err.print(f"Interrupted.{hint}", soft_wrap=True, highlight=False)
        raise typer.Exit(INTERRUPTED) from None
    out.print(rich_table(summary, out.width))
    out.print(f"Recorded in {work.out}: table.txt, .md, .tex, .csv, result.json, runs", highlight=False, soft_wrap=True)
    for title, reason in work.failed.items():
        err.print(marked("Failed:", "yellow", f"{title}: {reason}"), highlight=False, soft_wrap=True)
    if work.failed:
        raise typer.Exit(FAILED)


def _asked(
    what: list[str], options: dict[str, Any], assignments: dict[str, Any], seeds: str | None, target: float | None
) -> dict[str, Any]:
    """Put the command line's settings over those of the file or the methods."""
    from fedtailor.methods import method_class

    if len(what) > 1 and any(word.endswith(".toml") for word in what):
        raise FedtailorError("Compare methods or one file, not both: name them in the file (methods = [...]).")
    if (file := Path(what[0]) / "comparison.toml").is_file():
        raise FedtailorError(f"{what[0]} is a comparison: go on with `fedtailor compare {file} --out {what[0]}`.")
    if what[0].endswith(".toml"):
        asked = read_experiment(Path(what[0]))
        if "methods" not in asked:
            raise FedtailorError(f"{what[0]} is no comparison: it has no methods = [...].")
    else:
        asked = {"methods": [word_settings(word)["method"] for word in what]}
    asked = merged(asked, options)
    asked |= {} if seeds is None else {"seeds": _numbers(seeds)}
    asked |= {} if target is None else {"target": target}
    named = asked["methods"] if isinstance(asked["methods"], list) else []
    methods = [method for method in named if isinstance(method, str)]
    fields = {method: method_class(method).model_fields for method in methods}
    for name, value in assignments.items():
        check_assignment(name, {parameter for known in fields.values() for parameter in known}, methods)
        section, _, inner = name.rpartition(".")
        owners = methods if section == "parameters" else [method for method in methods if inner in fields[method]]
        if section == "evaluation":
            asked = merged(asked, {section: {inner: value}})
        elif owners and _is_sections(before := asked.get("parameters", {})):
            asked["parameters"] = {**before, **{m: {**before.get(m, {}), inner: value} for m in owners}}
        elif name in SETTING_NAMES:
            asked = merged(asked, in_sections({name: value}))
    return asked


def _is_sections(parameters: Any) -> bool:
    return isinstance(parameters, dict) and all(isinstance(own, dict) for own in parameters.values())


def _numbers(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise FedtailorError(f"--seeds takes whole numbers with commas between them, like 0,1,2, not {text!r}.")
    return [int(word) for word in words]


class _OneOfMany(RoundProgress):
    """The bar of one run, which moves the bar of all runs along."""

    def __init__(self, progress: Progress, title: str, rounds: int, overall: TaskID, before: int) -> None:
        super().__init__(progress, title, rounds)
        self.overall, self.before = overall, before

    def start(self, loop: "Loop") -> None:
        super().start(loop)
        self.progress.update(self.overall, completed=self.before + loop.finished)

    def round(self, record: "RoundRecord") -> None:
        super().round(record)
        self.progress.update(self.overall, completed=self.before + record.round)


def _perform(work: "Comparing", todo: dict[str, Experiment]) -> None:
    """Do the runs that are left, under a bar for all of them and one for the present run."""
    every = len(work.runs)
    before = sum(run.rounds for title, run in work.runs.items() if title not in todo)
    with progress_bars() as bars:
        overall = bars.add_task(f"all {every} runs", total=sum(run.rounds for run in work.runs.values()), status="")
        for number, (title, experiment) in enumerate(todo.items(), every - len(todo) + 1):
            bars.update(overall, completed=before, status=f"run {number}")
            bar = _OneOfMany(bars, title, experiment.rounds, overall, before)
            result = work.run(title, bar.round, bar.start)
            bars.remove_task(bar.task)
            before += experiment.rounds
            if out.is_terminal:
                said = result.metric.shown(result.value) if result else "failed"
                bars.console.print(f"{title}: {said}", highlight=False)
        bars.update(overall, completed=before, status="")
