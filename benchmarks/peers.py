"""FedAvg by fedtailor, by a plain PyTorch loop and, if they are here, by other libraries: the same clients, samples,
network and steps, side by side.

    python -m benchmarks peers --pfllib PATH

fluke is measured if it is installed (`pip install fluke-fl`), and PFLlib if PATH is a clone of its repository
(github.com/TsingZ0/PFLlib) and what it imports is installed.

There are 20 clients, with 1 to 5 times so many samples to train on; PFLlib leaves incomplete batches out, so nobody has
any. A round is an epoch at every client, the mean by samples, and the evaluation of the model on every client's 64
held-out samples. Each library does what its own loop does in a round, without progress bars and printing. They are
spared what others do not do: PFLlib its passes for the training loss, and fluke six of its seven metrics. Before
anything is timed, a round of one step at each client shows that all of them come to the same model.
"""

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.floor import CLASSES, CLIENTS, FASHION, LR, Elsewhere, PlainLoop, Samples, Work, network, samples_of
from benchmarks.measuring import CORES, Goal, Seconds, best_of, images, table, timed
from fedtailor.data import Dataset
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import make_experiment

HELD_OUT, TRAIN, TEST = 64, 0, 2
Theta = Mapping[str, Tensor]
Contender = Callable[[Work, Samples, Samples, Theta], Any]  # with a function `round`, and the model `theta`

# The samples are those of the smallest client, whose batches are full at each of the sizes.
WORK = [
    *(Work(f"MLP 784-100-10, batch {batch}", "mlp:100", FASHION, batch, 320, 0.0) for batch in (10, 32, 64)),
    Work("CNN, batch 64", "cnn", FASHION, 64, 64, 0.0),
]


class Fluke:
    """FedAvg by fluke, whose objects are made as its `CentralizedFL` makes them."""

    def __init__(self, work: Work, train: Samples, held_out: Samples, initial: Theta) -> None:
        (algorithms, client, config), (data, evaluation) = (
            [import_module(f"fluke.{name}") for name in names]
            for names in (("algorithms.fedavg", "client", "config"), ("data", "evaluation"))
        )
        environment = import_module("fluke").FlukeENV()
        environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
        optimizer = config.OptimizerConfigurator({"name": "SGD", "lr": LR})
        load = partial(data.FastDataLoader, num_labels=CLASSES)
        loaders = [
            (load(*samples, batch_size=work.batch, shuffle=True), load(*test, batch_size=HELD_OUT))
            for samples, test in zip(train, held_out, strict=True)
        ]
        clients = [
            client.Client(number, *loader, optimizer, nn.CrossEntropyLoss(), local_epochs=1)
            for number, loader in enumerate(loaders)
        ]
        model = network(work.model, work.shape)
        model.load_state_dict(initial)
        server = import_module("fluke.server").Server(model, None, clients, weighted=True)
        self.algorithm = algorithms.FedAVG(len(clients), None, {}, clients, server)
        accuracy = import_module("torchmetrics").Accuracy(task="multiclass", num_classes=CLASSES)
        self.evaluator = evaluation.ClassificationEval(1, CLASSES, accuracy=accuracy)
        self.rounds = count(1)

    @property
    def theta(self) -> Theta:
        return dict(self.algorithm.server.model.state_dict())

    def round(self) -> None:
        server, number = self.algorithm.server, next(self.rounds)
        eligible = server.get_eligible_clients(1)
        server.broadcast_model(eligible)
        for client in eligible:
            client.local_update(number)
        server.aggregate(eligible, server.receive_client_models(eligible, state_dict=False))
        for client in self.algorithm.clients:
            self.evaluator.evaluate(number, server.model, client.test_set)


class PFLlib:
    """FedAvg by a clone of PFLlib, which reads its data from files below the directory that it is started in."""

    def __init__(self, clone: str, work: Work, train: Samples, held_out: Samples, initial: Theta) -> None:
        self.directory = tempfile.TemporaryDirectory()
        root = Path(self.directory.name)
        for part, samples in (("train", train), ("test", held_out)):
            (folder := root / "dataset/peers" / part).mkdir(parents=True)
            for number, (x, y) in enumerate(samples):
                np.savez(folder / f"{number}.npz", data=np.array({"x": x.numpy(), "y": y.numpy()}))
        (root / "system").mkdir()
        os.chdir(root / "system")
        sys.path.insert(0, str(Path(clone) / "system"))
        model = network(work.model, work.shape)
        model.load_state_dict(initial)
        arguments = Namespace(
            model=model, dataset="peers", algorithm="FedAvg", device="cpu", goal="", save_folder_name="", times=1,
            num_classes=CLASSES, num_clients=len(train), join_ratio=1.0, random_join_ratio=False,
            batch_size=work.batch, local_epochs=1, local_learning_rate=LR, learning_rate_decay=False,
            learning_rate_decay_gamma=1.0, global_rounds=1, eval_gap=1, top_cnt=1, auto_break=False,
            time_select=False, time_threthold=10_000, client_drop_rate=0.0, train_slow_rate=0.0, send_slow_rate=0.0,
            dlg_eval=False, dlg_gap=1, batch_num_per_client=1, num_new_clients=0, fine_tuning_epoch_new=0,
        )  # fmt: skip
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            self.server = import_module("flcore.servers.serveravg").FedAvg(arguments, 0)

    @property
    def theta(self) -> Theta:
        return dict(self.server.global_model.state_dict())

    def round(self) -> None:
        server = self.server
        server.selected_clients = server.select_clients()
        server.send_models()
        server.test_metrics()
        for client in server.selected_clients:
            client.train()
        server.receive_models()
        server.aggregate_parameters()


