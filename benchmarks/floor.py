"""A round of FedAvg by fedtailor and by a plain loop: the same work, side by side, and against the machine's limit.

    python -m benchmarks.floor

20 clients, Dirichlet 0.1, one epoch a round, all clients evaluated in each round on what was held out. The plain loop
is what a careful person writes by hand: the network as its paper draws it, `torch.optim.SGD`, tensors indexed directly,
in one process with one thread or with as many as there are cores. The limit is the time that the network's
floating-point operations would take at the speed of the machine's own `sgemm` (1024×1024, one thread per core).
"""

import multiprocessing
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measuring import CORES, Goal, best_of, images, table, timed
from fedtailor.data import FederatedData
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import make_experiment
from fedtailor.training.inputs import Inputs

Samples = list[tuple[Tensor, Tensor]]  # of each client

CLIENTS, CLASSES, LR = 20, 10, 0.05
FASHION, CIFAR = (1, 28, 28), (3, 32, 32)
LIMIT_GOAL = 60.0  # per cent


@dataclass(frozen=True)
class Work:
    """A network on data of a shape, and how many times faster than the plain loop it should be."""

    name: str
    model: str
    shape: tuple[int, int, int]
    batch: int
    samples: int
    goal: float
    near_limit: bool = False  # the last goal: a share of the limit


WORK = [
    Work("MLP 784-200-10, batch 10, Fashion", "mlp", FASHION, 10, 20_000, 4.0),
    Work("LeNet, batch 64, Fashion", "lenet", FASHION, 64, 8_000, 2.2),
    Work("LeNet, batch 64, CIFAR", "lenet", CIFAR, 64, 8_000, 2.2),
    Work("CNN, batch 10, Fashion", "cnn", FASHION, 10, 2_000, 2.6),
    Work("CNN, batch 10, CIFAR", "cnn", CIFAR, 10, 2_000, 2.6),
    Work("CNN, batch 64, Fashion", "cnn", FASHION, 64, 2_000, 2.6, near_limit=True),
    Work("CNN, batch 64, CIFAR", "cnn", CIFAR, 64, 2_000, 2.6, near_limit=True),
]


# --- by fedtailor ---


def by_fedtailor(work: Work, workers: int) -> Simulation:
    """Start a federation that does this work."""
    settings: dict[str, Any] = {"clients": CLIENTS, "partition": "dirichlet:0.1", "min_samples": 1, "rounds": 1_000_000}
    training = {"model": work.model, "epochs": 1, "batch": work.batch, "lr": LR}
    where = {"engine": "processes" if workers > 1 else "in-process", "workers": workers}
    experiment = make_experiment({"method": "fedavg", **settings, **training, **where})
    run = Simulation(prepare(experiment, Objects(data=images(work.samples, work.shape))))
    run.start()
    return run


def longest_operations(work: Work) -> str:
    """List the operations of a round in one process that take longest."""
    with closing(by_fedtailor(work, 1)) as run:
        run.round(1)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run.round(2)
    found = sorted(profiler.key_averages(), key=lambda event: event.self_cpu_time_total, reverse=True)
    total = sum(event.self_cpu_time_total for event in found)
    shares = [[e.key, f"{100 * e.self_cpu_time_total / total:.1f} %", str(e.count)] for e in found[:10]]
    return table(["operation", "of the time", "calls"], shares)


# --- by hand ---


