"""FedBABU by hand (Oh et al. 2022): the body alone is trained and averaged, under the first head."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference.sgd import descend, mean


def fedbabu(
    slope: Callable[[int, Tensor], Tensor],
    rounds: list[list[int]],
    samples: list[float],
    initial: Tensor,
    *,
    body: int,
    steps: int,
    lr: float,
    momentum: float,
) -> Tensor:
    """Run the rounds with these participants and return the global model; its first `body` entries are the body."""
    theta = initial.clone()
    for participants in rounds:
        ends = [trained(slope, i, theta, slice(0, body), steps, lr, momentum) for i in participants]
        theta = torch.cat([mean(ends, [samples[i] for i in participants])[:body], initial[body:]])
    return theta


def trained(
    slope: Callable[[int, Tensor], Tensor], i: int, theta: Tensor, part: slice, steps: int, lr: float, momentum: float
) -> Tensor:
    """Train one part of a model at client i, with a velocity that begins at zero; fine-tuning is this too."""
    return descend(lambda at, _: slope(i, at), theta, [None] * steps, lr=lr, momentum=momentum, part=part)[0]
