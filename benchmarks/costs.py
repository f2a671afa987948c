"""What methods cost: every method's round against FedAvg's, and what the four systems promise of their costs.

One thread, random data of CIFAR-10's shape; all lines of a table are measured in turn. The goals go by the processor's
time: with one thread that is all the work there is, and the clock counts other people's as well.

1. A round of every method with its defaults, the second or a later one: 10 clients of 100 samples (a tenth of them for
   validation), LeNet, batches of 50, one epoch, no evaluation. Samples are counted through the body, forward and
   backward, and through the head. Passes are both ways of the body together: the way back counts twice, as it makes
   gradients by inputs and by weights. What time is over passes is what a method does beside them.
2. PFLEGO over τ against FedPer with as many steps over all samples: a participant's round, the FedAvg CNN, 100 samples.
3. pFedMB over branches: a participant's round (LeNet, batches of 64, 1,280 samples, one epoch) divided by its steps,
   which are an epoch on α and one on W; with one branch the latter alone.
4. The server: what it does in a round to send, and to receive (aggregation included), as clients grow. All take part,
   with models of 100,000 parameters; and FedACS with 500 clients, 50 of them taking part, and 878,538 parameters.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from math import log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring import Goal, Seconds, best_of, profiled, table, timed
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import make_experiment
from fedtailor.messages.store import Store
from fedtailor.method import Message, Server
from fedtailor.methods import all_methods, find_method
from fedtailor.server.aggregation import Aggregator
from fedtailor.training.layout import Layout

SHAPE, CLASSES, CNN = (3, 32, 32), 10, 878_538  # the shape of CIFAR-10, and the FedAvg CNN's parameters there
KEPT = {"fedacs": "w", "fedamp": "w", "fedfomo": "theta"}  # what these servers keep of every client

Samples = list[tuple[Tensor, Tensor]]


def images(clients: int, samples: int) -> Samples:
    """Random images for each client."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(samples, *SHAPE, generator=generator), torch.randint(CLASSES, (samples,), generator=generator))
        for _ in range(clients)
    ]


def started(method: str, model: str, data: Samples, **settings: Any) -> Simulation:
    """Start a federation that evaluates nothing."""
    common: dict[str, Any] = {"epochs": 1, "lr": 0.01, "test": 0.0, "validation": 0.0, "engine": "in-process"}
    never = {"rounds": 1000, "evaluation": {"every": 0}}
    experiment = make_experiment({"method": method, "model": model, **common, **never, **settings})
    run = Simulation(prepare(experiment, Objects(data=data)))
    run.start()
    return run


def in_ms(seconds: Seconds) -> list[str]:
    return [f"{1e3 * seconds.wall:.1f}", f"{1e3 * seconds.cpu:.1f}"]


# --- a round of every method ---


def next_round(run: Simulation) -> None:
    run.round(run.finished + 1)


def samples_seen(run: Simulation) -> tuple[int, int, int]:
    """Count the samples of the next round: through the body, forward and backward, and through the head."""
    network, seen = run.terms.network, {"forward": 0, "backward": 0, "head": 0}

    def of_body(_: nn.Module, inputs: object, output: Tensor) -> None:
        seen["forward"] += len(output)
        if output.requires_grad:
            output.register_hook(back)

    def back(gradient: Tensor) -> None:
        seen["backward"] += len(gradient)

    def of_head(_: nn.Module, inputs: object, output: Tensor) -> None:
        seen["head"] += len(output)

    first, *_, last = (network.module.get_submodule(name) for name in network.layout.layers)
    hooks = [first.register_forward_hook(of_body), last.register_forward_hook(of_head)]
    next_round(run)
    for hook in hooks:
        hook.remove()
    return seen["forward"], seen["backward"], seen["head"]


def rounds(clients: int, samples: int, model: str, repeat: int) -> None:
    """Measure a round of every method against FedAvg's."""
    data = images(clients, samples)
    runs = {name: started(name, model, data, batch=50, validation=0.1) for name in all_methods()}
    for run in runs.values():
        next_round(run)  # the first one differs
    seen = {name: samples_seen(run) for name, run in runs.items()}
    found = best_of({name: partial(timed, partial(next_round, run)) for name, run in runs.items()}, repeat)
    ours, one = found["fedavg"], seen["fedavg"][0]
    rows = []
    for name, seconds in sorted(found.items(), key=lambda entry: entry[1].cpu):
        forward, backward, head = seen[name]
        passes, cpu = (forward + 2 * backward) / (3 * one), seconds.cpu / ours.cpu
        counts = [f"{number / one:.2f}" for number in (forward, backward, head)]
        rows.append([name, *counts, f"{passes:.2f}", f"{seconds.wall / ours.wall:.2f}", f"{cpu:.2f}"])
        rows[-1].append(f"{cpu / passes:.2f}")
    header = [
        "a round, in FedAvg's",
        "forward",
        "backward",
        "head",
        "passes",
        "clock",
        "processor",
        "over passes",
    ]
    print(table(header, rows), flush=True)


