"""Quadratic clients whose vector has a body and a head, and a few short names for what a run leaves behind."""

from typing import Any

import torch
from torch import Tensor, nn

import fedtailor as ft
from tests.helpers import mean_output, quadratic_clients

SMALL: dict[str, Any] = {"data": "digits", "clients": 5, "model": "mlp:16", "rounds": 3, "epochs": 2,
                         "participation": 0.6, "max_train": 60, "engine": "in-process", "seed": 1}  # fmt: skip


class Part(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values)


class TwoParts(nn.Module):
    """`Quadratic` with θ in two layers, body and head, that begin at numbers other than zero."""

    def __init__(self, body: int, head: int) -> None:
        super().__init__()
        first = torch.linspace(-1, 1.5, body + head)
        self.body, self.head = Part(first[:body].clone()), Part(first[body:].clone())

    def forward(self, x: Tensor) -> Tensor:
        theta = torch.cat([self.body.values, self.head.values])
        away, size = theta - x[:, : len(theta)], len(theta)
        return 0.5 * torch.einsum("ni,nij,nj->n", away, x[:, size:].view(-1, size, size), away)


def normed() -> nn.Module:
    """A network for digits with buffers in its body."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def first(body: int, head: int) -> Tensor:
    """The vector that `TwoParts` begins with."""
    return torch.linspace(-1, 1.5, body + head).double()


def unequal_clients(clients: int, size: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor, list[float]]:
    """Quadratic clients of which one has three times the samples; also c_i, H_i and the numbers of samples."""
    data, centres, curvatures = quadratic_clients(clients, size)
    data[1] = (data[1][0].repeat(3, 1), data[1][1].repeat(3))
    return data, centres, curvatures, [3.0 if client == 1 else 1.0 for client in range(clients)]


def run_parts(method: str, data: list[tuple[Tensor, Tensor]], body: int, head: int, **settings: Any) -> ft.RunResult:
    """A run on quadratic clients in double precision with full batches."""
    defaults = {"batch": "full", "lr": 0.1, "dtype": "float64", "test": 0.0, "validation": 0.0}
    defaults |= {"evaluation": {"every": 0}}  # there are no test samples
    return ft.run(
        method, data=data, model=TwoParts(body, head), loss=mean_output, engine="in-process", **{**defaults, **settings}
    )


class Steps:
    """Gradient steps by hand on f(θ) = ½(θ−c)ᵀH(θ−c), on the entries `part` alone."""

    def __init__(self, lr: float = 0.1, momentum: float = 0.0) -> None:
        self.lr, self.momentum = lr, momentum

    def __call__(
        self, theta: Tensor, curvature: Tensor, centre: Tensor, part: slice, count: int, velocity: Tensor | None = None
    ) -> Tensor:
        theta = theta.clone()
        velocity = torch.zeros_like(theta) if velocity is None else velocity
        for _ in range(count):
            gradient = curvature @ (theta - centre)
            velocity[part] = self.momentum * velocity[part] + gradient[part]
            theta[part] = theta[part] - self.lr * velocity[part]
        return theta


def close(one: Tensor, other: Tensor, atol: float = 1e-9) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def server(result: ft.RunResult, name: str = "theta") -> Tensor:
    return result.server_state[name]


def state(result: ft.RunResult, client: int) -> dict[str, Tensor]:
    return result.client_state(client)


def personal(result: ft.RunResult, client: int) -> Tensor:
    return result.personal_vector(client)


def absent(result: ft.RunResult) -> list[int]:
    """Who never took part."""
    called = {client for record in result.rounds for client in record.participants}
    return [client for client in range(result.data.n_clients) if client not in called]
