"""`fedtailor export`, `predict` and `adapt`: from a run to models at work."""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor._common.errors import FedtailorError
from fedtailor.cli.completion import completer_of, from_names, runs
from fedtailor.cli.display import (
    complain,
    decimals,
    interrupted,
    out,
    percent,
    print_json,
    progress_bars,
    say,
    table_of,
    visible,
)
from fedtailor.cli.options import TABLE, experiment_options
from fedtailor.cli.run import continue_with

if TYPE_CHECKING:
    from fedtailor.model_files.adaptation import Adaptation
    from fedtailor.model_files.format import Description
    from fedtailor.server.records import Averages
    from fedtailor.training.predictions import Predictions

SHOWN = 10  # predictions on the page; a file has them all
CLIENTS = 30  # new clients on the page

Run = Annotated[Path, typer.Argument(metavar="RUN", help="a run directory", autocompletion=runs)]
To = Annotated[Path, typer.Option("--to", metavar="DIR", help="where the model files go")]
Onnx = Annotated[bool, typer.Option("--onnx", help="as ONNX too (needs the extra fedtailor\\[onnx])")]
Trust = Annotated[bool, typer.Option("--trust", help="run the code that the run names (module:Class)")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="write over files that are there already")]
DataDir = Annotated[str | None, typer.Option(help=r"where data sets lie now \[as in the run]", metavar="DIR")]