# --- a participant's round: PFLEGO's inner steps, pFedMB's branches ---


def participation(run: Simulation) -> Callable[[], Message]:
    """Return client 0's work in round 1, to be done any number of times."""
    run.loop.call(1)
    method = run.terms.method
    message = method.send_all(run.server)[0]
    return lambda: method.train(run.sites.site(0).client(1, {}), message)


def inner_steps(samples: int, model: str, counts: tuple[int, ...], longest: int, repeat: int) -> list[Goal]:
    """Measure PFLEGO over τ, and FedPer with as many steps, up to the `longest`: it takes its time."""
    data = images(1, samples)
    work = {f"PFLEGO {n}": participation(started("pflego", model, data, parameters={"inner_steps": n})) for n in counts}
    as_many = [n for n in counts if n <= longest]
    work |= {f"FedPer {n}": participation(started("fedper", model, data, batch="full", steps=n)) for n in as_many}
    found = best_of({name: partial(timed, one) for name, one in work.items()}, repeat)
    rows = []
    for n in counts:
        ours, theirs = found[f"PFLEGO {n}"], found.get(f"FedPer {n}")
        beside = [*in_ms(theirs), f"{theirs.cpu / ours.cpu:.1f} ×"] if theirs else ["", "", ""]
        rows.append([f"τ = {n}", *in_ms(ours), *beside])
    print(table(["a participant's round, ms", "PFLEGO", "processor", "FedPer", "processor", ""], rows), flush=True)
    few, many, why = (
        found[f"PFLEGO {counts[1]}"],
        found[f"PFLEGO {longest}"],
        partial(profiled, work[f"PFLEGO {longest}"]),
    )
    faster, title = found[f"FedPer {longest}"].cpu / many.cpu, f"PFLEGO, τ = {longest}, against"
    return [
        Goal(f"{title} FedPer with {longest} steps: faster", faster, 15, at_least=True, why=why),
        Goal(f"{title} τ = {counts[1]}", many.cpu / few.cpu, 1.5, why=why),
    ]


def branches(samples: int, model: str, counts: tuple[int, ...], most: int, repeat: int) -> list[Goal]:
    """Measure a step of pFedMB over branches."""
    data = images(1, samples)
    runs = {n: started("pfedmb", model, data, batch=64, parameters={"branches": n}) for n in counts}
    epoch = runs[1].sites.site(0).client(1, {}).n_steps
    steps = {n: epoch * (2 if n > 1 else 1) for n in counts}  # on α and W, or W
    work = {str(n): participation(run) for n, run in runs.items()}
    found = best_of({name: partial(timed, one) for name, one in work.items()}, repeat)
    a_step = {n: found[str(n)] / steps[n] for n in counts}
    one = a_step[1]
    rows = [[f"{n} branch{'es' * (n > 1)}", *in_ms(each), f"{each.cpu / one.cpu:.2f} ×"] for n, each in a_step.items()]
    print(table(["pFedMB, ms a step", "clock", "processor", ""], rows), flush=True)
    why = partial(profiled, work[str(most)])
    return [Goal(f"pFedMB, {most} branches against one: a step", a_step[most].cpu / one.cpu, 1.3, why=why)]


# --- the server ---


