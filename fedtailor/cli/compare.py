"""`fedtailor compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import TaskID

from fedtailor._common.errors import FedtailorError, shown
from fedtailor._common.text import visible
from fedtailor.cli.completion import setting_names
from fedtailor.cli.display import (
    Bars,
    RoundProgress,
    announce,
    complain,
    interrupted,
    out,
    progress_bars,
    say,
    setup_lines,
    working,
)
from fedtailor.cli.options import (
    RUN_GROUPS,
    Assignments,
    ComparisonWords,
    TunedFrom,
    check_assignment,
    experiment_options,
    out_directory,
    parse_assignments,
)
from fedtailor.cli.run import word_settings
from fedtailor.experiment import SETTING_NAMES, Experiment, in_sections, merged, read_experiment

if TYPE_CHECKING:
    from fedtailor.server.loop import Loop
    from fedtailor.server.records import RoundRecord
    from fedtailor.studies.comparison import Comparing, Comparison

MOST_LINES = 16  # with which each client's results are printed too: of more they are in clients.csv alone
FAILED = 1  # exit code: there is a table, but not all runs are in it
OF_COMPARISON: dict[str, Any] = {"rich_help_panel": "Comparison"}


@experiment_options(*RUN_GROUPS, without="seed")
def compare(
    what: ComparisonWords,
    settings: dict[str, Any],
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N,…", help=r"a run of every line for each \[0,1,2]", **OF_COMPARISON)
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help=r"the value of the metric to which rounds and bytes are counted, like 0.9 \[what all runs reach]",
            **OF_COMPARISON,
        ),
    ] = None,
    assignments: Assignments = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="NAME=A|B|…",
            help="a line of the table for each value of a setting or parameter, like 'lr=0.1|0.01'; may be repeated",
            autocompletion=setting_names,
            **OF_COMPARISON,
        ),
    ] = None,
    tune: Annotated[
        int | None,
        typer.Option(
            "--tune",
            metavar="TRIALS",
            help="choose each method's settings on validation data first, in so many trials",
            **OF_COMPARISON,
        ),
    ] = None,
    tuned: TunedFrom = None,
    to: Annotated[Path | None, out_directory(r"the comparison's directory \[comparisons/DATA-1, -2, …]")] = None,
) -> None:
    """Run methods on the same clients with several seeds, and print the table that papers print.

    It has the metric over seeds (the accuracy, unless --metric says another),
    the gain over Local, the worst decile, rounds and bytes to a target, and
    says which methods differ from the best by more than chance. Then come each
    client's result by name, and what came out in a sentence or two. DIR holds it as text, Markdown, LaTeX and CSV, with
    all runs; `fedtailor show DIR` prints it again, and `fedtailor report DIR
    --tables` writes it with the columns of your choice.

    [bold]Examples[/]
      fedtailor compare local fedavg ditto pgfed --data digits --rounds 20
      fedtailor compare local ditto --set lam=0.5 --seeds 0,1 --target 0.9
      fedtailor compare grid.toml --out comparisons/grid
      fedtailor compare fedavg ditto --privacy client --grid 'epsilon=inf|8|2'
      fedtailor compare fedavg ditto pgfed --tune 20 --data digits
      fedtailor compare fedavg ditto --settings tuned:digits

    A file has the settings of an experiment file, and:
      methods = \\["local", "ditto"]   seeds = \\[0, 1, 2]
      \\[grid]   lr = \\[0.1, 0.01]   every combination is a line of the table
      \\[parameters.ditto]   lam = 0.5   \\[settings.ditto]   lr = 0.05

    After Ctrl-C or a crash, the same command with the same --out goes on:
    what is finished is not run again. With more methods or seeds, it is
    extended by them.
    """
    from fedtailor.reporting.client_tables import rich_clients
    from fedtailor.reporting.conclusion import verdict
    from fedtailor.reporting.found_runs import read_runs
    from fedtailor.reporting.functions import save_study
    from fedtailor.reporting.tables import rich_table, write_tables
    from fedtailor.server.run_directory import new_directory
    from fedtailor.studies.client_results import client_table
    from fedtailor.studies.comparison import Comparing, make_comparison

    work: Comparing | None = None
    try:
        with working("setting up"):
            question = asked(what, settings, parse_assignments(assignments or []), tuned)
            question |= {} if seeds is None else {"seeds": numbers(seeds)}
            question |= {"grid": {**question.get("grid", {}), **_grid(grid)}} if grid else {}
            comparison = make_comparison(question if target is None else {**question, "target": target})
            stem = Path(str(comparison.settings["data"]).replace(":", "-")).stem
            place = to or new_directory(stem, "comparisons")
            work = Comparing(comparison, place) if tune is None else None
        if work is None:
            work = Comparing(_tuned(comparison, tune, place), place)
        with working("setting up"):
            todo, lines = work.todo(), dict[str, None]()
            work.begin(todo, lambda prepared: lines.update(dict.fromkeys(setup_lines([prepared]))))
        if tune is None:  # else it is said already
            announce(lines)
        with progress_bars() as bars, work.tracked() as study:
            _perform(work, todo, bars)
            summary = work.finish()
            write_tables(summary, work.out, work.extra)
            save_study(study, summary, lambda: read_runs([place]), work.extra)
    except KeyboardInterrupt:
        begun = work is not None and (file := work.out / "comparison.toml").is_file()
        hint = f" Continue with: fedtailor compare {file} --out {file.parent}" if begun else ""
        interrupted(f"Interrupted.{hint}")
    out.print(rich_table(summary, out.width))
    if len(summary.lines) <= MOST_LINES:
        out.print(rich_clients(client_table(summary), out.width, str(work.out / "clients.csv")))
    out.print(f"\n{visible(verdict(summary))}", soft_wrap=not out.is_terminal)
    files = "table.txt, .md, .tex, .csv, clients.csv, result.json, runs"
    say(f"Recorded in {work.out}: {files}")
    for title, reason in work.failed.items():
        complain("Failed:", f"{title}: {reason}")
    if work.failed:
        raise typer.Exit(FAILED)


def _tuned(comparison: "Comparison", trials: int | None, place: Path) -> "Comparison":
    """Choose the settings of each method with the first seed, and say what was chosen."""
    from fedtailor.cli.tune import begin, perform, stop_tuning
    from fedtailor.reporting.tuning_tables import in_lines
    from fedtailor.studies.tuner import Tuner

    try:
        with working("setting up"):
            work = Tuner.of(comparison, trials, place)
            begin(work)
        with progress_bars() as bars:
            perform(work, bars)
    except KeyboardInterrupt:
        stop_tuning(place)
    for method in comparison.methods:
        say("\n".join(in_lines(work.tuned(method), out.width)))
    return work.apply(comparison)


def asked(
    what: list[str], options: dict[str, Any], assignments: dict[str, Any], tuned: str | None = None
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
    if tuned is not None:
        asked = _with_settings(asked, tuned)
    _refuse_twice(asked.get("settings"), {**options, **{n: v for n, v in assignments.items() if n in SETTING_NAMES}})
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


def _with_settings(asked: dict[str, Any], source: str) -> dict[str, Any]:
    """Take the methods' settings from `tuned:NAME`, or a tuning's directory or file."""
    from fedtailor.experiment.tuned import find_settings, with_settings

    named = isinstance(asked.get("settings"), str)  # the file's own source, which the option replaces
    return with_settings({**asked, "settings": {}} if named else asked, find_settings(source), asked["methods"])


def _refuse_twice(sections: Any, options: dict[str, Any]) -> None:
    """Refuse an option for all methods where one has a setting of its own."""
    from fedtailor.experiment.tuned import refuse_twice

    for method, own in sections.items() if _is_sections(sections) else ():
        refuse_twice(method, own, options)


def _is_sections(parameters: Any) -> bool:
    return isinstance(parameters, dict) and all(isinstance(own, dict) for own in parameters.values())


def _grid(given: list[str]) -> dict[str, list[Any]]:
    """Read the values of `name=a|b` pairs, each as TOML would read it, or else as text."""
    found: dict[str, list[Any]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        if not equals or not name.strip() or not values.strip():
            raise FedtailorError(f"--grid takes name=value|value, like 'lr=0.1|0.01', not {shown(text)}.")
        found[name.strip()] = [parse_assignments([f"value={value}"])["value"] for value in values.split("|")]
    return found


def numbers(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise FedtailorError(f"--seeds takes whole numbers with commas between them, like 0,1,2, not {text!r}.")
    return [int(word) for word in words]


class _OneOfMany(RoundProgress):
    """The bar of one run, which moves the bar of all runs along."""

    def __init__(self, progress: Bars, title: str, rounds: int, overall: TaskID, before: int) -> None:
        super().__init__(progress, title, rounds)
        self.overall, self.before = overall, before

    def start(self, loop: "Loop") -> None:
        super().start(loop)
        self.progress.update(self.overall, completed=self.before + loop.finished)

    def round(self, record: "RoundRecord") -> None:
        super().round(record)
        self.progress.update(self.overall, completed=self.before + record.round)


def _perform(work: "Comparing", todo: dict[str, Experiment], bars: Bars) -> None:
    """Do the runs that are left, under a bar for all of them and one for the present run."""
    every = len(work.runs)
    before = sum(run.rounds for title, run in work.runs.items() if title not in todo)
    total = sum(run.rounds for run in work.runs.values())
    overall = bars.add_task(f"all {every} runs", total=total, status="", unit="round")
    for number, (title, experiment) in enumerate(todo.items(), every - len(todo) + 1):
        bars.update(overall, completed=before, status=f"run {number}")
        bar = _OneOfMany(bars, title, experiment.rounds, overall, before)
        result = work.run(title, bar.round, bar.start)
        bars.remove_task(bar.task)
        before += experiment.rounds
        if out.is_terminal:
            said = result.metric.shown(result.value) if result else "failed"
            bars.say(f"{title}: {said}")
    bars.update(overall, completed=before, status="")
