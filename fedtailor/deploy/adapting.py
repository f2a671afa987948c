"""What clients that never took part get of a run: the method's model for them, and what fine-tuning makes of it."""

import csv
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtailor import __version__
from fedtailor.api import RunResult, isolated, load
from fedtailor.data import Dataset, FederatedData, from_list
from fedtailor.data import load as load_data
from fedtailor.deploy.exporting import Figures, Source, file_name
from fedtailor.deploy.model_file import check_free, files_of, write_model
from fedtailor.deploy.onnx import OnnxNetwork
from fedtailor.errors import FedtailorError, unknown
from fedtailor.experiment import NEW_DATA_SETTINGS, Experiment, make_experiment
from fedtailor.server.evaluation import summary
from fedtailor.server.record import Record, plain
from fedtailor.simulation import deal_data
from fedtailor.store import write_atomically
from fedtailor.studies.runner import experiment_hash
from fedtailor.transport import Result, Task, make_engine

Data = str | Path | Dataset | Sequence[Any]
KEPT = ("data_dir", "test", "validation")  # what new data have from the run, unless it is said


@dataclass(frozen=True)
class Adaptation:
    """How new clients fare, before (entry 0) and after each epoch of fine-tuning on their own data: with the model
    that the method gives them, and from scratch with the network's first vector (Local)."""

    method: str
    adapted: list[Record]  # the means over the clients
    local: list[Record]
    per_client: dict[int, Record]  # each one's name, training samples, and test metrics both ways
    models: dict[int, dict[str, Tensor]]  # the adapted ones: state dicts for plain PyTorch

    def csv(self) -> str:
        """The two curves: a line an epoch."""
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        figures = ("accuracy", "accuracy_std", "accuracy_worst_decile", "loss")
        writer.writerow(["epoch", *(f"{whose}_{figure}" for whose in ("adapted", "local") for figure in figures)])
        for epoch, both in enumerate(zip(self.adapted, self.local, strict=True)):
            writer.writerow([epoch, *(record[figure] for record in both for figure in figures)])
        return text.getvalue()


def adapt(
    run: RunResult | str | Path,
    *,
    data: Data | None = None,
    epochs: int = 5,
    to: str | Path | None = None,
    onnx: bool = False,
    overwrite: bool = False,
    engine: str = "auto",
    workers: int | None = None,
    on_start: Callable[[int], None] | None = None,
    on_client: Callable[[int], None] | None = None,
    **settings: Any,
) -> Adaptation:
    """Give clients that never took part their models, fine-tune these on the clients' own data and measure them.

    The new clients are those that the run held out or, with `data`, those of a data set of the same input shape and
    classes: its natural ones, or one with all samples, or as `settings` say (`clients`, `partition`, `test`, …). With
    `to`, the models after the last epoch are exported there, with the curves.
    """
    if epochs < 1:
        raise FedtailorError(f"epochs is {epochs}: fine-tune for at least 1.")
    with isolated():
        source = Source.of(run if isinstance(run, RunResult) else load(run))
        where = make_experiment({**source.result.experiment.model_dump(), "engine": engine, "workers": workers})
        dealt, clients = _new_clients(source, data, settings)
        place = None if to is None else _Place(Path(to), {c: dealt.names[c] for c in clients}, onnx, overwrite)
        graph = source.onnx() if place and onnx else None
        bench = replace(source.run.bench, data=dealt, fine_tune=epochs, on_train=False)
        message = source.run.method.broadcast(source.run.server)
        tasks = [Task("adapt", source.run.finished, (client,), message) for client in clients]
        results: dict[int, Result] = {}
        if on_start:
            on_start(len(clients))
        with closing(make_engine(where.engine, bench, where.workers)) as workplace:
            for result in workplace.run(tasks):
                client = result.clients[0]
                if result.error:
                    raise FedtailorError(f"New client {dealt.names[client]} cannot be served: {result.error}.")
                results[client] = result
                if on_client:
                    on_client(client)
        outcome = _outcome(source, dealt, {client: results[client] for client in clients}, epochs)
        if place:
            place.write(source, dealt, outcome, graph)
        return outcome


def _new_clients(source: Source, data: Data | None, settings: dict[str, Any]) -> tuple[FederatedData, list[int]]:
    """The new clients' data and their numbers in it."""
    run = source.run
    for name in settings:
        if name not in NEW_DATA_SETTINGS:
            raise unknown("setting of new data", name, NEW_DATA_SETTINGS)
    if data is None:
        if settings:
            raise FedtailorError(f"{next(iter(settings))!r} says something of new data: name these with --data too.")
        if not run.data.new:
            raise FedtailorError("The run held out no new clients: give it data of new ones with --data.")
        return run.data, sorted(run.data.new)
    before = source.result.experiment.model_dump()
    mine = {name: value for name, value in before.items() if name not in NEW_DATA_SETTINGS or name in KEPT}
    named = {"data": str(data)} if isinstance(data, (str, Path)) else {}
    dealing = make_experiment({**mine, "new_clients": 0, **named, **settings})
    dataset = _matching(_dataset(data, dealing), run.data, own=dealing.labels == "own")
    if dataset.client is None and dealing.clients is None and dealing.partition is None:
        dealing = dealing.model_copy(update={"clients": 1, "partition": "iid", "min_samples": 1})
    dealt = deal_data(dealing, dataset).to(run.data.x.device)
    if len(dealt.classes) > len(run.data.classes):
        raise FedtailorError(
            f"A client of {dealt.name!r} has {len(dealt.classes)} classes, but none of the run's had more than "
            f"{len(run.data.classes)}."
        )
    return replace(dealt, classes=run.data.classes), list(range(dealt.clients))


