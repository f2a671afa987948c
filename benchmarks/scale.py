"""What a round costs beside its participants' own work: with many clients, and with 100 on the LeNet.

    python -m benchmarks.scale

1. Rounds of 100 participants out of 100, 1,000 and 10,000 clients. Every client has 20 images of 28×28 (0.6 GB of
   numbers for 10,000 clients), and trains the LeNet for an epoch in batches of 10. The method is Ditto, with a model of
   every client's own: all of them are there from the beginning, as after many rounds. A round includes its share of the
   checkpoints, which come as often as they do by default. Its participants are evaluated; evaluating everybody grows
   with the clients by nature and has a line of its own. Each federation has fresh processes of its own, and they take
   turns.
2. FedAvg with 100 clients on the LeNet, CIFAR-10's shape, 200 samples each, one epoch in batches of 64, all clients
   evaluated in each round: what is left of a round after the network's passes, which are timed in the round itself:
   descents (batches, forward, backward, step) and outputs on held-out samples. With workers, by the clock, it is what
   is left of all workers' time, waiting included.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from operator import add
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import torch

from benchmarks.measuring import CORES, Goal, Seconds, images, memory, profiled, start, table, timed
from fedtailor.data import Dataset
from fedtailor.engines.preparation import Objects, Prepared, prepare
from fedtailor.engines.simulation import Simulation, create
from fedtailor.experiment import Experiment, make_experiment
from fedtailor.messages import copied
from fedtailor.training.descent import descend
from fedtailor.training.predictions import outputs

GROWTH_GOAL, MEMORY_GOAL, OVERHEAD_GOAL = 1.2, 2.0, 5.0  # times, GiB, per cent
EVERY = Experiment.model_fields["checkpoint_every"].default  # rounds from checkpoint to checkpoint
P = ParamSpec("P")
T = TypeVar("T")
WHERE = {"memory": "in memory", "disk": "on disk"}


def images_of_clients(clients: int, samples: int, shape: tuple[int, int, int]) -> Dataset:
    """Random images, equally many for each client."""
    client, names = torch.arange(clients).repeat_interleave(samples), tuple(map(str, range(clients)))
    return replace(images(clients * samples, shape), client=client, client_names=names)


# --- many clients ---


@dataclass(frozen=True)
class Case:
    """A federation to measure."""

    clients: int
    participants: int
    samples: int
    rounds: int  # from checkpoint to checkpoint
    states: str
    evaluated: str = "participants"
    fresh: bool = True  # a process of its own from the ground up, or a forked one, which is there at once

    model: str = "lenet"
    begun: int | None = None  # clients that have a state already; all of them unless said

    def data(self) -> Dataset:
        return images_of_clients(self.clients, self.samples, (1, 28, 28))

    def start(self, out: Path) -> Simulation:
        """Start the federation in the run directory `out`."""
        where: dict[str, Any] = {"engine": "processes", "states": self.states, "checkpoint_every": self.rounds}
        what = {"method": "ditto", "model": self.model, "epochs": 1, "batch": 10, "rounds": 10**6}
        whom = {"participation": self.participants, "evaluation": {"clients": self.evaluated}}
        experiment = make_experiment({**where, **what, **whom})
        run = create(out, prepare(experiment, Objects(data=self.data())))
        run.start()
        return run

    def go_on(self, run: Simulation) -> None:
        """Pretend that clients have taken part in round 1."""
        for client in range(self.clients if self.begun is None else self.begun):
            run.sites.store.put(client, copied({"personal": run.terms.initial}), 1)
        run.sites.save()
        run.sites.prune()
        run.loop.finished, run.loop.versions = 1, dict(run.sites.store.current)


def work(case: Case, pipe: Connection) -> None:
    """Run a federation in processes of its own: start it, do a round whenever it is asked for, and say how long each
    took; at the end, the bytes of its run directory."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        out, runs = Path(directory) / "run", []
        seconds = timed(lambda: runs.append(case.start(out)))
        with closing(runs[0]) as run, closing(run.run()) as rounds:
            case.go_on(run)
            pipe.send(seconds)
            while pipe.recv():
                pipe.send(timed(lambda: next(rounds)))
        pipe.send(sum(512 * path.lstat().st_blocks for path in out.rglob("*")))


