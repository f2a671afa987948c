"""pFedGraph with loops over pairs of clients, and the weights by bisection (Ye et al. 2023)."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import descend


def on_the_simplex(points: list[float]) -> list[float]:
    """max(0, v_j − t), where t is such that they add up to 1."""
    low, high = min(points) - 1.0, max(points)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(max(0.0, point - middle) for point in points) > 1:
            low = middle
        else:
            high = middle
    return [max(0.0, point - high) for point in points]


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other) / math.sqrt(float(one @ one) * float(other @ other))


@dataclass
class SlowPFedGraph:
    """All rounds, with the last models of those who have trained and the start of every descent."""

    problem: Problem
    alpha: float
    lam: float
    lr: float
    models: dict[int, Tensor] = field(default_factory=dict)
    begun: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def run(self, rounds: list[list[int]]) -> None:
        for number, participants in enumerate(rounds, 1):
            ends = {}
            for i in participants:
                start = self.begun[number, i] = self.mixed(i)

                def slope(at: Tensor, chosen: Tensor | None, i: int = i, mix: Tensor = start) -> Tensor:
                    gradient = self.problem.slope(i, at, chosen)[1]
                    leaf = at.clone().requires_grad_()
                    toward = -self.lam * torch.cosine_similarity(leaf, mix, dim=0)
                    return gradient + torch.autograd.grad(toward, leaf)[0]

                def plain(at: Tensor, chosen: Tensor | None, i: int = i) -> Tensor:
                    return self.problem.slope(i, at, chosen)[1]

                order = self.problem.order(number, i)
                ends[i] = descend(slope if number > 1 else plain, start, order, lr=self.lr)[0]
            self.models |= ends

    def weights(self, i: int) -> dict[int, float]:
        """a_ij of those who have trained: p_j + s_ij / 2α on the simplex."""
        total = sum(self.problem.samples[j] for j in self.models)
        points = []
        for j, model in self.models.items():
            share, s = self.problem.samples[j] / total, 0.0
            if i == j:
                s = 1.0
            elif i in self.models:
                s = cosine(self.models[i] - self.problem.initial, model - self.problem.initial)
            points.append(share + s / (2 * self.alpha))
        return dict(zip(self.models, on_the_simplex(points), strict=True))

    def mixed(self, i: int) -> Tensor:
        """The model with which a client begins."""
        if not self.models:
            return self.problem.initial
        found = torch.zeros_like(self.problem.initial)
        for j, weight in self.weights(i).items():
            found = found + weight * self.models[j]
        return found

    def mean(self) -> Tensor:
        """All models by samples."""
        total = sum(self.problem.samples[j] for j in self.models)
        found = torch.zeros_like(self.problem.initial)
        for j, model in self.models.items():
            found = found + self.problem.samples[j] / total * model
        return found
