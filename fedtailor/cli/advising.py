"""`fedtailor advise`."""

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.cli.display import err, json_text, marked, out, percent, plain_table, progress_bars
from fedtailor.cli.options import experiment_options
from fedtailor.cli.running import INTERRUPTED
from fedtailor.experiment import Experiment, make_experiment

if TYPE_CHECKING:
    from fedtailor.studies.advice import Advice

SECONDS = 90.0
ROUNDS = 100  # of the run that is recommended, unless said
HELD_OUT = 0.2  # validation samples: what the race is judged by


@experiment_options("Data", "Model", "Training", "Execution")
def advise(
    settings: dict[str, Any],
    budget: Annotated[float, typer.Option(min=1, help="seconds that the race may take, about")] = SECONDS,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", help="a method for the shortlist, in place of the usual (may be repeated)"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Recommend a method for these clients, or none, after a short race between several.

    It measures how far the clients' labels and features differ, and races a shortlist (one global model, the same
    fine-tuned, each client alone, and several personalized methods) by successive halving on validation accuracy.

    [bold]Examples[/]

    fedtailor advise --data digits --clients 20 --partition classes:2

    fedtailor advise --data my-data.npz --partition natural --budget 300
    """
    from fedtailor.studies.advice import SHORTLIST
    from fedtailor.studies.advice import advise as ask

    experiment = make_experiment({"validation": HELD_OUT, **settings})
    with progress_bars() as bars:
        task = bars.add_task("setting up", total=None, status="")

        def report(title: str, done: int, total: int) -> None:
            bars.update(task, description=title, completed=done, total=total)

        try:
            advice = ask(experiment, budget, tuple(method) if method else SHORTLIST, report)
        except KeyboardInterrupt:
            err.print("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None
        bars.update(task, visible=False)
    if json:
        typer.echo(json_text(_plain(advice, settings)))
        return
    _print(advice, settings)


def _print(advice: "Advice", settings: dict[str, Any]) -> None:
    for sentence in sentences(advice):
        out.print(sentence, highlight=False)
    table = plain_table("The race, on validation samples")
    table.add_column("method", style="bold")
    for name in ("rounds", "accuracy", "s a round"):
        table.add_column(name, justify="right")
    for candidate in advice.candidates:
        table.add_row(candidate.title, str(candidate.rounds), percent(candidate.mean), f"{candidate.seconds:.2f}")
    out.print(table)
    out.print(marked("Next:", "bold", command(advice, settings)), highlight=False, soft_wrap=True)


def sentences(advice: "Advice") -> list[str]:
    """Say in plain words what was measured, what is recommended and why."""
    from fedtailor.studies.advice import ALONE, GLOBAL, TUNED

    skew = advice.skew
    labels = "more than" if skew.label > 1.5 * skew.label_by_chance else "about as much as"
    found = [
        f"Labels: a client's classes differ from everybody's by {percent(skew.label)} % on average, {labels} chance "
        f"would give ({percent(skew.label_by_chance)} %).",
        f"Features: {percent(skew.feature)} % of what varies within a class goes with the client.",
    ]
    gain = f"{100 * advice.gain:+.1f} points against one model for all, p = {advice.p:.2g}"
    if advice.chosen == GLOBAL:
        why = f"The best personal model ({gain}) is not better by more than chance or by a point."
        return [*found, f"Recommended: one global model ({GLOBAL}). {why}"]
    if advice.chosen == ALONE:
        why = f"Models that each client trains alone are as good as any ({gain}): learning together adds nothing here."
    elif advice.chosen == TUNED:
        why = f"The global model, fine-tuned by each client, is as good as any personalized method ({gain})."
    else:
        why = f"Personal models pay ({gain})."
    return [*found, f"Recommended: a personal model for each client, by {advice.chosen}. {why}"]


def command(advice: "Advice", settings: dict[str, Any]) -> str:
    """The command that runs the recommended method."""
    method, _, tuned = advice.chosen.partition(", ")
    wanted = {"rounds": ROUNDS, **settings}
    if tuned:
        wanted["fine_tune"] = settings.get("epochs", Experiment.model_fields["epochs"].default)
    words = ["fedtailor", "run", method]
    for name, value in wanted.items():
        flag = name.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return shlex.join(words)


def _plain(advice: "Advice", settings: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "recommended": advice.chosen,
        "personalization_needed": advice.needed,
        "gain": advice.gain,
        "p": advice.p,
        "skew": asdict(advice.skew),
        "race": [
            {"method": c.title, "rounds": c.rounds, "accuracy": c.mean, "seconds_per_round": c.seconds}
            for c in advice.candidates
        ],
        "seconds": advice.seconds,
        "words": sentences(advice),
        "next": command(advice, settings),
    }
