"""`fedtailor tune`, and what `compare --tune` shows of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fedtailor._common.errors import FedtailorError
from fedtailor.cli import JsonOfMany
from fedtailor.cli.compare import asked, numbers
from fedtailor.cli.completion import setting_names
from fedtailor.cli.display import (
    Bars,
    RoundProgress,
    announce,
    complain,
    interrupted,
    marked,
    out,
    print_json,
    progress_bars,
    say,
    setup_lines,
    working,
)
from fedtailor.cli.options import (
    RUN_GROUPS,
    Assignments,
    ComparisonWords,
    experiment_options,
    out_directory,
    parse_assignments,
)

if TYPE_CHECKING:
    from fedtailor.studies.trials import Trial
    from fedtailor.studies.tuner import Tuner

BESIDE = 80  # columns beside the name of a trial: the bar, its rounds, the value on validation data and the time left
FAILED = 1  # exit code: there are settings, but not of all methods
OF_TUNING: dict[str, Any] = {"rich_help_panel": "Tuning"}


@experiment_options(*RUN_GROUPS, without="seed")
def tune(
    what: ComparisonWords,
    settings: dict[str, Any],
    trials: Annotated[int | None, typer.Option(metavar="N", help=r"trials of each method \[20]", **OF_TUNING)] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="X", help="seconds for each method, in place of trials", **OF_TUNING)
    ] = None,
    ranges: Annotated[
        list[str] | None,
        typer.Option(
            "--range",
            metavar="NAME=RANGE",
            help="where a setting is searched: lr=0.01..1:log, epochs=1..10, batch=10|32 (may be repeated)",
            autocompletion=setting_names,
            **OF_TUNING,
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="search these settings and no others", **OF_TUNING)
    ] = None,
    level: Annotated[
        float,
        typer.Option(
            metavar="P",
            help=r"a trial replaces your settings if it is better with at most this p; 1: the best one does \[0.05]",
            show_default=False,
            **OF_TUNING,
        ),
    ] = 0.05,
    seeds: Annotated[
        str, typer.Option(metavar="N,N,…", help=r"a trial is a run with each: their mean counts", **OF_TUNING)
    ] = "0",
    assignments: Assignments = None,
    to: Annotated[Path | None, out_directory(r"the tuning's directory \[tunings/DATA-1, -2, …]")] = None,
    json: JsonOfMany = False,
) -> None:
    """Choose each method's settings on validation data, with the same budget for all.

    The learning rate and the parameters for which a method declares a range
    (fedtailor methods) are searched. Trials that fall behind are ended early.
    Your settings are the first trial, and are kept unless another one is
    significantly better. Test data have no part in it: what the chosen
    settings reach on them is shown in the end.

    [bold]Examples[/]
      fedtailor tune fedavg ditto pgfed --data digits --trials 20 --out tunings/digits
      fedtailor tune ditto --only lam --range lam=0.1..10:log --seconds 600
      fedtailor compare fedavg ditto pgfed --settings tunings/digits

    After Ctrl-C or a crash, the same command with the same --out goes on; with
    more --trials it adds them.
    """
    from fedtailor.methods import command_title
    from fedtailor.reporting.tuning_tables import plain, tuning_table
    from fedtailor.server.run_directory import new_directory
    from fedtailor.studies.comparison import make_comparison
    from fedtailor.studies.trials import Budget
    from fedtailor.studies.tuner import Tuner

    place = to
    try:
        with working("setting up"):
            comparison = make_comparison(
                {**asked(what, settings, parse_assignments(assignments or [])), "seeds": numbers(seeds)}
            )
            stem = Path(str(comparison.settings["data"]).replace(":", "-")).stem
            names = None if only is None else [name.strip() for name in only.split(",")]
            place = to or new_directory(stem, "tunings")
            work = Tuner(comparison, Budget(trials, seconds), parse_ranges(ranges or []), names, place, level=level)
            begin(work, quiet=json)
        with progress_bars() as bars, work.tracked():
            perform(work, bars)
            work.write()
            tuned = [_finish(work, method, bars) for method in comparison.methods]
    except KeyboardInterrupt:
        stop_tuning(place)
    if json:
        print_json(plain(tuned))
    else:
        out.print(tuning_table(tuned, str(work.budget)))
        say(f"Recorded in {place}: tuned.toml, trials, runs")
        following = f"fedtailor compare {place / 'tuned.toml'} --seeds 0,1,2"
        say(marked("Next:", "bold", following))
    for method in (method for method in tuned if method.chosen is None):
        said = f"{command_title(method.method)}: {method.trials[0].reason}"
        complain("Failed:", said)
    if any(method.chosen is None for method in tuned):
        raise typer.Exit(FAILED)


def parse_ranges(words: list[str]) -> dict[str, str]:
    """Read `name=range` pairs."""
    pairs = [word.partition("=") for word in words]
    for name, equals, text in pairs:
        if not (name.strip() and equals and text.strip()):
            raise FedtailorError(f"--range takes NAME=RANGE, like lr=0.01..1:log, not {name + equals + text!r}.")
    return {name.strip(): text.strip() for name, _, text in pairs}


def begin(work: "Tuner", quiet: bool = False) -> None:
    """Check everything, and say what is tuned."""
    lines = dict[str, None]()
    work.begin(lambda prepared: lines.update(dict.fromkeys(setup_lines([prepared]))))
    if not quiet:
        announce(lines)


def stop_tuning(place: Path | None) -> NoReturn:
    """Say how to go on after Ctrl-C."""
    hint = f" The same command with --out {place} goes on." if place is not None and place.is_dir() else ""
    interrupted(f"Interrupted.{hint}")


def perform(work: "Tuner", bars: Bars) -> None:
    """Make the trials that are left, under a bar for the present one."""
    from fedtailor.methods import command_title
    from fedtailor.reporting.tuning_tables import settings_in_words

    def shown(value: float | None) -> str:
        return "validation " + work.metric.shown(None if value is None else work.metric.score(value))

    for method in work.comparison.methods:
        name = command_title(method)
        task = bars.add_task(name, total=None, status="", unit="round")

        def begun(number: int, settings: dict[str, Any], rounds: int, name: str = name, task: Any = task) -> None:
            of = f" of {work.budget.trials}" if work.budget.trials else ""
            bars.reset(task, description=_title(f"{name}, trial {number + 1}{of}", settings), total=rounds, status="")

        def round(number: int, value: float | None, task: Any = task) -> None:
            bars.update(task, completed=number, status=shown(value))

        def done(trial: "Trial", name: str = name) -> None:
            if out.is_terminal:  # elsewhere the lines of progress say it
                said = shown(trial.value) if trial.state == "done" else trial.state
                bars.say(f"{name}, {settings_in_words(trial.settings)}: {said}")

        work.tune(method, done, begun, round)
        bars.remove_task(task)


def _title(trial: str, settings: dict[str, Any]) -> str:
    """Name a trial beside its bar: with its settings where the page leaves room for bar, rounds, value and time too."""
    from fedtailor.reporting.tuning_tables import settings_in_words

    whole = f"{trial}: {settings_in_words(settings)}"
    return whole if len(whole) + BESIDE <= out.width or not out.is_terminal else trial


def _finish(work: "Tuner", method: str, bars: Bars) -> Any:
    from fedtailor.methods import command_title

    bar = RoundProgress(bars, f"{command_title(method)}, chosen settings", work.comparison.settings["rounds"])
    tuned = work.finish(method, lambda title, record: bar.round(record), bar.start)
    bars.remove_task(bar.task)
    return tuned
