"""APFL by loops and autograd: Deng et al. 2020, Algorithm 1."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import mean


@dataclass
class Round:
    """The outcome of a round: the global model, and every client's own model and share."""

    w: Tensor
    v: list[Tensor]
    alpha: list[float]


def apfl(
    problem: Problem,
    rounds: list[list[int]],
    *,
    lr: float,
    alpha: float,
    adaptive: bool,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Iterator[Round]:
    """Run the rounds with these participants. Momentum is kept from round to round."""
    clients, zero = range(len(problem.samples)), torch.zeros_like(problem.initial)
    w, v, shares = problem.initial, [problem.initial for _ in clients], [alpha for _ in clients]
    speeds = {(i, which): zero for i in clients for which in "wv"}
    for number, participants in enumerate(rounds, 1):
        ends = []
        for i in participants:
            mine = w
            for step, batch in enumerate(problem.order(number, i)):
                by_v, by_alpha = slopes(problem, i, v[i], mine, shares[i], batch)
                by_w = problem.slope(i, mine, batch)[1]
                speeds[i, "v"] = momentum * speeds[i, "v"] + by_v + weight_decay * v[i]
                speeds[i, "w"] = momentum * speeds[i, "w"] + by_w + weight_decay * mine
                v[i], mine = v[i] - lr * speeds[i, "v"], mine - lr * speeds[i, "w"]
                if adaptive and step == 0:
                    shares[i] = min(1.0, max(0.0, shares[i] - lr * by_alpha))
            ends.append(mine)
        w = mean(ends, [problem.samples[i] for i in participants])
        yield Round(w, list(v), list(shares))


def slopes(problem: Problem, i: int, v: Tensor, w: Tensor, alpha: float, batch: Tensor | None) -> tuple[Tensor, float]:
    """∂/∂v and ∂/∂α of f(αv + (1−α)w), by autograd."""
    leaf, share = v.clone().requires_grad_(), torch.tensor(alpha, dtype=v.dtype, requires_grad=True)
    value = problem.risk(i, share * leaf + (1 - share) * w, batch)
    by_v, by_alpha = torch.autograd.grad(value, [leaf, share])
    return by_v, float(by_alpha)
