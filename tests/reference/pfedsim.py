"""pFedSim with loops over clients and classes (Tan et al. 2023)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import descend, mean


@dataclass
class SlowPFedSim:
    """The first `body` entries are the body. `rows` are the weights of a head, one row a class."""

    problem: Problem
    body: int
    rows: Callable[[Tensor], Tensor]
    warm: int
    lr: float
    own: dict[int, Tensor] = field(default_factory=dict)  # last models since the warm rounds
    similar: dict[tuple[int, int], float] = field(default_factory=dict)
    begun: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def run(self, rounds: list[list[int]]) -> Tensor:
        """Run the rounds with these participants, and return the last global model."""
        shared = self.problem.initial
        for number, participants in enumerate(rounds, 1):
            ends = {}
            for i in participants:

                def slope(at: Tensor, chosen: Tensor | None, i: int = i) -> Tensor:
                    return self.problem.slope(i, at, chosen)[1]

                start = shared if number <= self.warm or i not in self.own else self.mixed(i)
                self.begun[number, i] = start
                ends[i] = descend(slope, start, self.problem.order(number, i), lr=self.lr)[0]
            if number <= self.warm:
                shared = mean([*ends.values()], [self.problem.samples[i] for i in participants])
                continue
            self.own |= ends
            for i in participants:
                for j in participants:
                    if i != j:
                        self.similar[i, j] = self.similarity(ends[i], ends[j])
        return shared

    def similarity(self, one: Tensor, other: Tensor) -> float:
        """The mean cosine over the classes; none if it is negative."""
        cosines = [
            float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
            for a, b in zip(self.rows(one[self.body :]), self.rows(other[self.body :]), strict=True)
        ]
        return max(0.0, sum(cosines) / len(cosines))

    def mixed(self, i: int) -> Tensor:
        """The body is a mix by −log(1 − s), the head the client's own."""
        weights, total = {}, torch.zeros_like(self.own[i][: self.body])
        for j in self.own:
            s = 0.9999 if i == j else min(0.9999, self.similar.get((i, j), 0.0))
            weights[j] = -math.log(1 - s)
        for j, weight in weights.items():
            total = total + weight / sum(weights.values()) * self.own[j][: self.body]
        return torch.cat([total, self.own[i][self.body :]])
