"""FedFomo, one model after the other (Zhang et al. 2021)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import descend

Risk = Callable[[int, Tensor], float]


@dataclass
class Round:
    """The outcome of a round."""

    P: Tensor  # the affinities at the server
    weights: dict[int, list[float]] = field(default_factory=dict)  # of a participant's own model, then the others'
    start: dict[int, Tensor] = field(default_factory=dict)  # where each client last began
    last: dict[int, Tensor] = field(default_factory=dict)  # each client's last model


def fedfomo(
    problem: Problem,
    rounds: list[list[int]],
    sent: Callable[[int, int], list[int]],
    validation_risk: Risk,
    *,
    lr: float,
    momentum: float = 0.0,
) -> Iterator[Round]:
    """Run the rounds with these participants, where `sent` says whose models came in a round to a client. Momentum is
    kept from round to round."""
    P = torch.eye(len(problem.samples), dtype=torch.float64)
    start: dict[int, Tensor] = {}
    last: dict[int, Tensor] = {}
    speeds: dict[int, Tensor] = {}
    for number, participants in enumerate(rounds, 1):
        weights, uploaded = {}, dict(last)
        for i in participants:
            others = sent(number, i)
            theta = start.get(i, problem.initial)
            candidates = [last.get(i, problem.initial), *(uploaded[j] for j in others)]
            weights[i] = weigh(lambda point, i=i: validation_risk(i, point), theta, candidates)
            start[i] = mixed(theta, candidates, weights[i])
            last[i], speeds[i] = descend(
                lambda at, batch, i=i: problem.slope(i, at, batch)[1],
                start[i],
                problem.order(number, i),
                lr=lr,
                momentum=momentum,
                velocity=speeds.get(i),
            )
            for j, weight in zip([i, *others], weights[i], strict=True):
                P[i, j] += weight
        yield Round(P.clone(), weights, dict(start), dict(last))


def weigh(risk: Callable[[Tensor], float], theta: Tensor, candidates: list[Tensor]) -> list[float]:
    """w_n = (F(θ) − F(θ_n)) / ‖θ_n − θ‖, one after the other."""
    weights = []
    for other in candidates:
        distance = float(((other - theta) ** 2).sum()) ** 0.5
        weights.append((risk(theta) - risk(other)) / distance if distance else 0.0)
    return weights


def mixed(theta: Tensor, candidates: list[Tensor], weights: list[float]) -> Tensor:
    """θ + Σ_n w̄_n (θ_n − θ), with w̄ the positive weights divided by their sum."""
    total = sum(max(weight, 0.0) for weight in weights)
    end = theta
    for other, weight in zip(candidates, weights, strict=True):
        if weight > 0:
            end = end + weight / total * (other - theta)
    return end
