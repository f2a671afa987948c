"""A transport that changes replies on their way, or loses them."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import fedtailor as ft
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.runs import finish_run
from fedtailor.engines.simulation import Simulation, create
from fedtailor.experiment import make_experiment
from fedtailor.messages import Evaluate, EvaluateShared, Reply, Request
from fedtailor.messages.transport import Relay

SMALL: dict[str, Any] = {"data": "digits", "clients": 4, "max_train": 20, "model": "mlp:8", "rounds": 3}
Change = Callable[[Request, Reply], Reply | None]


class Changed(Relay):
    """A transport that changes replies, or loses them."""

    def __init__(self, simulation: Simulation, change: Change) -> None:
        super().__init__(simulation.sites)
        self.sites, self.change = simulation.sites, change
        self.asked: list[Request] = []

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        for request in self.sites.split(requests):
            self.asked.append(request)
            if (reply := self.change(request, self.sites.handle(request))) is not None:
                yield reply


def is_evaluation(request: Request) -> bool:
    return isinstance(request, Evaluate | EvaluateShared)


def without(reply: Reply, client: int) -> Reply | None:
    """A reply that lacks a client; None if that leaves nobody."""
    kept = [place for place, other in enumerate(reply.clients) if other != client]
    if not kept:
        return None
    return Reply(tuple(reply.clients[place] for place in kept), measured=[reply.measured[place] for place in kept])


def silent(client: int, rounds: Sequence[int]) -> Change:
    """Lose the client's evaluation in these rounds."""

    def change(request: Request, reply: Reply) -> Reply | None:
        return without(reply, client) if is_evaluation(request) and request.round in rounds else reply

    return change


def recorded(method: str, change: Change, out: Path, **settings: Any) -> ft.RunResult:
    """A run directory of a run over a transport that changes replies."""
    experiment = make_experiment({"method": method, "engine": "in-process", **{**SMALL, **settings}})
    simulation = create(out, prepare(experiment, Objects()))
    with warnings.catch_warnings(), closing(simulation):
        warnings.simplefilter("ignore")
        simulation.start()
        simulation.transport = Changed(simulation, change)
        finish_run(simulation, None, None)
    return ft.load(out)
