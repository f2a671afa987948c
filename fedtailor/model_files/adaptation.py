"""Adaptation to clients that never took part in a run: the method's model for them, fine-tuned on their own data."""

import csv
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

from torch import Tensor

from fedtailor._common.errors import FedtailorError, unknown, warn
from fedtailor._common.files import write_atomically
from fedtailor._common.version import __version__
from fedtailor.client.sites import Sites
from fedtailor.data import FederatedData
from fedtailor.engines.fit import fit_inputs, try_out
from fedtailor.engines.joins import Data, new_clients
from fedtailor.engines.result import RunResult
from fedtailor.engines.runs import load
from fedtailor.engines.transports import make_transport
from fedtailor.experiment import NEW_DATA_SETTINGS, Experiment, make_experiment
from fedtailor.messages import Adapt, Metrics, Reply
from fedtailor.model_files.description import Columns, Quality, csv_columns, file_name
from fedtailor.model_files.exports import Source
from fedtailor.model_files.format import check_free, files_of, write_model
from fedtailor.model_files.handover import last_broadcast
from fedtailor.model_files.onnx import OnnxNetwork
from fedtailor.server.evaluation import averages
from fedtailor.server.records import Averages, Plain, plain_metrics
from fedtailor.training.isolation import isolated
from fedtailor.training.metrics import ACCURACY, Metric


@dataclass(frozen=True)
class AdaptedClient:
    """A new client's test metrics, before (entry 0) and after each epoch of fine-tuning on its own data."""

    name: str
    n_train: int  # training samples
    n_test: int  # test samples
    adapted: list[Metrics]  # from the method's model
    local: list[Metrics]  # from scratch

    def plain(self) -> Plain:
        """All fields as JSON has them."""
        return {
            "name": self.name,
            "train_samples": self.n_train,
            "test_samples": self.n_test,
            "adapted": [plain_metrics(metrics) for metrics in self.adapted],
            "local": [plain_metrics(metrics) for metrics in self.local],
        }


@dataclass(frozen=True)
class Adaptation:
    """The metrics of new clients, before (entry 0) and after each epoch of fine-tuning on their own data.

    `adapted` begins with the model that the method gives them, `local` with the network's initial vector: what they
    would have alone.
    """

    method: str
    adapted: list[Averages]  # over the clients
    local: list[Averages]
    per_client: dict[int, AdaptedClient]
    models: dict[int, dict[str, Tensor]]  # the adapted ones: state dicts for plain PyTorch
    metric: Metric = ACCURACY  # the one that decides

    def csv(self) -> str:
        """Write both curves as CSV, a line an epoch."""
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        by_accuracy = ("accuracy", "accuracy_std", "accuracy_worst_decile", "loss")
        metrics = by_accuracy if self.metric == ACCURACY else (self.metric.field, "std", "worst_decile", "loss")
        writer.writerow(["epoch", *(f"{whose}_{metric}" for whose in ("adapted", "local") for metric in metrics)])
        for epoch, both in enumerate(zip(self.adapted, self.local, strict=True)):
            writer.writerow([epoch, *(of_epoch.flat().get(metric) for of_epoch in both for metric in metrics)])
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
    trust: bool = False,
    on_start: Callable[[int], None] | None = None,
    on_client: Callable[[int], None] | None = None,
    **settings: Any,
) -> Adaptation:
    """Give clients that never took part a model, fine-tune it on each one's own data, and measure it.

    The new clients are those that the run held out or, with `data`, those of a data set of the same input shape and
    classes: its natural ones, or one with all samples, or as `settings` say (`clients`, `partition`, `test`, …). With
    `to`, the models after the last epoch are exported there, with the curves. `trust` allows a run directory to name
    code of its own (see `load`).
    """
    if epochs < 1:
        raise FedtailorError(f"epochs is {epochs}: fine-tune for at least 1.")
    with isolated():
        source = Source.of(run if isinstance(run, RunResult) else load(run, trust=trust))
        source.terms.method.check_one_model("that cannot be fine-tuned; measure new clients by --evaluate-clients new")
        where = make_experiment({**source.result.experiment.model_dump(), "engine": engine, "workers": workers})
        federated, clients, columns = _new_clients(source, data, settings)
        place = None if to is None else _Place(Path(to), {c: federated.names[c] for c in clients}, onnx, overwrite)
        graph = source.origin.onnx() if place and onnx else None
        if on_start:
            on_start(len(clients))
        replies = _ask(source, where, federated, clients, epochs, on_client or (lambda client: None))
        outcome = _outcome(source, federated, replies, epochs)
        if place:
            place.write(source, federated, columns, outcome, graph)
        return outcome


