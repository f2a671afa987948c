"""From an experiment to a federation: loading, dealing, building, and every check that needs no round."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtailor.data import Dataset, FederatedData, federate, from_list, load
from fedtailor.errors import FedtailorError, brief, unknown
from fedtailor.experiment import Experiment
from fedtailor.imports import import_object
from fedtailor.local.descent import Descent
from fedtailor.local.network import Loss, Network
from fedtailor.local.streams import torch_seed
from fedtailor.method import Method, Server
from fedtailor.methods import find_method
from fedtailor.models import ModelLike, build_model
from fedtailor.participation import Participation
from fedtailor.server.evaluation import Evaluator
from fedtailor.server.loop import Federation
from fedtailor.server.observations import Observations
from fedtailor.server.record import RunDirectory
from fedtailor.server.tensorboard import check_installed
from fedtailor.store import States
from fedtailor.transport import Bench, make_engine

LOSSES: dict[str, Loss] = {"cross-entropy": functional.cross_entropy, "mse": functional.mse_loss}


@dataclass
class Objects:
    """What Python may pass as an object in place of a name in the experiment."""

    method: Method | None = None
    data: Dataset | FederatedData | Sequence[Any] | None = None
    model: ModelLike | None = None
    loss: Loss | None = None


def prepare(experiment: Experiment, objects: Objects) -> Bench:
    """All that a run needs before its first file is written: so that nothing wrong is found out later."""
    method = objects.method or find_method(experiment.method, experiment.parameters)
    if experiment.tensorboard:
        check_installed()
    device = find_device(experiment.device)
    given = objects.data
    data = given.to(device) if isinstance(given, FederatedData) else deal_data(experiment, given).to(device)
    loss = objects.loss or find_loss(experiment.loss)
    shape = tuple(data.x.shape[1:])
    module = build_model(objects.model or experiment.model, shape, data.outputs, experiment.seed)
    network = Network(module, experiment.head, device, getattr(torch, experiment.dtype))
    _try_out(network, data, loss)
    how = Descent(
        lr=experiment.lr,
        momentum=experiment.momentum,
        weight_decay=experiment.weight_decay,
        epochs=experiment.epochs,
        steps=experiment.steps,
        batch=None if experiment.batch == "full" else experiment.batch,
        drop_last=experiment.drop_last,
    )
    training = data.clients - len(data.new)
    bench = Bench(
        method,
        network,
        network.vector.clone(),
        data,
        loss,
        how,
        experiment.keep_momentum,
        experiment.evaluation.fine_tune,
        experiment.seed,
        Participation.parse(experiment.participation).mean(training) / training,
        experiment.evaluation.train,
    )
    _check_protocol(experiment, bench)
    return bench


def _check_protocol(experiment: Experiment, bench: Bench) -> None:
    """Is there what the evaluation asks for?"""
    protocol, method = experiment.evaluation, bench.method
    if protocol.clients == "new" and not bench.data.new:
        raise FedtailorError("There are no new clients to evaluate: hold some out with --new-clients.")
    if protocol.clients == "new" and protocol.model == "local":
        raise FedtailorError("New clients do no local work in a round: evaluate their personal or the global model.")
    if protocol.model == "global":
        server = _server(bench, States(None))
        method.start(server)
        if method.central(server) is None:
            raise FedtailorError(f"The method {experiment.method} has no global model: evaluate the personal ones.")


def _server(bench: Bench, states: States) -> Server:
    network, data = bench.network, bench.data
    per_round = bench.participation * (data.clients - len(data.new))
    samples = data.samples[: data.clients - len(data.new)].to(bench.initial.device)
    return Server(
        bench.initial,
        network.body,
        network.head,
        network.layers,
        samples,
        per_round,
        network.statistics,
        network.norms,
        store=states,
        another=lambda number: network.another(torch_seed(bench.seed, "another", number)),
    )


def federation(experiment: Experiment, bench: Bench, directory: RunDirectory | None) -> Federation:
    """The federation of this experiment before its first round, its engine running."""
    data = bench.data
    checkpoint = directory.path / "checkpoint" if directory else None
    states = States(checkpoint, experiment.states == "disk", bench.initial.device)
    server = _server(bench, states)
    engine = make_engine(experiment.engine, bench, experiment.workers)
    new = experiment.evaluation.clients == "new"
    evaluated = [client for client in range(data.clients) if (client in data.new) == new]
    bounds = data.bounds
    evaluator = Evaluator(
        experiment.evaluation,
        bench.method,
        engine,
        states,
        evaluated,
        test_samples=(bounds[:, 3] - bounds[:, 2]).tolist(),
        train_samples=data.samples.tolist(),
        held_out_samples=(bounds[:, 3] - bounds[:, 1]).tolist(),
    )
    observations = Observations(directory.path / "observed" if directory else None, int(experiment.observe_limit * 1e6))
    return Federation(experiment, bench.method, data, server, states, bench, engine, evaluator, observations, directory)


def deal_data(experiment: Experiment, given: Dataset | Sequence[Any] | None = None) -> FederatedData:
    """The experiment's data, loaded and dealt to its clients (on the CPU: the same for every device)."""
    with torch.device("cpu"):
        return _deal_data(experiment, given)


def _deal_data(experiment: Experiment, given: Dataset | Sequence[Any] | None) -> FederatedData:
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
def _try_out(network: Network, data: FederatedData, loss: Loss) -> None:
    """One pass over two samples: do the network, the data and the loss fit together?"""
    network.module.eval()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message="Using a target size")  # it would be broadcast
            value: Tensor = loss(network(data.x[:2]), data.y[:2])
    except Exception as error:  # whatever a foreign network or loss raises
        shape = "×".join(map(str, data.x.shape[1:]))
        raise FedtailorError(
            f"The model, the data ({shape}) and the loss do not fit together ({brief(error)})."
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise FedtailorError("The loss must return one number: the mean over the samples.")


def reopen(path: Path, experiment: Experiment, objects: Objects) -> Federation:
    """The federation of a run directory, to go on with after `restore`."""
    directory = RunDirectory(path)
    bench = prepare(experiment, objects)
    directory.check(bench.data, bench.fingerprint())
    directory.lock()
    return federation(experiment, bench, directory)


def look_into(path: Path, data_dir: str | None = None) -> Federation:
    """The federation of a run directory as its last checkpoint left it, to look at: nothing is written. It is looked
    at on the CPU where the run's device is not available."""
    directory = RunDirectory(path)
    before = directory.experiment()
    here = {"data_dir": data_dir or before.data_dir, "device": before.device if has_device(before.device) else "cpu"}
    experiment = before.model_copy(update={**here, "engine": "in-process", "tensorboard": False})
    bench = prepare(experiment, Objects())
    directory.check(bench.data, bench.fingerprint())
    run = federation(experiment, bench, directory)
    run.finished, run.server.state = run.states.restore(sweep=False)
    run.server.round = run.finished
    return run