@dataclass
class Measured:
    """A federation at work, and what was measured of it."""

    case: Case
    turns: list[Seconds] = field(default_factory=list)  # a round's mean, from checkpoint to checkpoint
    peak: float = 0.0  # GiB
    start_up: Seconds = field(default_factory=Seconds)
    size: int = 0  # bytes of the run directory, at the end

    def __post_init__(self) -> None:
        processes = get_context("spawn") if self.case.fresh else get_context("fork")
        self.pipe, far_end = processes.Pipe()
        self.process: BaseProcess = processes.Process(target=work, args=(self.case, far_end))
        start(self.process)
        far_end.close()
        self.warm = threading.Event()
        self.watch = threading.Thread(target=self._watch)
        self.watch.start()

    def _watch(self) -> None:
        """Look at the memory until rounds are timed: looking takes longer the more there is."""
        while not self.warm.wait(0.05):
            self.peak = max(self.peak, memory(self.process.pid))

    def warm_up(self) -> None:
        """Do the first rounds, when everything is in place."""
        try:
            self.start_up = self.pipe.recv()
            for _ in range(self.case.rounds):
                self.round()
        finally:
            self.warm.set()
            self.watch.join()

    def round(self) -> Seconds:
        self.pipe.send(True)
        seconds: Seconds = self.pipe.recv()
        return seconds

    def end(self) -> None:
        self.pipe.send(False)
        self.size = self.pipe.recv()
        self.process.join()

    def row(self) -> list[str]:
        wall, cpu = [s.wall for s in self.turns], [s.cpu for s in self.turns]
        times = [f"{1e3 * choose(found):.0f} ms" for found in (wall, cpu) for choose in (min, statistics.median)]
        case = self.case
        title = f"{case.clients:,} clients" + ", all evaluated" * (case.evaluated == "all")
        return [title, WHERE[case.states], *times, f"{self.peak:.2f} GiB"]


def many_clients(sizes: Sequence[int], case: Case, repeat: int) -> list[Goal]:
    """Measure rounds with equally many participants out of more and more clients."""
    goals, rows, participants = [], [], case.participants
    for states in ("memory", "disk"):
        cases = [replace(case, clients=clients, states=states) for clients in sizes]
        found = [
            Measured(case) for case in [*cases, replace(cases[-1], evaluated="all")][: len(cases) + (states == "disk")]
        ]
        for one in found:
            one.warm_up()
        for _ in range(max(1, repeat - 1)):  # a turn has many rounds
            take_turns(found)
        for one in found:
            one.end()
            rows.append(one.row())
        few, many = found[0], found[len(sizes) - 1]
        times = statistics.median(b.wall / a.wall for a, b in zip(few.turns, many.turns, strict=True))
        what = f"a round of {participants} of {sizes[-1]:,} clients against {sizes[0]:,}, states {WHERE[states]}"
        goals.append(Goal(what, times, GROWTH_GOAL, why=partial(profile, many.case)))
    what = f"peak memory of all processes with {sizes[-1]:,} clients, states on disk"
    goals.append(Goal(what, max(one.peak for one in found), MEMORY_GOAL, "GiB"))
    header = [f"a round of {participants} of", "states", "clock", "median", "processors", "median", "peak memory"]
    print(table(header, rows), flush=True)
    return goals


def take_turns(federations: Sequence[Measured]) -> None:
    """Do some rounds of each, one of each at a time: a busy moment of the machine meets all of them."""
    rounds = federations[0].case.rounds
    found = [[one.round() for one in federations] for _ in range(rounds)]
    for number, one in enumerate(federations):
        times = [seconds[number] for seconds in found]
        one.turns.append(reduce(add, times) / rounds)
        one.peak = max(one.peak, memory(one.process.pid))


