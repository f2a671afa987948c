"""FedRep by hand: Collins et al. 2021, Algorithm 1."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference.sgd import descend, mean


def fedrep(
    slope: Callable[[int, Tensor], Tensor],
    rounds: list[list[int]],
    weights: list[float],
    initial: Tensor,
    *,
    body: int,
    head_steps: int,
    body_steps: int,
    lr: float,
    momentum: float,
    keep_momentum: bool,
    heads: list[Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Run the rounds with these participants, averaged by these weights. Return the body, the first `body` entries of
    the vector, and every client's head, which begins at the vector's or at one of its own."""
    phi, heads = initial[:body], [initial[body:] for _ in weights] if heads is None else list(heads)
    speeds: dict[int, Tensor] = {}
    for participants in rounds:
        bodies = []
        for i in participants:
            theta, speed = torch.cat([phi, heads[i]]), speeds.get(i) if keep_momentum else None
            for part, steps in ((slice(body, None), head_steps), (slice(0, body), body_steps)):
                theta, speed = descend(
                    lambda at, _, i=i: slope(i, at),
                    theta,
                    [None] * steps,
                    lr=lr,
                    momentum=momentum,
                    velocity=speed,
                    part=part,
                )
            heads[i], speeds[i] = theta[body:], speed
            bodies.append(theta[:body])
        phi = mean(bodies, [weights[i] for i in participants])
    return phi, heads


def refitted(
    slope: Callable[[int, Tensor], Tensor],
    i: int,
    theta: Tensor,
    *,
    body: int,
    head_steps: int,
    lr: float,
    momentum: float,
) -> Tensor:
    """Fit the head of a model once more, at client i."""
    batches = [None] * head_steps
    return descend(lambda at, _: slope(i, at), theta, batches, lr=lr, momentum=momentum, part=slice(body, None))[0]
