"""FedACS as its paper has it: loops over i and j, plain autograd."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.problem import Problem


def cosine(one: Tensor, other: Tensor) -> float:
    """s_ij of two vectors: the same bits for equal vectors and both ways round, and exactly 1 with itself."""
    if torch.equal(one, other):
        return 1.0
    return float((one * other).sum()) / float((one * one).sum().sqrt() * (other * other).sum().sqrt())


def similarities(models: Sequence[Tensor]) -> list[list[float]]:
    """S, each pair once."""
    S = [[1.0] * len(models) for _ in models]
    for i in range(len(models)):
        for j in range(i):
            S[i][j] = S[j][i] = cosine(models[i], models[j])
    return S


def p_quantile(S: list[list[float]], p: float) -> float:
    """The p-quantile of all entries: linear between the two nearest of the sorted ones."""
    entries = sorted(entry for row in S for entry in row)
    place = p * (len(entries) - 1)
    low = int(place)
    high = min(low + 1, len(entries) - 1)
    return entries[low] + (place - low) * (entries[high] - entries[low])


def mix(models: Sequence[Tensor], S: list[list[float]], i: int, p: float, counted: set[int] | None = None) -> Tensor:
    """Eq. 4; negative similarities count as none, and where nothing is above δ, the own model is kept. `counted` are
    the clients whose models count (None: all)."""
    counted = set(range(len(models))) if counted is None else counted
    if not counted:
        return models[i]
    delta = p_quantile([[S[j][k] for k in counted] for j in counted], p)
    total, found = 0.0, torch.zeros_like(models[i])
    for j, model in enumerate(models):
        if j in counted and S[i][j] > delta and S[i][j] > 0:
            total += S[i][j]
            found = found + S[i][j] * model
    return found / total if total else models[i]


@dataclass
class SlowFedACS:
    """Algorithm 1, and what it came to in each round."""

    problem: Problem
    rounds: list[list[int]]
    quantile: float
    lr: float
    server_step: float = 1.0
    trained_only: bool = False
    momentum: float = 0.0  # kept from round to round
    models: list[Tensor] = field(default_factory=list)  # every client's w_i in the end
    matrices: list[Tensor] = field(default_factory=list)  # S after each round
    thresholds: list[float] = field(default_factory=list)  # δ after each round
    started: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # u_i by round and client

    def run(self) -> None:
        self.models = [self.problem.initial.clone() for _ in self.problem.samples]
        velocity: dict[int, Tensor] = {}
        S = similarities(self.models)
        counted = set[int]() if self.trained_only else set(range(len(self.models)))
        for number, participants in enumerate(self.rounds, 1):
            ends = {}
            for i in participants:
                away = self.models[i] - mix(self.models, S, i, self.quantile, counted)
                u = self.models[i] - self.server_step * away  # Eq. 3
                w, speed = u.clone(), velocity.get(i, torch.zeros_like(u))
                for batch in self.problem.order(number, i):  # Eq. 5
                    speed = self.momentum * speed + self.problem.slope(i, w, batch)[1]
                    w = w - self.lr * speed
                self.started[number, i], ends[i], velocity[i] = u, w, speed
            for i, w in ends.items():
                self.models[i] = w
                counted.add(i)
            S = similarities(self.models)
            self.matrices.append(torch.tensor(S, dtype=torch.float64))
            self.thresholds.append(p_quantile([[S[i][j] for j in counted] for i in counted], self.quantile))
