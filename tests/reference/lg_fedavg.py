"""LG-FedAvg by hand (Liang et al. 2020)."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference.sgd import descend, mean


def lg_fedavg(
    slope: Callable[[int, Tensor], Tensor],
    rounds: list[list[int]],
    samples: list[float],
    initial: Tensor,
    *,
    body: int,
    steps: int,
    lr: float,
    momentum: float,
    warm: int = 0,
) -> tuple[Tensor, list[Tensor]]:
    """Run the rounds with these participants, the first `warm` of them as FedAvg. Return the shared head, and every
    client's body: the first `body` entries of its vector."""
    start = initial
    for participants in rounds[:warm]:
        ends = [
            descend(lambda at, _, i=i: slope(i, at), start, [None] * steps, lr=lr, momentum=momentum)[0]
            for i in participants
        ]
        start = mean(ends, [samples[i] for i in participants])
    head, bodies = start[body:], [start[:body] for _ in samples]
    for participants in rounds[warm:]:
        heads = []
        for i in participants:
            theta = torch.cat([bodies[i], head])
            theta, _ = descend(lambda at, _, i=i: slope(i, at), theta, [None] * steps, lr=lr, momentum=momentum)
            bodies[i] = theta[:body]
            heads.append(theta[body:])
        head = mean(heads, [samples[i] for i in participants])
    return head, bodies
