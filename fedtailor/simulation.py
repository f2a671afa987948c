"""A federation on one machine: from an experiment to a server, its sites and the transport between them.

Every check that needs no round is made here, before the first file is written.
"""

import copy
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtailor.data import Dataset, FederatedData, federate, from_list, load
from fedtailor.errors import FedtailorError, brief, unknown
from fedtailor.experiment import Experiment
from fedtailor.imports import import_object
from fedtailor.local.isolation import changes
from fedtailor.local.metrics import OwnMetric, targets_of
from fedtailor.local.network import Loss, Network
from fedtailor.local.optimizer import OptimizerSettings
from fedtailor.local.streams import torch_seed
from fedtailor.messages import Declaration, EvaluateShared, State
from fedtailor.method import Method, Server
from fedtailor.methods import find_method
from fedtailor.metric import Metric, find_metric, own_metric
from fedtailor.models import ModelLike, build_model
from fedtailor.participation import Participation
from fedtailor.server.checkpoint import Checkpoint
from fedtailor.server.evaluation import Evaluator
from fedtailor.server.loop import Loop
from fedtailor.server.observations import Observations
from fedtailor.server.record import RunDirectory
from fedtailor.server.records import RoundRecord
from fedtailor.server.tensorboard import check_installed
from fedtailor.site.site import Terms
from fedtailor.site.sites import Sites
from fedtailor.store import Store
from fedtailor.transport import Transport, make_transport

LOSSES: dict[str, Loss] = {
    "cross-entropy": functional.cross_entropy,
    "mse": functional.mse_loss,
    "bce": functional.binary_cross_entropy_with_logits,
}


@dataclass
class Objects:
    """Python objects in place of names in the experiment."""

    method: Method | None = None
    data: Dataset | FederatedData | Sequence[Any] | None = None
    model: ModelLike | None = None
    loss: Loss | None = None
    metric: OwnMetric | None = None


class Initialiser:
    """Makes initial vectors of a network as other seeds would have made them.

    It has a copy of the network: in that of the sites are traces of the clients' work.
    """

    def __init__(self, module: nn.Module, head: int | str, like: Tensor, seed: int) -> None:
        self._module, self._head, self._seed = copy.deepcopy(module), head, seed
        self._device, self._dtype = like.device, like.dtype

    def __call__(self, number: int) -> Tensor:
        network = Network(copy.deepcopy(self._module), self._head, self._device, self._dtype)
        return network.initialised(torch_seed(self._seed, "another", number))


@dataclass
class Prepared:
    """An experiment with its data and its network in place, before its first round."""

    experiment: Experiment
    data: FederatedData
    terms: Terms
    initialise: Initialiser

    @property
    def method(self) -> Method:
        return self.terms.method

    @property
    def network(self) -> Network:
        return self.terms.network

    def server(self, declared: Sequence[Declaration], store: Store) -> Server:
        """The server of the sites that have joined. A site with another network or experiment is refused."""
        terms = self.terms
        for declaration in declared:
            if declaration.fingerprint != terms.fingerprint:
                raise FedtailorError(f"The site {declaration.name} has another network or experiment: it cannot join.")
        return Server(
            terms.initial.clone(),
            copy.deepcopy(terms.network.layout),
            torch.tensor([declaration.n_samples for declaration in declared], device=terms.initial.device),
            terms.participation * len(declared),
            store=store,
            initialise=self.initialise,
        )


