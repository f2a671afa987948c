"""What the four systems promise of their costs: pFedMB's branches, PFLEGO's inner steps, FedACS's server.

    python benchmarks/costs.py [--repeat 7] [--disk-clients 100]

One thread, random data of CIFAR-10's shape. Each line is the best of several short repetitions, taken in turn with
those it is compared with, once by the clock and once by the processor's time (a shared machine disturbs the clock).

1. pFedMB with 10 branches against 1: a whole visit of a client (LeNet, batches of 64, 2,667 samples as in the paper's
   setting of 15 clients, one epoch) divided by its steps. With 10 branches these are an epoch on α and one on W, with 1
   the latter alone. Goal: 1.3× a step.
2. PFLEGO with τ = 50 against τ = 5: a whole visit (CNN, 500 samples). Goal: 1.5×.
3. FedACS's server for one round: 500 clients, 50 of which took part, 878,538 parameters. `receive` keeps the models and
   computes the rows of similarities that changed, the first `send` mixes for all participants. Goal: 3 s together.
   The same with the models on disk, for fewer clients.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedtailor.experiment import make_experiment
from fedtailor.federation.rounds import Federation
from fedtailor.federation.setup import Objects, federation, prepare
from fedtailor.federation.states import States
from fedtailor.method import Message, Replies, Server
from fedtailor.methods.fedacs import FedACS

SHAPE, CLASSES = (3, 32, 32), 10
BRANCHES_GOAL, INNER_STEPS_GOAL, SERVER_GOAL = 1.3, 1.5, 3.0


@dataclass(frozen=True)
class Seconds:
    """How long something took, by the clock and by the processor."""

    wall: float = float("inf")
    cpu: float = float("inf")

    def best(self, other: "Seconds") -> "Seconds":
        return Seconds(min(self.wall, other.wall), min(self.cpu, other.cpu))

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def __truediv__(self, number: float) -> "Seconds":
        return Seconds(self.wall / number, self.cpu / number)


def timed(work: Callable[[], object]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def best_of(runs: dict[str, Callable[[], Seconds]], repeat: int) -> dict[str, Seconds]:
    """The best of several repetitions of each, in turn, so that a busy moment of the machine meets all of them."""
    for run in runs.values():  # the first pass of a network sets things up
        run()
    found = {name: Seconds() for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            found[name] = found[name].best(run())
    return found


def pictures(clients: int, samples: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(samples, *SHAPE, generator=generator), torch.randint(CLASSES, (samples,), generator=generator))
        for _ in range(clients)
    ]


def started(
    method: str, model: str, data: list[tuple[Tensor, Tensor]], batch: int = 64, **parameters: object
) -> Federation:
    """A federation before its first round."""
    settings = {"epochs": 1, "batch": batch, "test": 0.0, "validation": 0.0, "engine": "in-process"}
    experiment = make_experiment({"method": method, "model": model, "parameters": parameters, **settings})
    run = federation(experiment, prepare(experiment, Objects(data=data)), None)
    run.start()
    run.server.begin(1, list(range(len(data))), torch.Generator())
    return run


def visit(run: Federation) -> Seconds:
    """A participant's work in one round: what client 0 makes of the server's first message."""
    message, client = run.method.send(run.server, 0), run.bench.client(0, 1, {})
    return timed(lambda: run.method.train(client, message))


def branches(samples: int = 2667, counts: tuple[int, int] = (1, 10), repeat: int = 7) -> dict[str, Seconds]:
    """Seconds a step of pFedMB with these numbers of branches."""
    data = pictures(1, samples)

    def of(count: int) -> Callable[[], Seconds]:
        run = started("pfedmb", "lenet", data, branches=count)
        phases = 2 if count > 1 else 1  # on α and on W, or on W alone
        steps = phases * run.bench.client(0, 1, {}).steps
        return lambda: visit(run) / steps

    return best_of({f"pFedMB, {count} branch{'es' * (count > 1)}, a step": of(count) for count in counts}, repeat)


def inner_steps(samples: int = 500, counts: tuple[int, int] = (5, 50), repeat: int = 7) -> dict[str, Seconds]:
    """Seconds of a visit with PFLEGO with these numbers of inner steps τ."""
    data = pictures(1, samples)

    def of(count: int) -> Callable[[], Seconds]:
        run = started("pflego", "cnn", data, inner_steps=count)
        return lambda: visit(run)

    return best_of({f"PFLEGO, τ = {count}, a visit": of(count) for count in counts}, repeat)


class ServerOfModels:
    """FedACS's server with a model of every client, as after many rounds."""

    def __init__(self, clients: int, participants: int, model: str = "cnn", directory: Path | None = None) -> None:
        self.participants = participants
        self.method = FedACS()
        run = started("fedacs", model, pictures(2, 1))
        self.initial = run.server.initial
        everyone = torch.ones(clients, dtype=torch.long)
        states = States(directory, on_disk=directory is not None)
        whole = slice(0, len(self.initial))
        self.server = Server(self.initial, whole, whole, {}, everyone, participants, store=states)
        self.method.start(self.server)
        self.generator = torch.Generator().manual_seed(1)
        for client in range(clients):
            self.server.keep(client, {"w": self._model()})
        # Their similarities would take a while, and how long a round takes does not depend on them.
        some = torch.rand(clients, clients, generator=self.generator)
        self.server.state["S"] = ((some + some.T) / 2).fill_diagonal_(1.0)

    def receive(self, clients: list[int]) -> Seconds:
        """The models of these clients arrive: they are kept, and their similarities to all others computed."""
        models: dict[int, Message] = {client: {"w": self._model()} for client in clients}
        replies = Replies(models, self.server.samples)
        return timed(lambda: self.method.receive(self.server, replies))

    def mix(self, clients: list[int]) -> Seconds:
        """What these participants begin a round with."""
        return timed(lambda: self.method.send(self.server, clients[0]))

    def a_round(self) -> tuple[Seconds, Seconds]:
        """The server's part of one round with clients drawn at random: the similarities behind, the mixing before."""
        drawn = torch.randperm(self.server.clients, generator=self.generator)[: self.participants]
        clients = sorted(drawn.tolist())
        self.server.begin(self.server.round + 1, clients, torch.Generator())
        mixing = self.mix(clients)
        return self.receive(clients), mixing

    def _model(self) -> Tensor:
        return self.initial + 0.02 * torch.randn(len(self.initial), generator=self.generator)