def _dataset(data: Data, dealing: Experiment) -> Dataset:
    if isinstance(data, (str, Path)):
        return load_data(
            dealing.data,
            dealing.data_dir,
            label_column=dealing.label_column,
            client_column=dealing.client_column,
            image_size=dealing.image_size,
        )
    return data if isinstance(data, Dataset) else from_list(data)


def _matching(dataset: Dataset, known: FederatedData, own: bool) -> Dataset:
    """The data set with the run's class numbers; refuses another input shape, and classes that the run does not have.
    Where labels are each client's own, their names do not matter."""
    shape, wanted = ("×".join(map(str, x.shape[1:])) for x in (dataset.x, known.x))
    if shape != wanted:
        raise FedtailorError(f"The samples of {dataset.name!r} have the shape {shape}, but the run's have {wanted}.")
    if bool(dataset.classes) != bool(known.classes) or dataset.y.shape[1:] != known.y.shape[1:]:
        raise FedtailorError(f"The targets of {dataset.name!r} are not of the run's kind: classes, or so many numbers.")
    if own or not known.classes:
        return dataset
    strange = [name for name in dataset.classes if name not in known.classes]
    if strange:
        raise FedtailorError(
            f"The data set {dataset.name!r} has the class {strange[0]!r}, which the run does not: it knows "
            f"{', '.join(known.classes[:12])}{', …' if len(known.classes) > 12 else ''}."
        )
    number = torch.tensor([known.classes.index(name) for name in dataset.classes])
    return replace(dataset, y=number[dataset.y], classes=known.classes)


def _outcome(source: Source, dealt: FederatedData, results: dict[int, Result], epochs: int) -> Adaptation:
    """What was measured, by epoch, on average and of each client."""
    train, test = dealt.samples.tolist(), (dealt.bounds[:, 3] - dealt.bounds[:, 2]).tolist()
    average, both = source.run.experiment.evaluation.average, 2 * (epochs + 1)
    means = [summary({c: results[c].measured[k] for c in results}, average, test, train) for k in range(both)]
    per_client = {}
    for client, result in results.items():
        metrics = [measured["test"] for measured in result.measured]
        per_client[client] = {
            "name": dealt.names[client],
            "train_samples": train[client],
            "test_samples": test[client],
            "adapted": metrics[: epochs + 1],
            "local": metrics[epochs + 1 :],
        }
    models = {client: source.run.bench.network.state_dict(result.reply["theta"]) for client, result in results.items()}
    method = source.run.experiment.method
    return Adaptation(method, means[: epochs + 1], means[epochs + 1 :], per_client, models)


class _Place:
    """Where the models and curves go."""

    def __init__(self, to: Path, names: dict[int, str], onnx: bool, overwrite: bool) -> None:
        self.to = to
        self.stems = {client: to / file_name("adapted", client, name) for client, name in names.items()}
        models = [file for stem in self.stems.values() for file in files_of(stem, onnx)]
        check_free([to / "adapt.json", to / "adapt.csv", *models], overwrite)

    def write(self, source: Source, dealt: FederatedData, outcome: Adaptation, graph: OnnxNetwork | None) -> None:
        epochs = len(outcome.adapted) - 1
        for client, stem in self.stems.items():
            fared = outcome.per_client[client]
            words = f"on the client's own test samples, after {epochs} epochs of fine-tuning"
            figures = Figures(fared["adapted"][-1], fared["test_samples"], words)
            about = source.describe(client, "adapted", figures, stem.name, dealt, fine_tuned=epochs)
            write_model(stem, outcome.models[client], about, graph)
        written = {
            "fedtailor": __version__,
            "method": outcome.method,
            "experiment": experiment_hash(source.result.experiment, source.run.method),
            "round": source.run.finished,
            "data": dealt.name,
            "epochs": epochs,
            "adapted": outcome.adapted,
            "local": outcome.local,
            "clients": [{"client": client, **fared} for client, fared in outcome.per_client.items()],
        }
        write_atomically(self.to / "adapt.json", json.dumps(plain(written), indent=2, ensure_ascii=False) + "\n")
        write_atomically(self.to / "adapt.csv", outcome.csv())