def prepare(experiment: Experiment, objects: Objects) -> Prepared:
    """Load, partition and build all that a run needs, so that nothing wrong is found out later."""
    method = objects.method or find_method(experiment.method, experiment.parameters)
    if experiment.tensorboard:
        check_installed()
    device = find_device(experiment.device)
    given = objects.data
    data = given.to(device) if isinstance(given, FederatedData) else partition_data(experiment, given).to(device)
    loss = objects.loss or find_loss(experiment.loss)
    if objects.loss is None:
        _check_loss(experiment.loss, data)
    shape = tuple(data.x.shape[1:])
    module = build_model(objects.model or experiment.model, shape, data.n_outputs, experiment.seed)
    pristine = copy.deepcopy(module)
    network = Network(module, experiment.head, device, getattr(torch, experiment.dtype))
    if network.has_batch_norm and experiment.batch == 1:
        raise FedtailorError("BatchNorm needs other samples in a batch: set --batch to 2 or more.")
    scores = _try_out(network, data, loss)
    metric, own_metric = _find_metric(experiment.evaluation.metric, objects.metric, data, scores)
    initial = network.vector.clone()
    training = data.n_clients - len(data.new)
    terms = Terms(
        method,
        network,
        initial,
        loss,
        OptimizerSettings(
            lr=experiment.lr,
            momentum=experiment.momentum,
            weight_decay=experiment.weight_decay,
            epochs=experiment.epochs,
            steps=experiment.steps,
            batch=None if experiment.batch == "full" else experiment.batch,
            drop_last=experiment.drop_last,
            join_last=network.has_batch_norm,
        ),
        experiment.keep_momentum,
        experiment.evaluation.fine_tune,
        experiment.seed,
        Participation.parse(experiment.participation).mean(training) / training,
        experiment.evaluation.train,
        experiment.debug,
        metric,
        own_metric,
        data.targets == "labels",
    )
    prepared = Prepared(experiment, data, terms, Initialiser(pristine, experiment.head, initial, experiment.seed))
    _check_protocol(prepared)
    _try_out_metric(prepared)
    return prepared


def _check_loss(name: str, data: FederatedData) -> None:
    """Refuse cross-entropy for targets that are not one class a sample."""
    if name == "cross-entropy" and data.targets == "numbers":
        raise FedtailorError(
            "The loss cross-entropy is for classes, but these targets are floating-point numbers: take --loss mse, or "
            "give the labels as whole numbers."
        )
    if name == "cross-entropy" and data.targets == "labels":
        raise FedtailorError(
            "The loss cross-entropy is for one class a sample, but these samples have several labels: take --loss bce."
        )


def _find_metric(
    name: str, given: OwnMetric | None, data: FederatedData, scores: Tensor
) -> tuple[Metric, OwnMetric | None]:
    """The metric that decides, and its function if it is the user's own. `scores` are outputs for the first samples."""
    if given is None and ":" not in name:
        return find_metric(name, targets_of(scores, data.y[: len(scores)], data.targets == "labels")), None
    own = given or import_object(name, "metric")
    if not callable(own):
        raise FedtailorError(f"The metric {name} is not a function of (outputs, targets).")
    return own_metric(name, own), own


def _try_out_metric(prepared: Prepared) -> None:
    """Refuse a metric of the user's own that fails on the first client's test samples, before any work."""
    data, terms = prepared.data, prepared.terms
    tested = [client for client in range(data.n_clients) if len(data.test(client)[1])]
    if terms.own_metric is not None and tested:
        reply = Sites.at(data, terms, None).handle(EvaluateShared(0, tested[0], {"theta": terms.initial}))
        if reply.error:
            raise FedtailorError(
                f"The metric {terms.metric} fails on client {data.names[tested[0]]}: {reply.error}."
            ) from reply.cause