def server_steps(
    clients: int, participants: int, model: str = "cnn", repeat: int = 7, directory: Path | None = None
) -> dict[str, Seconds]:
    """Seconds of FedACS's server in one round, by its two parts."""
    models = ServerOfModels(clients, participants, model, directory)
    rows, mixing = Seconds(), Seconds()
    for _ in range(repeat):
        received, mixed = models.a_round()
        rows, mixing = rows.best(received), mixing.best(mixed)
    where = "in memory" if directory is None else "on disk"
    title = f"FedACS, {clients} clients {where}"
    return {f"{title}: similarities": rows, f"{title}: mixing": mixing, f"{title}: a round": rows + mixing}


def show(found: dict[str, Seconds]) -> None:
    for name, seconds in found.items():
        print(f"{name:48} {1e3 * seconds.wall:10.2f} ms  {1e3 * seconds.cpu:10.2f} ms")


def verdict(what: str, wall: float, cpu: float, goal: float, unit: str) -> None:
    met = "met" if wall <= goal else "met by the processor's time only" if cpu <= goal else "MISSED"
    print(f"{what:48} {wall:10.2f} {unit}   {cpu:10.2f} {unit}   goal {goal:g} {unit}: {met}\n")


def compare(what: str, found: dict[str, Seconds], goal: float) -> None:
    """Print the two, and how many times the first the second takes."""
    show(found)
    less, more = found.values()
    verdict(what, more.wall / less.wall, more.cpu / less.cpu, goal, "×")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--disk-clients", type=int, default=100, help="clients with models on disk; 0: none")
    arguments = parser.parse_args()
    repeat = arguments.repeat
    torch.set_num_threads(1)
    print(f"{'':48} {'clock':>10}     {'processor':>10}")
    compare("pFedMB, 10 branches against 1", branches(repeat=repeat), BRANCHES_GOAL)
    compare("PFLEGO, τ = 50 against τ = 5", inner_steps(repeat=repeat), INNER_STEPS_GOAL)
    found = server_steps(500, 50, repeat=repeat)
    show(found)
    whole = list(found.values())[-1]
    verdict("FedACS, the server's part of a round", whole.wall, whole.cpu, SERVER_GOAL, "s")
    if arguments.disk_clients:
        with tempfile.TemporaryDirectory() as directory:
            clients = arguments.disk_clients
            show(server_steps(clients, max(1, clients // 10), repeat=repeat, directory=Path(directory)))


if __name__ == "__main__":
    main()
