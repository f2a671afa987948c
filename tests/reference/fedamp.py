"""FedAMP by loops over pairs of clients: Huang et al. 2021, Algorithm 1."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import descend


@dataclass
class Round:
    """The outcome of a round: the participants' u_i, and all models before and after it."""

    u: dict[int, Tensor]
    before: list[Tensor]
    models: list[Tensor]


def fedamp(
    problem: Problem,
    rounds: list[list[int]],
    *,
    lr: float,
    lam: float,
    server_step: float,
    sigma: float,
    momentum: float = 0.0,
) -> Iterator[Round]:
    """Run the rounds with these participants. Momentum is kept from round to round."""
    models = [problem.initial.clone() for _ in problem.samples]
    speeds: dict[int, Tensor] = {}
    for number, participants in enumerate(rounds, 1):
        before, u = list(models), {}
        for i in participants:
            u[i] = torch.zeros_like(models[i])
            for weight, model in zip(attention(before, i, server_step, sigma), before, strict=True):
                u[i] = u[i] + weight * model

            def slope(w: Tensor, batch: Tensor | None, i: int = i, u: Tensor = u[i]) -> Tensor:
                return problem.slope(i, w, batch)[1] + lam / server_step * (w - u)

            models[i], speeds[i] = descend(
                slope, before[i], problem.order(number, i), lr=lr, momentum=momentum, velocity=speeds.get(i)
            )
        yield Round(u, before, list(models))


def attention(models: list[Tensor], i: int, step: float, sigma: float) -> list[float]:
    """ξ_i1 … ξ_im of the paper; where they would leave the own model less than nothing, it gets nothing."""
    weights = []
    for j in range(len(models)):
        square = sum((float(a) - float(b)) ** 2 for a, b in zip(models[i], models[j], strict=True))
        weights.append(0.0 if i == j else step * math.exp(-square / sigma) / sigma)
    total = sum(weights)
    weights = [weight / max(1.0, total) for weight in weights]
    weights[i] = max(0.0, 1 - total)
    return weights
