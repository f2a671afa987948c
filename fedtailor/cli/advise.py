"""`fedtailor advise`."""

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.cli import JsonOfMany, loudness
from fedtailor.cli.completion import completer_of, methods
from fedtailor.cli.display import data_lines, interrupted, marked, out, print_json, progress_bars, say, table_of
from fedtailor.cli.options import experiment_options
from fedtailor.experiment import Experiment, make_experiment

if TYPE_CHECKING:
    from fedtailor.data import FederatedData
    from fedtailor.studies.advice import Advice

SECONDS = 90.0
HELD_OUT = 0.2  # validation samples: what the race is judged by


@experiment_options("Data", "Model", "Training", "Execution")
def advise(
    settings: dict[str, Any],
    budget: Annotated[
        float, typer.Option(min=1, metavar="X", rich_help_panel="Race", help="seconds that it may take, about")
    ] = SECONDS,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="NAME",
            rich_help_panel="Race",
            autocompletion=methods,
            help="a method for the shortlist, in place of the usual (may be repeated)",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel="Race",
            autocompletion=completer_of("evaluate_metric"),
            help=r"the metric that decides, as in run \[accuracy; rmse for numbers, f1 for several labels]",
        ),
    ] = None,
    json: JsonOfMany = False,
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
        task = bars.add_task("setting up", total=None, status="", unit="round")

        def report(title: str, done: int, total: int) -> None:
            bars.update(task, description=title, completed=done, total=total)

        def describe(data: "FederatedData") -> None:
            for line in [] if json or loudness.quiet else data_lines([data]):
                say(line)

        try:
            advice = ask(experiment, budget, tuple(method) if method else SHORTLIST, report, on_data=describe)
        except KeyboardInterrupt:
            interrupted()
        bars.update(task, visible=False)
    if json:
        print_json(_plain(advice, settings, race))
        return
    _print(advice, settings, race)


def _print(advice: "Advice", settings: dict[str, Any], race: dict[str, Any]) -> None:
    for sentence in str(advice).splitlines():
        out.print(sentence)
    metric = advice.metric
    rows = [
        (c.title, str(c.rounds), "failed" if c.failed else metric.text(c.mean), f"{c.seconds:.2f}")
        for c in advice.candidates
    ]
    out.print(table_of("The race, on validation samples", ("method", "rounds", metric.title, "s a round"), rows))
    if (following := command(advice, settings, race)) is not None:
        say(marked("Next:", "bold", following))


def command(advice: "Advice", settings: dict[str, Any], race: dict[str, Any]) -> str | None:
    """Write the command to go on with: the one that runs the recommended method or, where nothing is decided, the
    same race for longer, or with more validation samples. None if neither can be had."""
    from fedtailor.studies.advice import MORE, MOST

    if advice.chosen is None:
        again = {**settings, **race}
        if advice.budget is not None:
            again["budget"] = advice.budget
        if advice.few_samples and advice.candidates[0].experiment.validation < MORE:
            again["validation"] = MORE
        return _command(["advise"], again) if again != {**settings, **race} else None
    method, _, tuned = advice.chosen.partition(", ")
    wanted = {"rounds": MOST, **settings}
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
        "still_learning": dict(advice.rising),
        "budget_that_would_tell": advice.budget,
        "validation_samples": advice.n_samples,
        "skew": asdict(advice.skew),
        "race": [
            {"method": c.title, "rounds": c.rounds, advice.metric.name: c.mean, "seconds_per_round": c.seconds}
            for c in advice.candidates
        ],
        "seconds": advice.seconds,
        "words": str(advice).splitlines(),
        "next": command(advice, settings, race),
    }
