"""FedEM with loops over samples and components (Marfoq et al. 2021)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import descend, mean


@dataclass
class SlowFedEM:
    """`loss` is that of one sample of a client under a model. `theta` are the components."""

    problem: Problem
    loss: Callable[[int, int, Tensor], Tensor]
    theta: list[Tensor]
    lr: float
    pi: dict[int, list[float]] = field(default_factory=dict)

    def run(self, rounds: list[list[int]]) -> None:
        for number, participants in enumerate(rounds, 1):
            found = [self.work(number, i) for i in participants]
            weights = [self.problem.samples[i] for i in participants]
            self.theta = [mean([own[m] for own in found], weights) for m in range(len(self.theta))]

    def work(self, number: int, i: int) -> list[Tensor]:
        q = self.responsibilities(i, self.pi.get(i, [1 / len(self.theta)] * len(self.theta)))
        self.pi[i] = [sum(row[m] for row in q) / len(q) for m in range(len(self.theta))]
        ends = []
        for m, theta in enumerate(self.theta):

            def slope(at: Tensor, chosen: Tensor | None, m: int = m) -> Tensor:
                at = at.detach().clone().requires_grad_()
                among = range(len(q)) if chosen is None else chosen.tolist()
                weighed = sum(q[k][m] * self.loss(i, k, at) for k in among) / len(among)
                return torch.autograd.grad(weighed, at)[0]  # type: ignore[arg-type]

            ends.append(descend(slope, theta, self.problem.order(number, i), lr=self.lr)[0])
        return ends

    def responsibilities(self, i: int, pi: list[float]) -> list[list[float]]:
        rows = []
        for k in range(self.problem.samples[i]):
            parts = [p * math.exp(-float(self.loss(i, k, theta))) for p, theta in zip(pi, self.theta, strict=True)]
            rows.append([part / sum(parts) for part in parts])
        return rows