def network(model: str, shape: tuple[int, int, int]) -> nn.Module:
    """The network as its paper draws it."""
    layers: list[nn.Module] = []
    if not model.startswith("mlp"):
        maps = {"lenet": (6, 16), "cnn": (32, 64)}[model]
        for before, after in pairwise((shape[0], *maps)):
            layers += [nn.Conv2d(before, after, 5), nn.ReLU(), nn.MaxPool2d(2)]
    features = prod(nn.Sequential(*layers)(torch.zeros(1, *shape)).shape)
    widths = {"mlp": (200,), "mlp:100": (100,), "lenet": (120, 84), "cnn": (512,)}[model]
    layers.append(nn.Flatten())
    for before, after in pairwise((features, *widths, CLASSES)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class PlainLoop:
    """FedAvg, written by hand, for clients with these samples to train on and those held out."""

    def __init__(
        self, work: Work, train: Samples, held_out: Samples, initial: Mapping[str, Tensor] | None = None
    ) -> None:
        self.batch, self.train, self.held_out = work.batch, train, held_out
        self.model = network(work.model, work.shape)
        self.theta = {name: value.clone() for name, value in (initial or self.model.state_dict()).items()}

    def round(self) -> list[tuple[float, float]]:
        total = {name: torch.zeros_like(value) for name, value in self.theta.items()}
        samples = sum(len(y) for _, y in self.train)
        for x, y in self.train:
            self.model.load_state_dict(self.theta)
            self.model.train()
            optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
            order = torch.randperm(len(x))
            for start in range(0, len(x), self.batch):
                chosen = order[start : start + self.batch]
                optimizer.zero_grad()
                functional.cross_entropy(self.model(x[chosen]), y[chosen]).backward()
                optimizer.step()
            for name, value in self.model.state_dict().items():
                total[name] += value * (len(x) / samples)
        self.theta = total
        self.model.load_state_dict(self.theta)
        self.model.eval()
        with torch.no_grad():
            return [self.evaluate(x, y) for x, y in self.held_out]

    def evaluate(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        outputs = self.model(x)
        return float(functional.cross_entropy(outputs, y)), float((outputs.argmax(1) == y).double().mean())


def samples_of(data: FederatedData) -> tuple[Samples, Samples]:
    """Copy every client's samples to train on and those held out, as a plain loop has them: channels first."""

    def plain(x: Inputs) -> Tensor:
        assert isinstance(x, Tensor)
        return torch.empty(x.shape).copy_(x)

    clients = [data.client(number) for number in range(data.n_clients)]
    train = [(plain(x), y) for x, y in (client.train for client in clients)]
    return train, [(plain(c.held_out), torch.cat([c.validation[1], c.test[1]])) for c in clients]


class Elsewhere:
    """A process of its own with so many threads, to which nothing of fedtailor's comes."""

    def __init__(self, threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, far_end = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(threads, far_end), daemon=True)
        self.process.start()
        far_end.close()

    def ask(self, *task: Any) -> Any:
        self.pipe.send(task)
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.close()
        self.process.join()


def _serve(threads: int, pipe: Connection) -> None:
    """Do what is asked for: make a loop, do a round of it, send its model, or multiply matrices."""
    torch.set_num_threads(threads)
    loop: Any = None
    with suppress(EOFError):
        while True:
            kind, *given = pipe.recv()
            if kind == "sgemm":
                matrix = torch.rand(*given)
                pipe.send(timed(partial(torch.mm, matrix, matrix)))
            elif kind == "round":
                pipe.send(timed(loop.round))
            elif kind == "theta":
                pipe.send(loop.theta)
            else:
                make, *work = given
                loop = make(*work)
                pipe.send(None)


# --- the limit ---


def sgemm(process: Elsewhere, repeat: int, size: int = 1024) -> float:
    """Measure floating-point operations a second."""
    return 2 * size**3 / best_of({"": lambda: process.ask("sgemm", size, size)}, 10 * repeat)[""].wall


def operations(work: Work, trained: int, evaluated: int) -> float:
    """Count the floating-point operations of a round: passes forward and back, and forward alone."""
    model = network(work.model, work.shape)
    x, y = torch.zeros(work.batch, *work.shape), torch.zeros(work.batch, dtype=torch.long)
    with FlopCounterMode(display=False) as both:
        functional.cross_entropy(model(x), y).backward()
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(x)
    return float(trained * both.get_total_flops() + evaluated * forward.get_total_flops()) / work.batch


# --- all of it ---


def measure(work: Work, one_thread: Elsewhere, threads: Elsewhere, rate: float, repeat: int) -> list[Goal]:
    with closing(by_fedtailor(work, 1)) as one, closing(by_fedtailor(work, CORES)) as all_cores:
        train, held_out = samples_of(one.data)
        for process in (one_thread, threads):
            process.ask("make", PlainLoop, work, train, held_out)
        rounds = count(1)
        found = best_of(
            {
                "plain loop, 1 thread": lambda: one_thread.ask("round"),
                f"plain loop, {CORES} threads": lambda: threads.ask("round"),
                "fedtailor, 1 worker": lambda: timed(lambda: one.round(next(rounds))),
                f"fedtailor, {CORES} workers": lambda: timed(lambda: all_cores.round(next(rounds))),
            },
            2 * repeat,
        )
    trained = sum(len(y) for _, y in train)
    needed = operations(work, trained, sum(len(y) for _, y in held_out)) / rate
    floor, best = found["plain loop, 1 thread"], found[f"fedtailor, {CORES} workers"]
    rows = [
        [
            name,
            f"{1e3 * seconds.wall:.0f} ms",
            f"{1e3 * seconds.cpu:.0f} ms",
            f"{trained / seconds.wall:,.0f}",
            f"{floor.wall / seconds.wall:.2f}×",
            f"{floor.cpu / seconds.cpu:.2f}×",
            f"{100 * needed / seconds.wall:.0f} %",
        ]
        for name, seconds in found.items()
    ]
    header = [work.name, "clock", "processor", "samples/s", "by the clock", "by the processor", "of the limit"]
    print("\n" + table(header, rows), flush=True)

    why = partial(longest_operations, work)
    goals = [Goal(f"{work.name}: the plain loop", floor.wall / best.wall, work.goal, at_least=True, why=why)]
    if work.near_limit:
        share = 100 * needed / best.wall
        goals.append(Goal(f"{work.name}: of the sgemm limit", share, LIMIT_GOAL, "%", at_least=True, why=why))
    return goals


def run(repeat: int = 3, tiny: bool = False) -> list[Goal]:
    torch.set_num_threads(1)
    work = [replace(w, samples=200) for w in (WORK[0], WORK[-1])] if tiny else WORK
    with closing(Elsewhere(1)) as one_thread, closing(Elsewhere(CORES)) as threads:
        rate = sgemm(threads, repeat)
        print(f"sgemm, 1024×1024, {CORES} threads: {rate / 1e9:.0f} GFLOP/s")
        return [goal for each in work for goal in measure(each, one_thread, threads, rate, repeat)]


if __name__ == "__main__":
    for goal in run():
        print(*goal.row())
