"""`fedtailor run`, `resume` and `show`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.cli.display import (
    RoundProgress,
    err,
    human_bytes,
    out,
    percent,
    plain_table,
    progress_bars,
    results_table,
)
from fedtailor.cli.options import experiment_options, parse_assignments
from fedtailor.errors import FedtailorError, unknown
from fedtailor.experiment import Evaluation, Experiment, make_experiment, read_experiment

if TYPE_CHECKING:
    from fedtailor.api import RunResult

INTERRUPTED = 130


@experiment_options("Data", "Model", "Training", "Evaluation", "Execution")
def run(
    what: Annotated[
        list[str],
        typer.Argument(metavar="METHOD|FILE.toml", show_default=False, help="methods, or experiment files"),
    ],
    settings: dict[str, Any],
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="a parameter of the method, or any setting",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help=r"the run directory \[runs/METHOD-DATA-1, -2, …]", show_default=False
        ),
    ] = None,
) -> None:
    """Run one method, or several side by side on the same clients.

    [bold]Examples[/]

    fedtailor run fedavg --data digits --clients 20 --rounds 30

    fedtailor run local fedavg ditto --partition classes:2 --participation 0.25

    fedtailor run ditto --set lam=0.5 --out runs/ditto-half

    fedtailor run experiment.toml --seed 1

    Every run directory holds the complete experiment.toml that repeats it.
    """
    experiments = [_experiment(word, settings, parse_assignments(assignments or [])) for word in what]
    paths = _directories(experiments, to)
    results = []
    with progress_bars() as bars:
        for experiment, path in zip(experiments, paths, strict=True):
            from fedtailor.api import run_experiment

            bar = RoundProgress(bars, experiment.method)
            try:
                results.append(run_experiment(experiment, out=path, on_round=bar.round, on_start=bar.start))
            except KeyboardInterrupt:
                bars.stop()
                _interrupted(path)
    out.print(results_table(results))
    for path in paths:
        out.print(f"Recorded in {path}", highlight=False, soft_wrap=True)


def resume(
    directory: Annotated[Path, typer.Argument(help="a run directory", show_default=False)],
    rounds: Annotated[
        int | None, typer.Option(help="go on to more rounds than were asked for", show_default=False)
    ] = None,
    workers: Annotated[int | None, typer.Option(help="worker processes", show_default=False)] = None,
    engine: Annotated[str | None, typer.Option(help="where clients run", show_default=False)] = None,
    data_dir: Annotated[str | None, typer.Option(help="where data sets lie now", show_default=False)] = None,
) -> None:
    """Go on with a run that was interrupted, after its last checkpoint.

    The numbers are those of a run that was never interrupted.
    """
    from fedtailor.api import resume as resume_run

    given = {"rounds": rounds, "workers": workers, "engine": engine, "data_dir": data_dir}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    with progress_bars() as bars:
        bar = RoundProgress(bars, str(directory))
        try:
            result = resume_run(directory, on_round=bar.round, on_start=bar.start, **changes)
        except KeyboardInterrupt:
            bars.stop()
            _interrupted(directory)
    out.print(results_table([result]))


def show(
    directory: Annotated[Path, typer.Argument(help="a run directory", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Show what a run came to: its figures, its rounds, its clients."""
    from fedtailor.api import load

    result = load(directory)
    if json:
        out.print_json(data={**result.summary(), "per_client": result.per_client})
        return
    if not result.rounds:
        out.print(f"{directory}: no round is finished yet. Continue with: fedtailor resume {directory}")
        return
    out.print(results_table([result]))
    out.print(_rounds_table(result))
    out.print(_clients_table(result))
    if not result.finished:
        out.print(f"Not finished. Continue with: fedtailor resume {directory}", soft_wrap=True)


def _experiment(word: str, options: dict[str, Any], assignments: dict[str, Any]) -> Experiment:
    """The experiment of one METHOD or FILE, with the command line's settings over the file's."""
    from fedtailor.methods import find_method

    base: dict[str, Any] = read_experiment(Path(word)) if word.endswith(".toml") else {"method": word}
    settings = {**base, **options}
    sections = {name: {**base.get(name, {}), **options.get(name, {})} for name in ("parameters", "evaluation")}
    known = type(find_method(str(settings.get("method", "fedavg")))).model_fields
    for name, value in assignments.items():
        section, dot, inner = name.rpartition(".")
        if name in known or section == "parameters":
            sections["parameters"][inner] = value
        elif section == "evaluation":
            sections["evaluation"][inner] = value
        elif not dot and name in Experiment.model_fields:
            settings[name] = value
        else:
            raise unknown(
                f"parameter of {word} and no setting",
                name,
                [*known, *Experiment.model_fields, *Evaluation.model_fields],
            )
    experiment = make_experiment({**settings, **{name: value for name, value in sections.items() if value}})
    find_method(experiment.method, experiment.parameters)
    return experiment


def _directories(experiments: list[Experiment], to: Path | None) -> list[Path]:
    """Where each run is recorded: below DIR if there are several, in new numbered directories if none is given."""
    from fedtailor.federation.record import new_directory

    if to is not None:
        paths = (
            [to / experiment.method.replace(":", ".") for experiment in experiments] if len(experiments) > 1 else [to]
        )
    else:
        names = [f"{e.method.replace(':', '.')}-{Path(e.data.replace(':', '-')).stem}" for e in experiments]
        paths = [new_directory(name) for name in names]
    if len(set(paths)) < len(paths):
        raise FedtailorError("The same method is named twice: run it in two commands, each with its own --out.")
    return paths


def _interrupted(path: Path) -> None:
    err.print(f"Interrupted. Continue with: fedtailor resume {path}", soft_wrap=True)
    raise typer.Exit(INTERRUPTED)


def _rounds_table(result: "RunResult") -> Any:
    """The rounds, at most about twenty of them."""
    table = plain_table("Rounds")
    for name in ("round", "accuracy", "std", "loss", "participants", "failed", "up", "down", "seconds"):
        table.add_column(name, justify="right")
    step = max(1, -(-len(result.rounds) // 20))
    for record in result.rounds[step - 1 :: step]:
        loss = "–" if record["loss"] is None else f"{record['loss']:.4f}"
        table.add_row(
            str(record["round"]),
            percent(record["accuracy"]),
            percent(record["accuracy_std"]),
            loss,
            str(len(record["participants"])),
            str(len(record["failed"])),
            human_bytes(record["bytes_up"]),
            human_bytes(record["bytes_down"]),
            f"{record['seconds']:.2f}",
        )
    return table


def _clients_table(result: "RunResult") -> Any:
    """The clients, the worst first, at most twenty of them."""
    ranked = sorted(result.per_client.items(), key=lambda item: (item[1]["accuracy"] is None, item[1]["accuracy"] or 0))
    table = plain_table(f"Clients, the worst {min(20, len(ranked))} of {len(ranked)} first")
    for name in ("client", "accuracy", "balanced", "AUC", "loss"):
        table.add_column(name, justify="right")
    for client, metrics in ranked[:20]:
        auc, loss = metrics["auc"], metrics["loss"]
        table.add_row(
            str(client),
            percent(metrics["accuracy"]),
            percent(metrics["balanced_accuracy"]),
            "–" if auc is None else f"{auc:.4f}",
            "–" if loss is None else f"{loss:.4f}",
        )
    return table
