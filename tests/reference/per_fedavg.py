"""Per-FedAvg with autograd's own Hessian product: Fallah et al. 2020, Algorithm 1."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import mean

Order = Callable[[str, int, int], list[Tensor | None]]  # the batches of a purpose, in a round, at a client


@dataclass
class Round:
    """The outcome of a round: the participants' models and the global one."""

    ends: dict[int, Tensor]
    w: Tensor


def per_fedavg(
    problem: Problem,
    rounds: list[list[int]],
    order: Order,
    *,
    lr: float,
    inner_lr: float,
    first_order: bool = True,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Iterator[Round]:
    """Run the rounds with these participants. Momentum is kept from round to round."""
    w = problem.initial
    speeds: dict[int, Tensor] = {}
    for number, participants in enumerate(rounds, 1):
        ends = {}
        for i in participants:
            theta, speed = w, speeds.get(i, torch.zeros_like(w))
            purposes = [order(purpose, number, i) for purpose in ("inner", "batches", "curvature")]
            for d, d2, d3 in zip(*purposes, strict=True):
                adapted = theta - inner_lr * problem.slope(i, theta, d)[1]
                slope = problem.slope(i, adapted, d2)[1]
                if not first_order:
                    risk = lambda point, i=i, d3=d3: problem.risk(i, point, d3)  # noqa: E731
                    slope = slope - inner_lr * torch.autograd.functional.vhp(risk, theta, slope)[1]
                speed = momentum * speed + slope + weight_decay * theta
                theta = theta - lr * speed
            ends[i], speeds[i] = theta, speed
        w = mean(list(ends.values()), [problem.samples[i] for i in participants])
        yield Round(ends, w)
