"""FedDyn with its objective written out: Acar et al. 2021, Algorithm 1."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.sgd import mean


@dataclass
class End:
    """The outcome of all rounds: the global model w, the server's h, and every client's last local gradient."""

    w: Tensor
    h: Tensor
    gradients: list[Tensor]


def feddyn(
    risk: Callable[[int, Tensor], Tensor],
    rounds: list[list[int]],
    initial: Tensor,
    clients: int,
    *,
    alpha: float,
    lr: float,
    steps: int,
) -> End:
    """Run the rounds with these participants out of so many clients."""
    w, h = initial, torch.zeros_like(initial)
    gradients = [torch.zeros_like(initial) for _ in range(clients)]
    for participants in rounds:
        ends = []
        for i in participants:
            theta = w.clone()
            for _ in range(steps):
                theta.requires_grad_()
                objective = risk(i, theta) - gradients[i] @ theta + alpha / 2 * ((theta - w) ** 2).sum()
                theta = theta.detach() - lr * torch.autograd.grad(objective, theta)[0]
            gradients[i] = gradients[i] - alpha * (theta - w)
            ends.append(theta)
        for theta in ends:
            h = h - alpha / clients * (theta - w)
        w = mean(ends, [1.0] * len(ends)) - h / alpha
    return End(w, h, gradients)