def peers(clone: str | None) -> dict[str, Contender]:
    """Find the contenders that are here, and say which others are not."""
    found: dict[str, Contender] = {"plain loop": PlainLoop}
    if find_spec("fluke"):
        found["fluke"] = Fluke
    else:
        print("fluke is not installed: pip install fluke-fl")
    if clone:
        found["PFLlib"] = partial(PFLlib, str(Path(clone).resolve()))
    else:
        print("PFLlib is not measured: --pfllib PATH names a clone of its repository")
    return found


def by_fedtailor(work: Work, workers: int, alike: bool = False) -> Simulation:
    """Start a federation whose clients have 1 to 5 times so many samples; `alike`: all as many as the smallest."""
    sizes = torch.tensor([work.samples * (1 if alike else 1 + number % 5) for number in range(CLIENTS)])
    each = torch.stack([sizes, torch.full_like(sizes, HELD_OUT)], dim=1).flatten()
    data: Dataset = replace(
        images(int(each.sum()), work.shape),
        client=torch.arange(CLIENTS).repeat_interleave(sizes + HELD_OUT),
        client_names=tuple(map(str, range(CLIENTS))),
        part=torch.tensor([TRAIN, TEST] * CLIENTS, dtype=torch.uint8).repeat_interleave(each),
    )
    settings = {"split": "official", "validation": 0.0, "rounds": 1_000_000, "engine": "in-process"}
    training = {"method": "fedavg", "model": work.model, "epochs": 1, "batch": work.batch, "lr": LR}
    where = {"engine": "processes", "workers": workers} if workers > 1 else {}
    run = Simulation(prepare(make_experiment({**settings, **training, **where}), Objects(data=data)))
    run.start()
    return run


def furthest(work: Work, contenders: Mapping[str, Contender]) -> float:
    """Do a round of one step at each client by all contenders, and return how far their models are from ours."""
    work = replace(work, batch=work.samples)
    with closing(by_fedtailor(work, 1, alike=True)) as run:
        layout = run.terms.network
        given = (work, *samples_of(run.data), layout.state_dict(run.terms.initial))
        run.round(1)
        ours, apart = layout.state_dict(run.server.state["theta"]), [0.0]
        for make in contenders.values():
            with closing(Elsewhere(1)) as process:
                process.ask("make", make, *given)
                process.ask("round")
                theirs = process.ask("theta")
            apart += [float((theirs[name] - tensor).abs().max()) for name, tensor in ours.items()]
    return max(apart)


def measure(work: Work, contenders: Mapping[str, Contender], repeat: int) -> dict[str, Seconds]:
    """Measure rounds, one of each contender at a time."""
    runs: dict[str, Callable[[], Seconds]] = {}
    one, all_cores = (by_fedtailor(work, workers) for workers in (1, CORES))
    with ExitStack() as ends:
        for run in (one, all_cores):
            ends.callback(run.close)
        given = (work, *samples_of(one.data), one.terms.network.state_dict(one.terms.initial))
        for name, run in (("fedtailor, 1 worker", one), (f"fedtailor, {CORES} workers", all_cores)):
            runs[name] = partial(_timed_round, run, count(1))
        for name, make in contenders.items():
            for threads in (1, CORES):
                process = ends.enter_context(closing(Elsewhere(threads)))
                process.ask("make", make, *given)
                runs[f"{name}, {threads} thread{'s' * (threads > 1)}"] = partial(process.ask, "round")
        return best_of(runs, repeat)


def _timed_round(run: Simulation, rounds: "count[int]") -> Seconds:
    number = next(rounds)
    return timed(lambda: run.round(number))


def run(repeat: int = 3, tiny: bool = False, pfllib: str | None = None) -> list[Goal]:
    """Print what was measured. There are no goals."""
    torch.set_num_threads(1)
    contenders = peers(pfllib)
    for work in [replace(WORK[0], samples=10)] if tiny else WORK:
        apart = furthest(work, contenders)
        if not apart < 1e-5:
            raise SystemExit(f"{work.name}: after a round of one step the models are {apart:.2g} apart.")
        found = measure(work, contenders, repeat)
        ours = found["fedtailor, 1 worker"], found[f"fedtailor, {CORES} workers"]
        rows = [
            [
                name,
                *(f"{1e3 * value:.0f} ms" for value in (seconds.cpu, seconds.wall)),
                f"{seconds.cpu / ours[0].cpu:.2f}×",
                f"{seconds.wall / ours[1].wall:.2f}×",
            ]
            for name, seconds in found.items()
        ]
        header = [work.name, "processor", "clock", "of 1 worker's", f"of {CORES} workers'"]
        print(f"\n{table(header, rows)}\nModels after one step: {apart:.1g} apart at most.", flush=True)
    return []


if __name__ == "__main__":
    run()
