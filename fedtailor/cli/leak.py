"""`fedtailor leak`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fedtailor._common.errors import FedtailorError
from fedtailor.cli import JsonOfMany
from fedtailor.cli.compare import asked
from fedtailor.cli.completion import from_names
from fedtailor.cli.completion import methods as known_methods
from fedtailor.cli.display import interrupted, out, print_json, progress_bars, say, table_of, working
from fedtailor.cli.options import Assignments, experiment_options, out_directory, parse_assignments
from fedtailor.experiment import make_experiment

if TYPE_CHECKING:
    from fedtailor.attacks.inversion import Inversion
    from fedtailor.attacks.leakage import Leakage
    from fedtailor.attacks.study import Study


@experiment_options("Data", "Model", "Training", "Privacy and attacks")
def leak(
    methods: Annotated[
        list[str], typer.Argument(metavar="METHOD", help="methods to attack", autocompletion=known_methods)
    ],
    settings: dict[str, Any],
    inversion: Annotated[
        str,
        typer.Option(
            metavar="dlg|idlg|cosine|analytic",
            rich_help_panel="Attack",
            autocompletion=from_names(("dlg", "idlg", "cosine", "analytic")),
            help="the attack: DLG, iDLG, cosine distance with total variation, or the closed form for one sample and a "
            "dense first layer",
        ),
    ] = "cosine",
    samples: Annotated[
        int, typer.Option(metavar="N", rich_help_panel="Attack", help="training samples of an attacked client")
    ] = 1,
    victims: Annotated[
        int, typer.Option(metavar="N", rich_help_panel="Attack", help="clients that are attacked, each on its own")
    ] = 1,
    round: Annotated[
        int, typer.Option("--round", metavar="N", rich_help_panel="Attack", help="the round whose uploads are inverted")
    ] = 1,
    iterations: Annotated[
        int | None,
        typer.Option(metavar="N", rich_help_panel="Attack", help=r"of the attack's optimiser \[300; 1000 for cosine]"),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            metavar="N", rich_help_panel="Attack", help="attempts from other noise, of which the best match counts"
        ),
    ] = 1,
    tv: Annotated[
        float,
        typer.Option(metavar="X", rich_help_panel="Attack", help="weight of the total variation of images, for cosine"),
    ] = 1e-3,
    unroll: Annotated[
        int,
        typer.Option(
            metavar="N", rich_help_panel="Attack", help="at most so many steps of a client are followed one by one"
        ),
    ] = 10,
    assignments: Assignments = None,
    json: JsonOfMany = False,
    to: Annotated[Path | None, out_directory("for a record (JSON, Markdown) and a picture")] = None,
) -> None:
    """Reconstruct clients' samples from what methods really upload, as a curious server could.

    The server follows the protocol, and knows the network, the experiment, what it sent to a client and what came
    back; nothing of the client's own. From this it looks for samples that would have given the same upload. The table
    has the reconstructions' quality beside that of two guesses which are no leak: the data set's mean image, and noise.

    [bold]Examples[/]
      fedtailor leak fedavg pgfed pflego --data digits
      fedtailor leak fedavg --samples 4 --victims 4 --restarts 4 --out leaks/fedavg
      fedtailor leak fedavg --privacy "client, clip=1.0, noise=0.5, by=clients"
    """
    from fedtailor.attacks.inversion import Attack
    from fedtailor.attacks.study import Question, Study
    from fedtailor.engines.preparation import Objects

    if any(word.endswith(".toml") for word in methods):
        raise FedtailorError("Give methods, not a file: their settings are options here.")
    attack = Attack(cast("Inversion", inversion), iterations, restarts, tv)  # which refuses any other name
    question = Question(attack, samples, victims, round, unroll)
    wanted = asked(methods, settings, parse_assignments(assignments or []))
    parameters = wanted.pop("parameters", {})
    each = [{**wanted, "method": name, "parameters": parameters.get(name, {})} for name in wanted.pop("methods")]
    found: Leakage | None = None
    try:
        with working("setting up"):
            study = Study([make_experiment(one) for one in each], question, Objects())
            found = study.begin()
        _perform(study, found)
    except KeyboardInterrupt:
        if found is not None and found.rows and not json:
            _print(found)
        interrupted("Interrupted: nothing is recorded.")
    files = [] if to is None else found.write(to)
    if json:
        print_json(found.plain())
        return
    _print(found)
    if files:
        say(f"Recorded in {to}: {', '.join(file.name for file in files)}")


def _perform(study: "Study", found: "Leakage") -> None:
    """Attack all methods, under a bar of all iterations."""
    with progress_bars() as bars:
        task = bars.add_task("", total=None, status="iterations", unit="iteration")
        for prepared in study.prepared:
            bars.update(task, description=prepared.experiment.method, total=study.work)
            found.rows.append(study.attack(prepared, lambda: bars.advance(task)))


def _print(found: "Leakage") -> None:
    head, *rows = found.cells()
    out.print(table_of(found.title, head, rows, left=("method", "matched", "verdict"), caption=found.rule))
