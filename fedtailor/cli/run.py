"""`fedtailor run`, `resume` and `show`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fedtailor._common.errors import FedtailorError
from fedtailor.cli import Json, loudness
from fedtailor.cli.completion import from_names, methods_and_files, runs, runs_and_comparisons
from fedtailor.cli.display import (
    RoundProgress,
    decimals,
    epsilon_text,
    human_bytes,
    interrupted,
    network_lines,
    out,
    print_json,
    print_setup,
    progress_bars,
    results_table,
    say,
    setup_lines,
    table_of,
    visible,
    working,
)
from fedtailor.cli.options import (
    RUN_GROUPS,
    Assignments,
    TunedFrom,
    check_assignment,
    choices,
    experiment_options,
    out_directory,
    parse_assignments,
    with_assignments,
)
from fedtailor.experiment import SETTING_NAMES, Experiment, make_experiment, merged, read_experiment

if TYPE_CHECKING:
    from fedtailor.engines.result import RunResult
    from fedtailor.experiment.tuned import TunedSettings
    from fedtailor.studies.comparison import Progress

ENGINES = choices(Experiment.model_fields["engine"])
EXECUTION: dict[str, Any] = {"rich_help_panel": "Execution"}


@experiment_options(*RUN_GROUPS)
def run(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD|FILE.toml", help="methods, or experiment files", autocompletion=methods_and_files
        ),
    ],
    settings: dict[str, Any],
    assignments: Assignments = None,
    tuned: TunedFrom = None,
    to: Annotated[Path | None, out_directory(r"the run directory \[runs/METHOD-DATA-1, -2, …]")] = None,
    profile: Annotated[
        bool, typer.Option("--profile", rich_help_panel="Output", help="say where the time went")
    ] = False,
) -> None:
    """Run one method, or several side by side on the same clients.

    [bold]Examples[/]
      fedtailor run fedavg --data digits --clients 20 --rounds 30
      fedtailor run local fedavg ditto --partition classes:2 --participation 0.25
      fedtailor run ditto --set lam=0.5 --out runs/ditto-half
      fedtailor run experiment.toml --seed 1
      fedtailor run ditto --settings tuned:digits

    Every run directory holds the complete experiment.toml that repeats it.

    What a file turns on, like keep_momentum, is turned off by --no-keep-momentum.
    """
    from fedtailor.experiment.tuned import find_settings, tuned_in_words
    from fedtailor.methods import command_title

    try:
        with working("setting up"):
            from fedtailor.engines.runs import PreparedRuns, run_prepared

            found = None if tuned is None else find_settings(tuned)
            experiments = _experiments(what, settings, parse_assignments(assignments or []), found)
            paths = _directories(experiments, to)
            ready = PreparedRuns()  # of all experiments, so that what is wrong is found before the first run
            prepared = [ready.prepare(experiment) for experiment in experiments]
    except KeyboardInterrupt:
        _interrupted(None)
    if not loudness.quiet:
        print_setup(setup_lines(prepared))
    results: list[RunResult] = []
    with progress_bars() as bars:
        for experiment, made, path in zip(experiments, prepared, paths, strict=True):
            bar = RoundProgress(bars, command_title(experiment.method), experiment.rounds)
            try:
                results.append(run_prepared(experiment, made, path, bar.round, bar.start))
            except KeyboardInterrupt:
                bars.stop()
                if results:
                    out.print(results_table(results))
                _interrupted(path)
    out.print(results_table(results))
    if found is not None and found.tuned is not None:
        out.print(tuned_in_words(found.tuned))
    if profile:
        out.print(_profile_table(results))
    for path in paths:
        say(f"Recorded in {path}")


def resume(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory", autocompletion=runs)],
    rounds: Annotated[int | None, typer.Option(metavar="N", help="go on to more rounds than were asked for")] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="worker processes", **EXECUTION)] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(ENGINES), autocompletion=from_names(ENGINES), help="where clients run", **EXECUTION
        ),
    ] = None,
    address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="the Ray cluster", **EXECUTION)] = None,
    deadline: Annotated[
        float | None,
        typer.Option(metavar="X", help="seconds that a client may take for its work in a round", **EXECUTION),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(metavar="DIR", help="where data sets lie now", **EXECUTION)] = None,
    add_client: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PATH|CLIENT",
            help="data of new clients that take part from now on, or one that the run held out; may be repeated",
        ),
    ] = None,
    track: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="other trackers than the run's, or none", **EXECUTION)
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="run the code that the run names (module:Class)")] = False,
) -> None:
    """Continue an interrupted run from its last checkpoint.

    The numbers are those of a run that was never interrupted.

    With --add-client, new clients join it: those that a file (npz, CSV, folder) names, or one with all its samples,
    named NAME or like the file; or a client that the run held out (run --new-clients). They are split as the run's
    clients are. A run that is finished needs more --rounds for them.

    [bold]Examples[/]
      fedtailor resume runs/ditto-digits-1
      fedtailor resume runs/pgfed --add-client north=hospital-north.csv --rounds 40
    """
    from fedtailor.engines.runs import resume as resume_run

    given = {"rounds": rounds, "workers": workers, "engine": engine, "address": address, "deadline": deadline}
    given |= {"data_dir": data_dir}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    with progress_bars() as bars:
        bar = RoundProgress(bars, visible(directory), None)
        try:
            result = resume_run(
                directory,
                add_clients=add_client,
                trust=trust,
                track=track,
                on_round=bar.round,
                on_start=bar.start,
                **changes,
            )
        except KeyboardInterrupt:
            bars.stop()
            _interrupted(directory)
    out.print(results_table([result]))


def show(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="a run, or a comparison", autocompletion=runs_and_comparisons)
    ],
    json: Json = False,
) -> None:
    """Show a run: its metrics, its rounds, its clients. Or a comparison: its tables, and what is unfinished."""
    if (directory / "comparison.toml").is_file():
        _show_comparison(directory, json)
        return
    from fedtailor.engines.runs import load
    from fedtailor.reporting.client_tables import rich_clients_of_run
    from fedtailor.server.records import plain_metrics
    from fedtailor.server.run_directory import RunDirectory

    check_run(directory)
    result = load(directory)
    if json:
        clients = [
            {"client": client, "name": result.names[client], "hostile": client in result.hostile}
            | plain_metrics(metrics)
            for client, metrics in result.per_client.items()
        ]
        print_json({**result.summary(), "per_client": clients})
        return
    if setup := RunDirectory(directory).setup():
        print_setup(network_lines([setup]))
    if not result.rounds:
        out.print(f"{directory}: no round is finished yet. Continue with: {continue_with(directory)}")
        return
    out.print(results_table([result]))
    out.print(_rounds_table(result))
    if result.per_client:
        out.print(rich_clients_of_run(result, f"fedtailor show {directory} --json"))
    if not result.finished:
        say(f"Not finished. Continue with: {continue_with(directory)}")


def _show_comparison(directory: Path, json: bool) -> None:
    """Show a comparison as `compare` did. Nothing that it names is run."""
    from fedtailor.reporting.client_tables import rich_clients
    from fedtailor.reporting.conclusion import verdict
    from fedtailor.reporting.tables import rich_table
    from fedtailor.studies.client_results import client_table
    from fedtailor.studies.comparison import read_comparison

    progress = read_comparison(directory)
    if json:
        print_json(_plain_comparison(progress))
        return
    if progress.summary is not None:
        whole = f"`fedtailor show {directory} --json`"
        out.print(rich_table(progress.summary, out.width))
        out.print(rich_clients(client_table(progress.summary), out.width, whole))
        if not progress.unfinished:
            out.print(f"\n{visible(verdict(progress.summary))}", soft_wrap=not out.is_terminal)
    for title, (rounds, asked) in progress.unfinished.items():
        why = f": {progress.failed[title]}" if title in progress.failed else "."
        say(f"Not finished: {title}, {rounds} of {asked} rounds{why}")
    if progress.unfinished:
        again = f"fedtailor compare {directory / 'comparison.toml'} --out {directory}"
        again = "the same call in Python, as it names objects" if progress.only_in_python else again
        say(f"Continue with: {again}")


def _plain_comparison(progress: "Progress") -> dict[str, object]:
    from fedtailor.server.run_directory import plain
    from fedtailor.studies.client_results import client_table

    summary = progress.summary
    tables = {} if summary is None else {**summary.plain(), "clients": client_table(summary).plain()}
    unfinished = {title: {"rounds": done, "of": asked} for title, (done, asked) in progress.unfinished.items()}
    return {**plain(tables), "unfinished": unfinished, "failed": progress.failed}


def _experiments(
    what: list[str], options: dict[str, Any], assignments: dict[str, Any], tuned: "TunedSettings | None" = None
) -> list[Experiment]:
    """Make the experiment of each METHOD or FILE, with the command line's settings over the file's, and `tuned` ones
    beside them. A parameter is set for those of the methods that have it."""
    from fedtailor.experiment.tuned import for_run
    from fedtailor.methods import find_method, method_class

    bases = [word_settings(word) for word in what]
    fields = [method_class(str(base.get("method", "fedavg"))).model_fields for base in bases]
    for name in assignments:
        check_assignment(name, {parameter for known in fields for parameter in known}, what)
    experiments = []
    for base, known in zip(bases, fields, strict=True):
        own = {name: value for name, value in assignments.items() if "." in name or name in {*known, *SETTING_NAMES}}
        settings = with_assignments(merged(base, options), own, known)
        if tuned is not None:
            settings = for_run(settings, tuned, str(base.get("method", "fedavg")))
        experiments.append(make_experiment(settings))
        find_method(experiments[-1].method, experiments[-1].parameters)
    return experiments


def word_settings(word: str) -> dict[str, Any]:
    """Read the settings that a METHOD or FILE.toml stands for."""
    path = Path(word)
    if word.endswith(".toml"):
        return read_experiment(path)
    if (path / "experiment.toml").is_file():
        raise FedtailorError(
            f"{word} is a run: go on with `fedtailor resume {word}`, or repeat {word}/experiment.toml."
        )
    if "," in word or path.is_file():
        raise FedtailorError(f"{word!r} is no method: put spaces between methods, and .toml behind a file's name.")
    return {"method": word}


def _directories(experiments: list[Experiment], to: Path | None) -> list[Path]:
    """Name each run's directory: below DIR if there are several runs, numbered if no DIR is given."""
    from fedtailor.server.run_directory import check_free, new_directory

    if to is not None:
        paths = (
            [to / experiment.method.replace(":", ".") for experiment in experiments] if len(experiments) > 1 else [to]
        )
    else:
        names = [f"{e.method.replace(':', '.')}-{Path(e.data.replace(':', '-')).stem}" for e in experiments]
        paths = [new_directory(name) for name in names]
    if len(set(paths)) < len(paths):
        raise FedtailorError("The same method is named twice: run it in two commands.")
    for path in paths:
        check_free(path)
    return paths


