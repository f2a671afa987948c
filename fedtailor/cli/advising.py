"""`fedtailor advise`."""

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.cli.display import data_lines, err, json_text, marked, out, percent, plain_table, progress_bars
from fedtailor.cli.options import experiment_options
from fedtailor.cli.running import INTERRUPTED
from fedtailor.experiment import Experiment, make_experiment

if TYPE_CHECKING:
    from fedtailor.data import FederatedData
    from fedtailor.metric import Metric
    from fedtailor.studies.advice import Advice

SECONDS = 90.0
ROUNDS = 100  # of the run that is recommended, unless said
HELD_OUT = 0.2  # validation samples: what the race is judged by
MORE = 0.4  # of them, where they cannot tell


@experiment_options("Data", "Model", "Training", "Execution")
def advise(
    settings: dict[str, Any],
    budget: Annotated[float, typer.Option(min=1, help="seconds that the race may take, about")] = SECONDS,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", help="a method for the shortlist, in place of the usual (may be repeated)"),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help=r"the metric that decides, as in run \[accuracy; rmse for numbers, f1 for several labels]",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Recommend a method for these clients, or none, after a short race between several.

    It measures how far the clients' labels and features differ, and races a shortlist (one global model, the same
    fine-tuned, each client alone, and several personalized methods) by successive halving on validation samples.

    [bold]Examples[/]

    fedtailor advise --data digits --clients 20 --partition classes:2

    fedtailor advise --data my-data.npz --partition natural --budget 300
    """
    from fedtailor.studies.advice import SHORTLIST
    from fedtailor.studies.advice import advise as ask

    settings |= {} if metric is None else {"metric": metric}
    experiment = make_experiment({"validation": HELD_OUT, **settings})
    race = {"budget": budget, "method": method}
    with progress_bars() as bars:
        task = bars.add_task("setting up", total=None, status="")

        def report(title: str, done: int, total: int) -> None:
            bars.update(task, description=title, completed=done, total=total)

        def describe(data: "FederatedData") -> None:
            for line in [] if json else data_lines([data]):
                bars.console.print(line, highlight=False, soft_wrap=True)

        try:
            advice = ask(experiment, budget, tuple(method) if method else SHORTLIST, report, on_data=describe)
        except KeyboardInterrupt:
            err.print("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None
        bars.update(task, visible=False)
    if json:
        typer.echo(json_text(_plain(advice, settings, race)))
        return
    _print(advice, settings, race)


def _print(advice: "Advice", settings: dict[str, Any], race: dict[str, Any]) -> None:
    for sentence in sentences(advice):
        out.print(sentence, highlight=False)
    table = plain_table("The race, on validation samples")
    table.add_column("method", style="bold")
    metric = advice.metric
    for name in ("rounds", metric.title, "s a round"):
        table.add_column(name, justify="right")
    for candidate in advice.candidates:
        table.add_row(candidate.title, str(candidate.rounds), metric.text(candidate.mean), f"{candidate.seconds:.2f}")
    out.print(table)
    if (following := command(advice, settings, race)) is not None:
        out.print(marked("Next:", "bold", following), highlight=False, soft_wrap=True)


def sentences(advice: "Advice") -> list[str]:
    """Say in plain words what was measured, what is recommended and why."""
    from fedtailor.studies.advice import ALONE, GLOBAL, TUNED

    found, metric = _skew_sentences(advice), advice.metric
    low, high = (_points(metric, end) for end in advice.interval)
    unit = "points" if metric.percent else f"in {metric.title}"
    gain = (
        f"{_points(metric, advice.gain)} {unit} against one model for all, 95 % interval {low} … {high}, "
        f"p = {advice.p:.2g}"
    )
    worth = "a point" if metric.percent else f"{advice.margin:.3g}"
    if not advice.by_samples and metric.name != "accuracy":
        clients = len(advice.candidates[0].values)
        found.append(f"The test is over {clients} clients: how sure the {metric.title} of each is does not count.")
    if not advice.decided:
        leader = advice.best if advice.gain > 0 else GLOBAL
        share = advice.candidates[0].experiment.validation
        more = f"more validation samples (--validation {MORE:g})" if share < MORE else "more samples"
        return [
            *found,
            f"Not decided: can't tell with {advice.n_samples:,} validation samples whether personal models pay. The "
            f"best of them is {advice.best} ({gain}). Best so far: {leader}. Give {more} or more clients.",
        ]
    if advice.chosen == GLOBAL:
        why = f"No personal model is better by {worth}. The best is {advice.best} ({gain})."
        if advice.best == GLOBAL:
            why = "There was no personal model in the race."
        return [*found, f"Recommended: one global model ({GLOBAL}). {why}"]
    if advice.chosen == ALONE:
        why = f"Models that each client trains alone are as good as any ({gain}): learning together adds nothing here."
    elif advice.chosen == TUNED:
        why = f"The global model, fine-tuned by each client, is as good as any personalized method ({gain})."
    else:
        why = f"Personal models pay ({gain})."
    return [*found, f"Recommended: a personal model for each client, by {advice.chosen}. {why}"]


def _skew_sentences(advice: "Advice") -> list[str]:
    """Say how far the clients' targets and features differ."""
    skew = advice.skew
    beside = "more than" if skew.label > 1.5 * skew.label_by_chance else "about as much as"
    chance = f"{beside} chance would give ({percent(skew.label_by_chance)} %)"
    targets = {
        "classes": f"Labels: a client's classes differ from everybody's by {percent(skew.label)} % on average, "
        f"{chance}.",
        "labels": f"Labels: a client has a label more or less often than everybody by {percent(skew.label)} % on "
        f"average, {chance}.",
        "numbers": f"Targets: {percent(skew.label)} % of what varies goes with the client, {chance}.",
    }
    within = " within a class" if skew.targets == "classes" else ""
    return [targets[skew.targets], f"Features: {percent(skew.feature)} % of what varies{within} goes with the client."]