def _ask(
    source: Source,
    where: Experiment,
    federated: FederatedData,
    clients: list[int],
    epochs: int,
    on_client: Callable[[int], None],
) -> dict[int, Reply]:
    """Have the new clients adapt their models; `where` says on which engine."""
    terms, simulation = replace(source.terms, fine_tune=epochs, on_train=False), source.simulation
    message = last_broadcast(simulation)
    sites = Sites.at(federated, terms, None)
    replies: dict[int, Reply] = {}
    kind, on_cpu = "in-process" if terms.debug else where.engine, terms.initial.device.type == "cpu"
    address = where.address if kind == "ray" else None
    with closing(make_transport(kind, sites, where.workers, on_cpu, None, address)) as transport:
        for reply in transport.ask([Adapt(simulation.finished, client, message) for client in clients]):
            client = reply.clients[0]
            if reply.error:
                raise FedtailorError(
                    f"New client {federated.names[client]} cannot be served: {reply.error}."
                ) from reply.cause
            replies[client] = reply
            on_client(client)
    return {client: replies[client] for client in clients}


def _new_clients(
    source: Source, data: Data | None, settings: dict[str, Any]
) -> tuple[FederatedData, list[int], Columns]:
    """Find the new clients' data, the clients' numbers in it, and the columns of its file that are no features."""
    known = source.data
    for name in settings:
        if name not in NEW_DATA_SETTINGS:
            raise unknown("setting of new data", name, NEW_DATA_SETTINGS)
    if data is None:
        if settings:
            raise FedtailorError(f"{next(iter(settings))!r} says something of new data: name these with --data too.")
        if not known.new:
            raise FedtailorError("The run held out no new clients: give it data of new ones with --data.")
        return known, sorted(known.new), csv_columns(source.result.experiment)
    federated, experiment = new_clients(source.result.experiment, known, data, settings)
    for note in federated.notes:
        warn(note)
    network = source.terms.network
    federated = fit_inputs(federated, network.module, network.vector.dtype)
    try_out(network, federated, source.terms.loss)
    return federated, list(range(federated.n_clients)), csv_columns(experiment)


def _outcome(source: Source, federated: FederatedData, replies: dict[int, Reply], epochs: int) -> Adaptation:
    """Collect the metrics by epoch, on average and of each client."""
    average, metric, both = source.result.experiment.evaluation.average, source.result.metric, 2 * (epochs + 1)
    means = [averages({c: reply.measured[k] for c, reply in replies.items()}, average, metric) for k in range(both)]
    per_client = {}
    for client, reply in replies.items():
        metrics, own = [measured["test"] for measured in reply.measured], federated.client(client)
        per_client[client] = AdaptedClient(
            own.name, len(own.train[1]), len(own.test[1]), metrics[: epochs + 1], metrics[epochs + 1 :]
        )
    models = {client: source.terms.network.state_dict(reply.upload["theta"]) for client, reply in replies.items()}
    method = source.result.experiment.method
    return Adaptation(method, means[: epochs + 1], means[epochs + 1 :], per_client, models, metric)


class _Place:
    """The directory for the models and curves."""

    def __init__(self, to: Path, names: dict[int, str], onnx: bool, overwrite: bool) -> None:
        self.to = to
        self.stems = {client: to / file_name("adapted", client, name) for client, name in names.items()}
        models = [file for stem in self.stems.values() for file in files_of(stem, onnx)]
        check_free([to / "adapt.json", to / "adapt.csv", *models], overwrite)

    def write(
        self,
        source: Source,
        federated: FederatedData,
        columns: Columns,
        outcome: Adaptation,
        graph: OnnxNetwork | None,
    ) -> None:
        """Write the models after the last epoch, and the curves."""
        epochs = len(outcome.adapted) - 1
        for client, stem in self.stems.items():
            own = outcome.per_client[client]
            words = f"on the client's own test samples, after {epochs} epochs of fine-tuning"
            quality = Quality(own.adapted[-1], own.n_test, words)
            about = source.origin.describe(client, "adapted", quality, stem.name, federated, columns, fine_tuned=epochs)
            write_model(stem, outcome.models[client], about, graph)
        written = {
            "fedtailor": __version__,
            "method": outcome.method,
            "experiment": source.origin.experiment_hash,
            "round": source.simulation.finished,
            "data": federated.name,
            "epochs": epochs,
            "metric": outcome.metric.name,
            "adapted": [of_epoch.plain() for of_epoch in outcome.adapted],
            "local": [of_epoch.plain() for of_epoch in outcome.local],
            "clients": [{"client": client, **own.plain()} for client, own in outcome.per_client.items()],
        }
        write_atomically(self.to / "adapt.json", json.dumps(written, indent=2, ensure_ascii=False) + "\n")
        write_atomically(self.to / "adapt.csv", outcome.csv())
