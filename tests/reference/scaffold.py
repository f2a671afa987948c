"""SCAFFOLD, with the gradients of every path kept: Karimireddy et al. 2020, Algorithm 1."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class End:
    """The outcome of all rounds: the global model, and the server's and every client's variates."""

    x: Tensor
    c: Tensor
    own: list[Tensor]


def scaffold(
    slope: Callable[[int, Tensor], Tensor],
    rounds: list[list[int]],
    initial: Tensor,
    clients: int,
    *,
    option: str,
    lr: float,
    steps: int,
    server_lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    keep_momentum: bool = False,
) -> End:
    """Run the rounds with these participants out of so many clients.

    Option II: a new variate is the mean of the very gradients of the path, each weighted by how far it has led; without
    momentum that is c_i − c + (x − y)/(K η), which is asserted here.
    """
    x, c, zero = initial, torch.zeros_like(initial), torch.zeros_like(initial)
    own, velocities = [zero for _ in range(clients)], [zero for _ in range(clients)]
    for participants in rounds:
        moved, changes = torch.zeros_like(x), torch.zeros_like(x)
        for i in participants:
            y, velocity, gradients = x, velocities[i] if keep_momentum else zero, []
            for _ in range(steps):
                gradients.append(slope(i, y) + weight_decay * y)
                velocity = momentum * velocity + gradients[-1] - own[i] + c
                y = y - lr * velocity
            velocities[i] = velocity
            if option == "I":
                new = slope(i, x)
            else:
                weights = [sum(momentum**power for power in range(steps - step)) for step in range(steps)]
                new = sum((w * g for w, g in zip(weights, gradients, strict=True)), zero) / sum(weights)
                if not momentum:
                    torch.testing.assert_close(new, own[i] - c + (x - y) / (steps * lr), rtol=0, atol=1e-12)
            moved, changes = moved + (y - x), changes + (new - own[i])
            own[i] = new
        x = x + server_lr * moved / len(participants)
        c = c + changes / clients
    return End(x, c, own)
