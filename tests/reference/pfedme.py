"""pFedMe by loops: T. Dinh et al. 2020, Algorithm 1."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import mean


@dataclass
class Round:
    """The outcome of a round: the participants' w_i, the global model, and every client's last θ̃_i."""

    ends: dict[int, Tensor]
    w: Tensor
    personal: dict[int, Tensor]


def pfedme(
    problem: Problem,
    rounds: list[list[int]],
    *,
    lr: float,
    lam: float,
    prox_steps: int,
    outer_lr: float,
    beta: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Iterator[Round]:
    """Run the rounds with these participants. Momentum is kept from round to round."""
    w = problem.initial
    personal: dict[int, Tensor] = {}
    speeds: dict[int, Tensor] = {}
    for number, participants in enumerate(rounds, 1):
        ends = {}
        for i in participants:
            mine, theta, speed = w.clone(), w.clone(), speeds.get(i, torch.zeros_like(w))
            for batch in problem.order(number, i):
                for _ in range(prox_steps):
                    slope = problem.slope(i, theta, batch)[1] + lam * (theta - mine) + weight_decay * theta
                    speed = momentum * speed + slope
                    theta = theta - lr * speed
                mine = mine - outer_lr * lam * (mine - theta)
            ends[i], personal[i], speeds[i] = mine, theta, speed
        w = (1 - beta) * w + beta * mean(list(ends.values()), [1.0] * len(ends))
        yield Round(ends, w, dict(personal))


def prox(centre: Tensor, curvature: Tensor, w: Tensor, lam: float) -> Tensor:
    """argmin ½(θ−c)ᵀH(θ−c) + λ/2 ‖θ−w‖²."""
    return torch.linalg.solve(curvature + lam * torch.eye(len(w), dtype=w.dtype), curvature @ centre + lam * w)
