"""FedRecon on several quadratics a client, by hand: Singhal et al. 2021, Algorithm 1."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.batches import stream
from tests.reference.sgd import descend

Quadratics = tuple[Tensor, Tensor]  # the centres and curvatures of a client's samples


def fedrecon(
    clients: list[Quadratics],
    rounds: list[list[int]],
    initial: Tensor,
    *,
    body: int,
    supports: list[int],
    seed: int,
    head_steps: int,
    head_lr: float,
    body_steps: int,
    body_lr: float,
    momentum: float,
    server_lr: float,
) -> Tensor:
    """Run the rounds with these participants and return the body, the first `body` entries of the vector.

    `supports` are the sizes of the clients' support parts; the other samples are the query part, or all of them where
    none is left.
    """
    g = initial[:body]
    for participants in rounds:
        change, total = torch.zeros_like(g), 0
        for i in participants:
            support, query = split(len(clients[i][0]), supports[i], seed, i)
            theta = reconstructed(clients[i], g, initial, support, head_steps, head_lr, momentum)
            theta = trained(clients[i], theta, query, slice(0, body), body_steps, body_lr, momentum)
            change, total = change + len(query) * (theta[:body] - g), total + len(query)
        g = g + server_lr * change / total
    return g


@dataclass
class BlockDescent:
    """FedRecon as PFLEGO's authors run it: the head's block, from the client's last head, then one step of the body's.

    Both are on all of a client's samples. `heads` are the clients' first ones; the server's step is plain, or Adam's.
    """

    clients: list[Quadratics]
    body: Tensor
    heads: list[Tensor]
    head_steps: int
    head_lr: float
    server_lr: float
    adam: bool

    def __post_init__(self) -> None:
        self.mean, self.square, self.steps = torch.zeros_like(self.body), torch.zeros_like(self.body), 0

    def round(self, participants: list[int]) -> None:
        total, gradient = sum(len(self.clients[i][0]) for i in participants), torch.zeros_like(self.body)
        for i in participants:
            for _ in range(self.head_steps):
                self.heads[i] = self.heads[i] - self.head_lr * self.slope(i)[len(self.body) :]
            gradient += len(self.clients[i][0]) / total * self.slope(i)[: len(self.body)]
        self.steps += 1
        if not self.adam:
            self.body = self.body - self.server_lr * gradient
            return
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        root = (self.square / (1 - 0.999**self.steps)).sqrt()
        self.body = self.body - self.server_lr * self.mean / (1 - 0.9**self.steps) / (root + 1e-8)

    def slope(self, i: int) -> Tensor:
        """The gradient of client i's mean quadratic at the present body and its present head."""
        at, (centres, curvatures) = torch.cat([self.body, self.heads[i]]), self.clients[i]
        return torch.stack([H @ (at - c) for c, H in zip(centres, curvatures, strict=True)]).mean(0)


def split(n_samples: int, support: int, seed: int, client: int) -> tuple[Tensor, Tensor]:
    """A client's support and query samples, drawn once for all rounds."""
    order = torch.randperm(n_samples, generator=stream(seed, "split", 0, client))
    return (order[:support], order[support:]) if support < n_samples else (order, order)


def reconstructed(
    of_client: Quadratics, g: Tensor, initial: Tensor, chosen: Tensor, steps: int, lr: float, momentum: float
) -> Tensor:
    """The body g with a head that is fitted to it, from the first head."""
    theta = torch.cat([g, initial[len(g) :]])
    return trained(of_client, theta, chosen, slice(len(g), len(initial)), steps, lr, momentum)


def trained(
    of_client: Quadratics, theta: Tensor, chosen: Tensor, part: slice, steps: int, lr: float, momentum: float
) -> Tensor:
    """Gradient steps on the mean of the chosen quadratics, on one part of the vector alone."""
    centres, curvatures = of_client[0][chosen], of_client[1][chosen]

    def slope(at: Tensor, _: Tensor | None) -> Tensor:
        return torch.stack([H @ (at - c) for c, H in zip(centres, curvatures, strict=True)]).mean(0)

    return descend(slope, theta, [None] * steps, lr=lr, momentum=momentum, part=part)[0]