class AtTheServer:
    """A method's server that has a model of every client, as after many rounds, without the clients."""

    def __init__(
        self, method: str, clients: int, participants: int, parameters: int, directory: Path | None = None
    ) -> None:
        self.method, self.participants = find_method(method), participants
        self.generator = torch.Generator().manual_seed(1)
        self.initial, whole = 0.02 * torch.randn(parameters, generator=self.generator), slice(0, parameters)
        n_samples, layout = torch.ones(clients, dtype=torch.long), Layout(parameters, whole, whole)
        store = Store(directory, "server", on_disk=directory is not None)
        self.server = Server(self.initial, layout, n_samples, participants, store=store)
        self.method.start(self.server)
        if method in KEPT:
            for client in range(clients):
                self.server.keep(client, {KEPT[method]: self._model()})
        if "uploaded" in self.server.state:  # FedFomo's note of whom it has a model of
            self.server.state["uploaded"].fill_(True)

    def round(self) -> tuple[Seconds, Seconds]:
        """Time the sending and the receiving, with participants drawn at random."""
        server, messages = self.server, dict[int, Message]()
        drawn = torch.randperm(server.n_clients, generator=self.generator)[: self.participants]
        server.round, server.participants, server.random = server.round + 1, sorted(drawn.tolist()), self.generator
        sending = timed(lambda: messages.update(self.method.send_all(server)))
        uploads = {client: self._upload(messages.pop(client)) for client in server.participants}
        return sending, timed(lambda: self._receive(uploads))

    def _receive(self, uploads: dict[int, Message]) -> None:
        server = self.server
        total = Aggregator(self.method.uploads, server.participants, server.n_samples, server.layout)
        for client, upload in uploads.items():
            total.put(client, upload)
        self.method.receive(server, total.total())

    def best(self, repeat: int) -> tuple[Seconds, Seconds]:
        """Time several rounds, and return the best sending and the best receiving."""
        self.round()
        sending = receiving = Seconds()
        for _ in range(repeat):
            sent, received = self.round()
            sending, receiving = sending.best(sent), receiving.best(received)
        return sending, receiving

    def _model(self) -> Tensor:
        return self.initial + 0.02 * torch.randn(len(self.initial), generator=self.generator)

    def _upload(self, message: Message) -> Message:
        """An upload for any of the methods here: each takes what it declares."""
        model, nobody = self._model(), torch.zeros(0, dtype=torch.long)
        clients, alpha = message.get("clients", nobody), message.get("alpha", model.new_empty(0))
        weights = torch.rand(1 + len(clients), generator=self.generator)
        vectors = dict.fromkeys(("w", "theta", "gradient"), model)
        return {**vectors, "g1": model[0], "alpha": alpha, "clients": clients, "weights": weights}


def servers(sizes: tuple[int, ...], parameters: int, repeat: int) -> None:
    """Measure sending and receiving over the number of clients, all of which take part."""
    rows = []
    for method in ("fedacs", "fedamp", "pgfed", "fedfomo"):
        found = [AtTheServer(method, size, size, parameters).best(repeat) for size in sizes]
        for part, seconds in zip(("sending", "receiving"), zip(*found, strict=True), strict=True):
            growth = log(seconds[-1].cpu / seconds[-2].cpu) / log(sizes[-1] / sizes[-2])
            rows.append([f"{method}, {part}", *(f"{1e3 * each.cpu:.1f}" for each in seconds), f"n^{growth:.1f}"])
    print(table(["the server, processor's ms", *(f"{size} clients" for size in sizes), "growth"], rows), flush=True)


def fedacs(clients: int, participants: int, parameters: int, on_disk: int, repeat: int) -> list[Goal]:
    """Measure FedACS's server with a large model; and, for fewer clients, with the models on disk."""
    server = AtTheServer("fedacs", clients, participants, parameters)
    mixing, similarities = server.best(repeat)
    rows = [
        [f"FedACS, {clients} clients: mixing", *in_ms(mixing)],
        [f"FedACS, {clients} clients: similarities", *in_ms(similarities)],
    ]
    with tempfile.TemporaryDirectory() as directory:
        few = AtTheServer("fedacs", on_disk, max(1, on_disk // 10), parameters, Path(directory))
        mixed, found = few.best(repeat)
        rows.append([f"FedACS, {on_disk} clients on disk: both", *in_ms(mixed + found)])
    print(table(["the server, ms", "clock", "processor"], rows), flush=True)
    what = f"FedACS, the server's round: {clients} clients, {parameters:,} parameters"
    return [Goal(what, (mixing + similarities).cpu, 3.0, "s", why=partial(profiled, server.round))]


def run(repeat: int = 3, tiny: bool = False) -> list[Goal]:
    """Print what was measured, and return the goals."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if tiny:
            rounds(2, 12, "mlp:3", repeat)
            goals = inner_steps(8, "mlp:3", (1, 2, 3), 3, repeat) + branches(8, "mlp:3", (1, 2), 2, repeat)
            servers((2, 4), 10, repeat)
            return goals + fedacs(5, 2, 10, 3, repeat)
        rounds(10, 100, "lenet", 2 * repeat)
        goals = inner_steps(100, "cnn", (1, 5, 20, 50, 100), 50, repeat)
        goals += branches(1280, "lenet", (1, 2, 5, 10, 20), 10, repeat)
        servers((25, 50, 100, 200), 100_000, repeat)
        return goals + fedacs(500, 50, CNN, 100, repeat)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    for goal in run():
        print(*goal.row())
