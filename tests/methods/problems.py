"""Problems on which a method and its slow reference are run side by side, and a method whose messages are written down.

The references are in `tests/reference`. They know a problem and nothing of fedtailor.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fedtailor as ft
from fedtailor.method import Client, Message, Method, Server, Total
from tests.helpers import Quadratic, digits, mean_output, quadratic_clients
from tests.reference.batches import batches
from tests.reference.problem import Problem

SMALL: dict[str, Any] = {"data": "digits", "clients": 6, "model": "mlp:16", "rounds": 4, "participation": 3,
                         "max_train": 40, "engine": "in-process", "seed": 1}  # fmt: skip
MOMENTUM = {"momentum": 0.9, "keep_momentum": True, "weight_decay": 0.01}
EXACT: dict[str, Any] = {
    "dtype": "float64",
    "engine": "in-process",
    "test": 0.0,
    "validation": 0.0,
    "evaluation": {"every": 0},
}
OWN: dict[str, Any] = {"model": "mlp:8", "rounds": 3, "epochs": 2, "labels": "own", "engine": "in-process",
                       "seed": 2}  # fmt: skip


def on_quadratics(method: Method, **settings: Any) -> tuple[ft.RunResult, Problem]:
    """A run on 6 quadratic clients with different sample counts, 2 of which take part in a round."""
    data, centres, curvatures = quadratic_clients(6, 4, seed=2)
    data = [(x.repeat(1 + i % 3, 1), y.repeat(1 + i % 3)) for i, (x, y) in enumerate(data)]
    module = Quadratic(4)
    module.theta.data = torch.tensor([0.5, -1.0, 0.3, 0.8])
    how = {"rounds": 7, "participation": 2, "steps": 3, "batch": "full", "lr": 0.1, "seed": 14, **EXACT, **settings}
    result = ft.run(method, data=data, model=module, loss=mean_output, **how)

    def risk(client: int, theta: Tensor, chosen: Tensor | None) -> Tensor:
        away = theta - centres[client]
        return 0.5 * away @ curvatures[client] @ away

    initial = module.theta.detach().double()
    return result, Problem(risk, lambda number, client: [None] * how["steps"], initial, [len(y) for _, y in data])


def on_a_network(method: Method, **settings: Any) -> tuple[ft.RunResult, Problem]:
    """A run of a small network with mini-batches (an incomplete one is dropped) on clients of different sizes."""
    data = [(x.double(), y) for x, y in digits([17, 9, 23, 12, 31, 14])]
    how = {"rounds": 5, "participation": 2, "epochs": 2, "batch": 5, "lr": 0.2, "seed": 29, "drop_last": True}
    how = {**how, **EXACT, **settings}
    result = ft.run(method, data=data, model="mlp:6", **how)
    samples = [result.data.client(client).train for client in range(6)]  # in the order of the partition

    def risk(client: int, theta: Tensor, chosen: Tensor | None) -> Tensor:
        x, y = samples[client] if chosen is None else (part[chosen] for part in samples[client])
        w, b, v, c = theta.split([6 * 64, 6, 10 * 6, 10])
        hidden = (x @ w.view(6, 64).T + b).relu()
        return functional.cross_entropy(hidden @ v.view(10, 6).T + c, y)

    def order(number: int, client: int) -> list[Tensor | None]:
        n, drawing = len(samples[client][1]), {name: how[name] for name in ("epochs", "batch", "drop_last")}
        return batches(n, how["seed"], number, client, **drawing)

    return result, Problem(risk, order, result.simulation.server.initial, [len(y) for _, y in samples])


BODY = 6 * 64 + 6  # numbers in the body of that network


def features(x: Tensor, theta: Tensor) -> Tensor:
    """The inputs of that network's head."""
    return (x @ theta[: BODY - 6].view(6, 64).T + theta[BODY - 6 : BODY]).relu()


on_both = pytest.mark.parametrize("run_on", [on_quadratics, on_a_network])


def own_label_clients() -> list[Any]:
    """Clients for `labels="own"`: two with the digits 0 and 1, one with 2 to 6."""
    pool = digits([400])[0]
    chosen = [torch.isin(pool[1], torch.tensor(labels)) for labels in ([0, 1], [0, 1], [2, 3, 4, 5, 6])]
    return [(pool[0][mask][:40], pool[1][mask][:40]) for mask in chosen]


@dataclass
class Log:
    """What was sent, came back and was kept, by round and client."""

    down: dict[tuple[int, int], Message] = field(default_factory=dict)
    up: dict[tuple[int, int], Message] = field(default_factory=dict)
    server: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    totals: dict[int, Total] = field(default_factory=dict)


def watched(kind: type[Method], **parameters: Any) -> tuple[Method, Log]:
    """A method, and what its runs in this process will write down: each client's own upload too, which the server does
    not see where it is averaged."""
    log = Log()

    class Watched(kind):  # type: ignore[valid-type, misc]
        def send_all(self, server: Server) -> dict[int, Message]:
            messages = dict(super().send_all(server))
            log.down |= {(server.round, client): _cloned(message) for client, message in messages.items()}
            return messages

        def train(self, client: Client, message: Message) -> Message:
            upload = super().train(client, message)
            log.up[client.round, client.id] = _cloned(upload)
            return upload

        def receive(self, server: Server, total: Total) -> None:
            log.totals[server.round] = total
            super().receive(server, total)
            log.server[server.round] = _cloned(server.state)

    return Watched(**parameters), log


def _cloned(tensors: Message) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def who(result: ft.RunResult) -> list[list[int]]:
    """The participants of each round."""
    return [record.participants for record in result.rounds]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