def export(
    run: Run,
    to: To,
    client: Annotated[str | None, typer.Option(metavar="ID", help="one client's model, by its name or number")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="every training client's model (the default)")] = False,
    global_model: Annotated[bool, typer.Option("--global", help="the global model, of methods that have one")] = False,
    onnx: Onnx = False,
    hugging_face: Annotated[
        bool, typer.Option("--hugging-face", help="a folder for each model, with a card, as huggingface_hub uploads it")
    ] = False,
    overwrite: Overwrite = False,
    trust: Trust = False,
    track: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="trackers that get the files: mlflow, wandb or module:Class")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Write the models of a run as files that plain PyTorch loads.

    A model is what a client predicts with, in a .safetensors file. The .json beside it says what it is and how to load
    it: the network, the classes in their order, how samples are prepared, the accuracy that the run recorded, and
    three lines of PyTorch.

    [bold]Examples[/]
      fedtailor export runs/ditto --client 3 --to models
      fedtailor export runs/ditto --all --onnx --to models
      fedtailor export runs/fedavg --global --to models
      fedtailor export runs/fedavg --global --to models --hugging-face
      fedtailor export runs/ditto --client 3 --to models --track mlflow
    """
    if (client is not None) + everyone + global_model > 1:
        raise FedtailorError("--client, --all and --global exclude each other: give one of them.")
    from fedtailor.engines.runs import load
    from fedtailor.model_files.exports import export as write

    result = load(run, data_dir, trust=trust)
    written: list[tuple[list[Path], Description]] = []
    with progress_bars() as bars:
        total = len(result.names) - len(result.partition["new"]) if client is None and not global_model else 1
        bar = bars.add_task("exporting", total=total, status="", unit="model")

        def each(files: list[Path], about: "Description") -> None:
            written.append((files, about))
            bars.advance(bar)

        try:
            which: dict[str, Any] = {"client": client, "global_model": global_model}
            form: dict[str, Any] = {"onnx": onnx, "hugging_face": hugging_face}
            write(result, to=to, **which, **form, overwrite=overwrite, track=track, on_model=each)
        except KeyboardInterrupt:
            bars.stop()
            interrupted(f"Interrupted: {len(written)} of {total} models are in {to}.")
    about = written[0][1]
    _note_unfinished(run, about.round, about.rounds)
    if len(written) == 1:
        _show_model(*written[0])
        return
    values = [about.value for _, about in written if about.value is not None]
    mean = f", mean {about.metric.shown(sum(values) / len(values))}" if values and about.metric else ""
    say(f"{_counted(len(written), 'model')} of {about.method} in {to}{mean}.")
    out.print(f"The {'config' if hugging_face else ''}.json beside each says how to load it.")


def _note_unfinished(run: Path, finished: int, rounds: int) -> None:
    if finished < rounds:
        unfinished = f"the run is not finished: this is round {finished} of {rounds}, its last checkpoint"
        say(f"Note: {unfinished}. Continue with: {continue_with(run)}", "yellow")


def _show_model(files: list[Path], about: "Description") -> None:
    whose = "The global model" if about.client is None else f"The model of client {about.name}"
    metric = "" if about.loss is None else f"loss {about.loss} "
    if about.value is not None and about.metric:
        metric = f"{about.metric.shown(about.value)} "
    out.print(visible(f"{whose}: {about.method}, round {about.round}; {metric}{about.measured}."))
    say("Written to " + ", ".join(map(str, files)))
    out.print("\nLoad it with:")
    for line in about.load:
        say("  " + line.replace(files[0].name, str(files[0])))


@experiment_options(TABLE)
def predict(
    settings: dict[str, Any],
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a model file (.safetensors)")],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="a data set, or an npz, CSV or folder of yours",
            autocompletion=completer_of("data"),
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="in place of --data: the samples of a run's clients", autocompletion=runs),
    ] = None,
    client: Annotated[str | None, typer.Option(metavar="ID", help="only the samples of this client")] = None,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="train|validation|test",
            help="only this part of the samples",
            autocompletion=from_names(("train", "validation", "test")),
        ),
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help=r"where data sets lie \[FEDTAILOR_DATA, else ./data]")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="resize the images of a folder to this square")
    ] = None,
    network: Annotated[
        str | None, typer.Option("--model", metavar="module:Class", help="the network, if it is of your own")
    ] = None,
    to: Annotated[Path | None, typer.Option("--out", metavar="FILE.csv", help="write all predictions here")] = None,
    overwrite: Overwrite = False,
    json: Annotated[bool, typer.Option("--json", help="all predictions, for programs")] = False,
) -> None:
    """Predict with a model file: classes and probabilities, and the accuracy if there are labels.

    The samples are those of a data set, in its order. Your own files may come without labels: an npz without y, a CSV
    without a label column, a folder with nothing but images. The columns of a table are matched by name: it needs those
    that the model was trained with, in any order.

    [bold]Examples[/]
      fedtailor predict models/client-3.safetensors --data patients.csv --out predictions.csv
      fedtailor predict models/client-3.safetensors --run runs/ditto --client 3 --part test
    """
    if (data is None) == (run is None):
        raise FedtailorError("Say which samples to predict: with --data NAME, or with --run DIR.")
    from fedtailor._common.files import make_directory, write_atomically
    from fedtailor.model_files.format import check_free
    from fedtailor.model_files.prediction import Model

    if to is not None:
        check_free([to], overwrite)
    reader = Model(model, network)
    if run is not None:
        samples = reader.of_run(run, client, part, data_dir)
    else:
        samples = reader.of_data(reader.load(str(data), data_dir, image_size, **settings), client, part)
    for note in samples.notes:
        complain("Note:", note)
    predictions = reader.predict(samples.inputs, samples.labels)
    if to is not None:
        make_directory(to.parent)
        write_atomically(to, predictions.csv())
    if json:
        _print_json(model, predictions)
    else:
        _show_predictions(predictions, str(data or run))
        if to is not None:
            say(f"All predictions are in {to}")


def _print_json(model: Path, predictions: "Predictions") -> None:
    from fedtailor.server.run_directory import plain

    rows = list(predictions.rows())
    answer = {"model": str(model), "samples": len(rows), "accuracy": predictions.accuracy, "predictions": rows}
    print_json(plain(answer), indent=None)


def _show_predictions(predictions: "Predictions", source: str) -> None:
    """Print the first predictions, how often each class was predicted, and the accuracy where there are labels."""
    count = len(predictions.outputs)
    title = f"{source}: {count:,} samples" + (f", the first {SHOWN}" if count > SHOWN else "")
    columns = [name for name in next(predictions.rows()) if not name.startswith(("p(", "has("))]
    first = [[row[name] for name in columns] for row in islice(predictions.rows(), SHOWN)]
    rows = [[f"{value:.4f}" if isinstance(value, float) else visible(value) for value in values] for values in first]
    out.print(table_of(title, columns, rows, left=()))
    if predictions.classes:
        often = ", ".join(f"{name} ({times})" for name, times in Counter(predictions.predicted).most_common(SHOWN))
        out.print(f"Predicted: {visible(often)}")
    if predictions.accuracy is not None:
        what = "Exact match" if predictions.multi_label else "Accuracy"
        out.print(f"{what}: {percent(predictions.accuracy)} % of {count:,} samples")
        if not predictions.multi_label and (strange := sorted(set(predictions.labels) - set(predictions.classes))):
            labels = visible(", ".join(strange[:SHOWN]))
            out.print(
                f"Note: the model does not know the labels {labels}: these samples count as wrong.", style="yellow"
            )


@experiment_options("New data")
def adapt(
    run: Run,
    to: To,
    settings: dict[str, Any],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH", help=r"data of new clients \[those that the run held out]", rich_help_panel="New data"
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help=r"their number \[those that the data names, else 1]", rich_help_panel="New data"
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, metavar="K", help="epochs of fine-tuning")] = 5,
    onnx: Onnx = False,
    overwrite: Overwrite = False,
    engine: Annotated[str, typer.Option(help="where clients run", metavar="auto|in-process|processes|ray")] = "auto",
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=r"worker processes \[as many as cores]")
    ] = None,
    trust: Trust = False,
) -> None:
    """Give clients that never took part a model, and fine-tune it on their own data.

    The method gives each new client its model by its own rule (a global model, a shared body, the best cluster, …).
    It is measured on the client's test samples before and after each of K epochs, beside a network that begins from
    scratch and is trained on the same data for as long. DIR then has the models after K epochs as `export` writes
    them, and the curves (adapt.json, adapt.csv).

    The new clients are those that the run held out (run --new-clients), or those of --data: the clients that a file
    names, or else one client with all samples. They need the run's input shape, and no class that the run does not
    have. Each is split as the run's clients are, unless --test and --validation say otherwise.

    [bold]Examples[/]
      fedtailor adapt runs/pgfed --epochs 20 --to new-clients
      fedtailor adapt runs/pgfed --data new-hospital.csv --to new-hospital
    """
    from fedtailor.engines.runs import load
    from fedtailor.model_files.adaptation import adapt as serve

    if clients is not None:
        settings["clients"] = clients
    result = load(run, settings.get("data_dir"), trust=trust)
    if data is None:
        settings.pop("data_dir", None)  # it is the run's own data that were moved
    with progress_bars() as bars:
        bar = bars.add_task("adapting", total=None, status="", unit="client")
        try:
            outcome = serve(
                result,
                data=data,
                epochs=epochs,
                to=to,
                onnx=onnx,
                overwrite=overwrite,
                engine=engine,
                workers=workers,
                on_start=lambda clients: bars.update(bar, total=clients),
                on_client=lambda client: bars.advance(bar),
                **settings,
            )
        except KeyboardInterrupt:
            bars.stop()
            interrupted("Interrupted: nothing was written.")
    _note_unfinished(run, result.simulation.finished, result.experiment.rounds)
    _show_curves(outcome)
    say(f"In {to}: {_counted(len(outcome.models), 'model')}, adapt.json, adapt.csv")


def _show_curves(outcome: "Adaptation") -> None:
    """Print both curves, a line an epoch: of the metric that decides, or of the loss where it is not defined."""
    first, metric = outcome.adapted[0], outcome.metric
    defined, spread = metric.of(first) is not None, first.std is not None

    def shown(metrics: "Averages") -> str:
        if defined:
            return metric.text(metric.of(metrics)) + (f" ± {metric.text(metrics.std)}" if spread else "")
        return decimals(metrics.loss)

    both = enumerate(zip(outcome.adapted, outcome.local, strict=True))
    rows = [(str(epoch), shown(mine), shown(local)) for epoch, (mine, local) in both]
    title = _counted(len(outcome.per_client), "new client")
    out.print(table_of(title, ("epochs", outcome.method, "local from scratch"), rows, left=()))
    over = ", mean ± std over clients," if spread else ""
    what = f"Test {metric.title}{' in %' if metric.percent else ''}{over}" if defined else "Mean test loss"
    out.print(f"{what} after so many epochs of fine-tuning on each one's own data.")
    out.print(_adapted_clients(outcome))


def _adapted_clients(outcome: "Adaptation") -> Any:
    """A table of the new clients, by name: before, after the last epoch, and from scratch."""
    clients, last = list(outcome.per_client.values()), len(outcome.adapted) - 1
    note = "" if len(clients) <= CLIENTS else f"The first {CLIENTS} of {len(clients)} clients: all are in adapt.json."
    columns = ("client", "train", "test", "0 epochs", f"{last} epochs", "local from scratch")
    rows = []
    for client in clients[:CLIENTS]:
        metrics = (client.adapted[0], client.adapted[-1], client.local[-1])
        values = [decimals(m.loss) if m.accuracy is None else percent(m.accuracy) for m in metrics]
        rows.append((visible(client.name), f"{client.n_train:,}", f"{client.n_test:,}", *values))
    return table_of("Clients", columns, rows, left=(), caption=note)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
