"""What a round takes of memory: FedAvg with 100 participants against 10, in one process and with two workers.

    python -m benchmarks.memory

100 clients with 20 images in CIFAR-10's shape on average and the FedAvg CNN: an upload has 878,538 parameters, 3.4 MiB.
A participant takes one step with at most 10 images; nothing is evaluated. Clients have equally many images, or by
Dirichlet 0.3: workers begin with the longest work, so uploads then arrive in another order than they are added up in,
and wait. Each federation has fresh processes of its own, in which two clients have trained before, so that the
network's passes have their memory.

Before the rounds: what the processes have, counting once what they share. At the peak: that, and by how much each
process's resident memory was higher at its own peak during the rounds (the system's `VmHWM`, set back before them).
Processes need not have their peaks at the same time, so it is no less than what they had together. The goal is a ratio
of two such peaks: uploads of all participants, if they were held, would add 300 MiB to the larger one.
"""

import multiprocessing
import os
import re
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Goal, images, memory, start, table
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import make_experiment
from fedtailor.messages import Train

PEAK_GOAL = 1.1  # times
EQUAL, UNEQUAL = "iid", "dirichlet:0.3"
SIZES = {EQUAL: "equal clients", UNEQUAL: "unequal clients"}
SMALLEST = 2  # samples of a client: one is trained on


@dataclass(frozen=True)
class Case:
    """A federation to measure."""

    workers: int = 1
    partition: str = EQUAL
    participants: int = 10
    clients: int = 100
    samples: int = 20
    method: str = "fedavg"
    model: str = "cnn"
    rounds: int = 3
    fresh: bool = True  # a process of its own from the ground up, or a forked one, which is there at once

    @property
    def title(self) -> str:
        return f"{f'{self.workers} workers' if self.workers > 1 else 'one process'}, {SIZES[self.partition]}"

    def started(self) -> Simulation:
        """Start the federation. It evaluates nothing."""
        whom = {"clients": self.clients, "participation": self.participants}
        data = {"partition": self.partition, "min_samples": SMALLEST}
        training = {"method": self.method, "model": self.model, "steps": 1, "batch": 10}
        never: dict[str, Any] = {"rounds": 1000, "evaluation": {"every": 1000}}
        where = {"engine": "processes" if self.workers > 1 else "in-process", "workers": self.workers}
        experiment = make_experiment({**whom, **data, **training, **never, **where})
        run = Simulation(prepare(experiment, Objects(data=images(self.clients * self.samples, (3, 32, 32)))))
        run.start()
        return run


@dataclass(frozen=True)
class Taken:
    """The memory that a federation took, in MiB."""

    before: float  # all processes, before the rounds
    server: float  # what the server's process took beyond that
    workers: float  # what all workers took beyond that
    upload: float  # the size of one upload

    @property
    def growth(self) -> float:
        return self.server + self.workers

    @property
    def peak(self) -> float:
        return self.before + self.growth


def measured(case: Case) -> Taken:
    """Measure a federation in processes of its own."""
    processes = get_context("spawn") if case.fresh else get_context("fork")
    pipe, far_end = processes.Pipe()
    process: BaseProcess = processes.Process(target=_measure, args=(case, far_end))
    start(process)
    far_end.close()
    taken: Taken = pipe.recv()
    process.join()
    return taken


def _measure(case: Case, pipe: Connection) -> None:
    torch.set_num_threads(1)
    with closing(case.started()) as run:
        _train_two(run)
        server, *workers = pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
        before = 1024 * memory(server)
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is now what there is
        resident = {pid: _status(pid, "VmRSS") for pid in pids}
        for number in range(1, case.rounds + 1):
            run.round(number)
        growth = {pid: _status(pid, "VmHWM") - resident[pid] for pid in pids}
        upload = run.server.initial.nbytes / 2**20
    pipe.send(Taken(before, growth[server], sum(growth[pid] for pid in workers), upload))


def _train_two(run: Simulation) -> None:
    """Have two clients train, one for each worker, outside of any round."""
    run.loop.call(1)
    messages = run.terms.method.send_all(run.server)
    requests = [Train(1, client, messages[client]) for client in run.server.participants[:2]]
    for reply in run.transport.ask(requests):
        assert not reply.error, reply.error


def _status(pid: int | None, name: str) -> float:
    """Read a number of a process's status, in MiB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def run(repeat: int = 3, tiny: bool = False) -> list[Goal]:
    """Print what was measured, and return the goals."""
    case, few, many = Case(rounds=repeat), 10, 100
    if tiny:
        case, few, many = replace(case, clients=4, model="mlp:3", fresh=False), 2, 4
    goals, rows = [], []
    for workers, partition in ((1, EQUAL), (2, EQUAL), (2, UNEQUAL)):
        case = replace(case, workers=workers, partition=partition)
        found = {participants: measured(replace(case, participants=participants)) for participants in (few, many)}
        for participants, taken in found.items():
            sizes = [f"{size:.0f} MiB" for size in (taken.before, taken.peak, taken.server, taken.workers)]
            rows.append([f"{participants} participants, {case.title}", *sizes, f"{taken.growth / taken.upload:.1f}"])
        what = f"peak memory, {many} participants against {few}, {case.title}"
        goals.append(Goal(what, found[many].peak / found[few].peak, PEAK_GOAL))
    header = ["rounds of FedAvg", "before", "peak", "server's part", "workers' part", "in uploads"]
    print(table(header, rows), flush=True)
    return goals


if __name__ == "__main__":
    for goal in run():
        print(*goal.row())