def profile(case: Case) -> str:
    """Profile the server's process. What it waits for (`poll`) are the workers."""
    with tempfile.TemporaryDirectory() as directory, closing(case.start(Path(directory) / "run")) as run:
        case.go_on(run)
        with closing(run.run()) as rounds:
            next(rounds)
            return profiled(lambda: list(islice(rounds, case.rounds)))


# --- everything that is not the network's passes ---


@contextmanager
def passes_watched() -> Iterator[Callable[[], Seconds]]:
    """Yield a function that tells the time spent in descents and in computing outputs, by this process and by workers
    forked meanwhile."""
    spent = get_context("fork").Array("d", 2)

    def watched(function: Callable[P, T]) -> Callable[P, T]:
        def timed_function(*arguments: P.args, **settings: P.kwargs) -> T:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return function(*arguments, **settings)
            finally:
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                with spent.get_lock():
                    spent[0], spent[1] = spent[0] + wall, spent[1] + cpu

        return timed_function

    with (
        patch("fedtailor.training.client.descend", watched(descend)),
        patch("fedtailor.client.sites.outputs", watched(outputs)),
    ):
        yield lambda: Seconds(spent[0], spent[1])


def overhead(clients: int, samples: int, repeat: int) -> list[Goal]:
    """Measure the share of a round that is not the network's passes: by the processor's time in one process, and by the
    clock with workers, where their waiting counts too."""
    goals, rows = [], []
    for workers, by in ((1, "processor"), (max(2, CORES), "clock")):
        engine, title = ("in-process", "one process") if workers == 1 else ("processes", f"{workers} workers")
        settings: dict[str, Any] = {"method": "fedavg", "model": "lenet", "epochs": 1, "batch": 64, "rounds": 10**6}
        experiment = make_experiment({**settings, "engine": engine, "workers": workers})
        prepared = prepare(experiment, Objects(data=images_of_clients(clients, samples, (3, 32, 32))))
        shares = []
        with passes_watched() as passes, closing(Simulation(prepared)) as run:
            run.start()
            run.round(1)
            for number in range(2, repeat + 2):
                before = passes()
                whole = timed(partial(run.round, number))
                after = passes()
                inside = Seconds((after.wall - before.wall) / workers, after.cpu - before.cpu)
                share = {"clock": 1 - inside.wall / whole.wall, "processor": 1 - inside.cpu / whole.cpu}
                shares.append(share[by])
                times = [f"{1e3 * value:.0f} ms" for value in (whole.wall, inside.wall, whole.cpu, inside.cpu)]
                rows.append([title, *times, *(f"{100 * value:.1f} %" for value in share.values())])
            what = f"overhead of the framework, {clients} clients on the LeNet, {title}, by the {by}"
            why = partial(profiled_overhead, prepared)
            goals.append(Goal(what, 100 * statistics.median(shares), OVERHEAD_GOAL, "%", why=why))
    header = [
        f"FedAvg, {clients} clients",
        "clock",
        "in passes",
        "processors",
        "in passes",
        "overhead",
        "by processors",
    ]
    print("\n" + table(header, rows), flush=True)
    return goals


def profiled_overhead(prepared: Prepared) -> str:
    with closing(Simulation(prepared)) as run:
        run.start()
        return profiled(partial(run.round, 1))


def run(repeat: int = 3, tiny: bool = False) -> list[Goal]:
    """Print what was measured, and return the goals."""
    torch.set_num_threads(1)
    if tiny:
        return [*many_clients((2, 3), Case(2, 2, 10, 1, "memory", fresh=False), 1), *overhead(2, 10, 1)]
    return [
        *many_clients((100, 1_000, 10_000), Case(100, 100, 20, EVERY, "memory"), repeat),
        *overhead(100, 200, repeat),
    ]


if __name__ == "__main__":
    for goal in run():
        print(*goal.row())