def _points(metric: "Metric", gain: float) -> str:
    """Format a gain: in points, or in the metric's own unit."""
    return f"{100 * gain:+.1f}" if metric.percent else metric.text(gain, "+")


def command(advice: "Advice", settings: dict[str, Any], race: dict[str, Any]) -> str | None:
    """Write the command to go on with: the one that runs the recommended method or, where nothing is decided, the
    same race with more validation samples. None if it has many of them already."""
    if advice.chosen is None:
        if advice.candidates[0].experiment.validation >= MORE:
            return None
        return _command(["advise"], {**settings, **race, "validation": MORE})
    method, _, tuned = advice.chosen.partition(", ")
    wanted = {"rounds": ROUNDS, **settings}
    if tuned:
        wanted["fine_tune"] = settings.get("epochs", Experiment.model_fields["epochs"].default)
    return _command(["run", method], wanted)


def _command(words: list[str], options: dict[str, Any]) -> str:
    """Write a command with these options; one with a list of values is repeated."""
    words = ["fedtailor", *words]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            for one in value if isinstance(value, list) else [] if value is None else [value]:
                words += [f"--{flag}", f"{one:g}" if isinstance(one, float) else str(one)]
    return shlex.join(words)


def _plain(advice: "Advice", settings: dict[str, Any], race: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "metric": advice.metric.name,
        "higher_is_better": advice.metric.higher_is_better,
        "decided": advice.decided,
        "recommended": advice.chosen,
        "personalization_needed": advice.needed,
        "best_personal": advice.best,
        "gain": advice.gain,
        "interval": advice.interval,
        "p": advice.p,
        "validation_samples": advice.n_samples,
        "skew": asdict(advice.skew),
        "race": [
            {"method": c.title, "rounds": c.rounds, advice.metric.name: c.mean, "seconds_per_round": c.seconds}
            for c in advice.candidates
        ],
        "seconds": advice.seconds,
        "words": sentences(advice),
        "next": command(advice, settings, race),
    }