def _check_protocol(prepared: Prepared) -> None:
    """Refuse an evaluation of something that there is not."""
    protocol, method, data = prepared.experiment.evaluation, prepared.method, prepared.data
    if not protocol.every:
        if protocol.patience is not None:
            raise FedtailorError("Nothing is evaluated to stop early by: leave --patience or --evaluate-every 0 out.")
        return
    if protocol.clients == "new" and not data.new:
        raise FedtailorError("There are no new clients to evaluate: hold some out with --new-clients.")
    evaluated = [data.places[c] for c in range(data.n_clients) if (c in data.new) == (protocol.clients == "new")]
    if not any(end > validated for _, _, validated, end in evaluated):
        raise FedtailorError(
            "No client has test samples, so nothing could be measured: give --test 0.2, or --evaluate-every 0 to train "
            "without measuring."
        )
    validated = any(v > trained for _, trained, v, _ in evaluated)
    if protocol.patience is not None and not validated:
        raise FedtailorError("No client has validation samples to stop early by (--patience): give --validation 0.1.")
    if protocol.choose == "best-validation" and not validated:
        raise FedtailorError("No client has validation samples to choose the best round by: give --validation 0.1.")
    if protocol.clients == "new" and protocol.model == "local":
        raise FedtailorError("New clients do no local work in a round: evaluate their personal or the global model.")
    if protocol.model == "global":
        server = prepared.server(Sites.at(data, prepared.terms, None).declare(), Store(None, "server"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it has to say is said when the run begins
            method.start(server)
        if method.global_model(server) is None:
            raise FedtailorError(
                f"The method {prepared.experiment.method} has no global model: evaluate the personal ones."
            )


class Simulation:
    """A server, all its sites and the transport between them, on one machine.

    Only this object, which no method ever sees, holds all of them.
    """

    def __init__(self, prepared: Prepared, directory: RunDirectory | None = None) -> None:
        experiment, data, terms = prepared.experiment, prepared.data, prepared.terms
        self.prepared, self.experiment, self.data, self.terms = prepared, experiment, data, terms
        self.directory = directory
        checkpoint = directory.path / "checkpoint" if directory else None
        on_disk, device = experiment.states == "disk", terms.initial.device
        self.sites = Sites.at(data, terms, checkpoint / "sites" if checkpoint else None, on_disk)
        store = Store(checkpoint / "server" if checkpoint else None, "server", on_disk, device)
        engine, deadline = experiment.engine, experiment.deadline
        if experiment.debug:  # whoever looks at a client with a debugger takes his time
            engine, deadline = "in-process", None
        self.transport: Transport = make_transport(
            engine, self.sites, experiment.workers, device.type == "cpu", deadline
        )
        new = experiment.evaluation.clients == "new"
        method = terms.method.model_copy(deep=True)  # what it may keep of its own does not cross either
        self.loop = Loop(
            experiment,
            method,
            prepared.server(self.transport.declare(), store),
            list(data.names),
            Evaluator(experiment.evaluation, method, [c for c in range(data.n_clients) if (c in data.new) == new]),
            Observations(directory.path / "observed" if directory else None, int(experiment.observe_limit * 1e6)),
            Checkpoint(checkpoint, store, device, data.n_clients - len(data.new)),
            directory,
            replace(terms.metric),
        )

    def start(self) -> None:
        """Prepare round 1."""
        self.loop.start(self.transport)

    def restore(self) -> None:
        """Go back to the last checkpoint."""
        self.loop.restore(self.transport)

    def run(self) -> Generator[RoundRecord, None, None]:
        """Do the rounds that are left, and yield the record of each."""
        return self.loop.run(self.transport)

    def round(self, number: int) -> RoundRecord:
        """Do one round."""
        return self.loop.round(number, self.transport)

    def close(self) -> None:
        """End the workers, and leave the run directory to others."""
        self.transport.close()
        if self.directory is not None:
            self.directory.unlock()

    @property
    def finished(self) -> int:
        """The last round that is done."""
        return self.loop.finished

    @property
    def server(self) -> Server:
        return self.loop.server

    def personal_model(self, client: int) -> Tensor:
        """The vector that a client predicts with now."""
        theta = self.sites.personal_model(client, self.finished, self.loop.method.broadcast(self.server))
        if theta.shape != self.terms.initial.shape:
            raise FedtailorError(
                f"The model of client {self.data.names[client]} is no vector of the run's network: its state is of "
                "another run, or damaged."
            )
        return theta

    def state_of(self, client: int) -> State:
        """A client's private state: for whoever runs the simulation, and for nobody in it."""
        return self.sites.store.get(client)


def partition_data(experiment: Experiment, given: Dataset | Sequence[Any] | None = None) -> FederatedData:
    """The experiment's data, loaded and partitioned among its clients (on the CPU: the same for every device)."""
    with torch.device("cpu"):
        return _partition_data(experiment, given)


def _partition_data(experiment: Experiment, given: Dataset | Sequence[Any] | None) -> FederatedData:
    if given is None:
        dataset = load(
            experiment.data,
            experiment.data_dir,
            label_column=experiment.label_column,
            client_column=experiment.client_column,
            image_size=experiment.image_size,
        )
    else:
        dataset = given if isinstance(given, Dataset) else from_list(given)
    return federate(
        dataset,
        partition=experiment.partition or ("dirichlet:0.3" if dataset.client is None else "natural"),
        clients=experiment.clients,
        seed=experiment.seed,
        test=experiment.test,
        validation=experiment.validation,
        split=experiment.split,
        min_samples=experiment.min_samples,
        max_train=experiment.max_train,
        new_clients=experiment.new_clients,
        pixels=experiment.pixels,
        labels=experiment.labels,
        dtype=getattr(torch, experiment.dtype),
    )


def find_device(name: str) -> torch.device:
    """The device of this name; `auto` is the best there is."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if there[kind]))
    kind = name.partition(":")[0]
    if kind not in there:
        raise unknown("device", name, [*there, "auto"])
    if not there[kind]:
        raise FedtailorError(f"The device {name} is not available here: use cpu, or auto for the best there is.")
    try:
        return torch.device(name)
    except RuntimeError:
        raise FedtailorError(
            f"The device {name!r} is not understood: write {kind}, or {kind}:0 for the first."
        ) from None


def has_device(name: str) -> bool:
    try:
        find_device(name)
    except FedtailorError:
        return False
    return True


def find_loss(name: str) -> Loss:
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise unknown("loss", name, LOSSES)
    found = import_object(name, "loss")
    if isinstance(found, type) and issubclass(found, nn.Module):
        found = found()
    if not callable(found):
        raise FedtailorError(f"The loss {name} is not a function of (outputs, targets).")
    return found  # type: ignore[no-any-return]


@torch.no_grad()
def _try_out(network: Network, data: FederatedData, loss: Loss) -> Tensor:
    """One pass over two samples: do the network, the data and the loss fit together? Returns the outputs."""
    network.module.eval()
    before = changes(data.x, data.y)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message="Using a target size")  # it would be broadcast
            scores: Tensor = network(data.x[:2])
            value: Tensor = loss(scores, data.y[:2])
    except Exception as error:  # whatever a foreign network or loss raises
        shape = "×".join(map(str, data.x.shape[1:]))
        raise FedtailorError(
            f"The model, the data ({shape}) and the loss do not fit together ({brief(error)})."
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise FedtailorError("The loss must return one number: the mean over the samples.")
    if changes(data.x, data.y) != before:
        raise FedtailorError("The model or the loss writes into the samples that it gets: have it change a copy.")
    return scores


def create(path: Path, prepared: Prepared) -> Simulation:
    """Make a run directory and its simulation."""
    directory = RunDirectory.create(
        path, prepared.experiment, prepared.data, prepared.terms.fingerprint, prepared.terms.metric
    )
    with _unlocked_on_failure(directory):
        return Simulation(prepared, directory)


def reopen(path: Path, experiment: Experiment, objects: Objects) -> Simulation:
    """Open the simulation of a run directory, to go on with after `restore`."""
    directory = RunDirectory(path)
    directory.lock()
    with _unlocked_on_failure(directory):
        prepared = prepare(experiment, objects)
        directory.check(prepared.data, prepared.terms.fingerprint)
        return Simulation(prepared, directory)


@contextmanager
def _unlocked_on_failure(directory: RunDirectory) -> Iterator[None]:
    try:
        yield
    except BaseException:
        directory.unlock()
        raise


def look_into(path: Path, objects: Objects, data_dir: str | None = None) -> Simulation:
    """Open the simulation of a run directory as its last checkpoint left it, to look at: nothing is written. It is
    looked at on the CPU where the run's device is not available."""
    directory = RunDirectory(path)
    before = directory.experiment()
    here = {"data_dir": data_dir or before.data_dir, "device": before.device if has_device(before.device) else "cpu"}
    experiment = before.model_copy(update={**here, "engine": "in-process", "deadline": None, "tensorboard": False})
    prepared = prepare(experiment, objects)
    directory.check(prepared.data, prepared.terms.fingerprint)
    run = Simulation(prepared, directory)
    run.loop.look(run.transport)
    return run