def _interrupted(path: Path | None) -> NoReturn:
    begun = path is not None and (path / "experiment.toml").is_file()
    interrupted(f"Interrupted. Continue with: fedtailor resume {path}" if begun else "Interrupted.")


def _profile_table(results: list["RunResult"]) -> Any:
    """A table of the seconds spent in each part of the rounds, and of training samples per second."""
    from fedtailor.studies.measures import samples_per_second

    phases = ("sending", "training", "aggregation", "evaluation", "checkpoints")
    rows = []
    for result in results:
        spent = result.simulation.loop.phases
        within = sum(seconds for phase, seconds in spent.items() if phase != "checkpoints")
        rest = sum(record.seconds for record in result.rounds) - within
        speed = samples_per_second(result)
        cells = [*(spent.get(phase, 0.0) for phase in phases), max(0.0, rest)]
        last = "–" if speed is None else f"{speed:,.0f}"
        rows.append((result.method, *(f"{cell:.2f}" for cell in cells), last))
    columns = ("method", *phases, "the rest", "samples/s")
    return table_of("Where the time went, in seconds of all rounds", columns, rows)


def _rounds_table(result: "RunResult") -> Any:
    """A table of the rounds, about twenty of them at most."""
    from fedtailor.training.metrics import Metric

    metric = result.metric
    own = [Metric(name, more=True) for name in result.experiment.evaluation.metrics or () if name != metric.name]
    missing = any(record.missing for record in result.rounds)
    private = any(record.epsilon is not None for record in result.rounds)
    clock, late = (any(getattr(record, name) for record in result.rounds) for name in ("clock", "late"))
    counts = ("participants", "failed", *(["late"] if late else []), *(["not measured"] if missing else []))
    counts = (*counts, *(["ε"] if private else []), *(["clock"] if clock else []))
    columns = ("round", metric.title, "std", *(each.title for each in own), "loss", *counts, "up", "down", "seconds")
    step = max(1, -(-len(result.rounds) // 20))
    rows = [
        (
            str(record.round),
            metric.text(metric.of(record)),
            metric.text(record.std),
            *(each.text(each.of(record)) for each in own),
            decimals(record.loss),
            str(len(record.participants)),
            str(len(record.failed)),
            *([str(len(record.late))] if late else []),
            *([str(len(record.missing))] if missing else []),
            *([epsilon_text(record.epsilon)] if private else []),
            *([f"{record.clock or 0:,.1f} s"] if clock else []),
            human_bytes(record.bytes_up),
            human_bytes(record.bytes_down),
            f"{record.seconds:.2f}",
        )
        for record in result.rounds[step - 1 :: step]
    ]
    return table_of("Rounds", columns, rows, left=())


def continue_with(directory: Path) -> str:
    """Name the command that goes on with a run: where its clients are real sites, the coordinator's."""
    from fedtailor.data.agreement import FILE

    real = (directory / FILE).is_file()
    return f"fedtailor deploy run PLAN.toml --out {directory}" if real else f"fedtailor resume {directory}"


def check_run(directory: Path) -> None:
    """Refuse a directory that is no run, but has some inside: name one of them."""
    files = (file for name in ("experiment.toml", "comparison.toml") for file in directory.glob(f"*/{name}"))
    inside = sorted(file.parent for file in files)
    if inside and not (directory / "experiment.toml").is_file():
        raise FedtailorError(
            f"{directory} has runs inside: show one of them, like {inside[0]}, or make a page of all with `fedtailor "
            f"report {directory}`."
        )
