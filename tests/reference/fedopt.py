"""FedAvgM, FedAdagrad, FedYogi and FedAdam, number by number: FedAvg's clients, and the server's steps as the papers
write them (Hsu et al. 2019; Reddi et al. 2021, Algorithm 2)."""

from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor

from tests.reference.fedavg import SlowFedAvg

BETA1, BETA2, TAU = 0.9, 0.99, 0.001


@dataclass
class SlowFedOpt(SlowFedAvg):
    """`kind` is the server's optimiser, `rate` its η."""

    kind: str = "sgd"
    rate: float = 1.0
    m: dict[int, float] = field(default_factory=dict)  # of each number
    v: dict[int, float] = field(default_factory=dict)

    def round(self, number: int, participants: list[int]) -> None:
        x = self.glob
        super().round(number, participants)
        self.glob = self.moved(x, self.glob)

    def moved(self, x: Tensor, mean: Tensor) -> Tensor:
        """x after a step towards the mean."""
        pairs = zip(x.tolist(), (mean - x).tolist(), strict=True)
        moved = [number + self.rate * self.step(i, change) for i, (number, change) in enumerate(pairs)]
        return torch.tensor(moved, dtype=x.dtype)

    def step(self, i: int, change: float) -> float:
        """The step of the i-th number, at a rate of 1."""
        if self.kind == "sgd":
            return change
        if self.kind in ("momentum", "nesterov"):
            self.m[i] = BETA1 * self.m.get(i, 0.0) + change
            return self.m[i] if self.kind == "momentum" else change + BETA1 * self.m[i]
        v, square = self.v.get(i, TAU * TAU), change * change
        if self.kind == "adagrad":
            self.m[i], self.v[i] = change, v + square
        else:
            self.m[i] = BETA1 * self.m.get(i, 0.0) + (1 - BETA1) * change
            if self.kind == "adam":
                self.v[i] = BETA2 * v + (1 - BETA2) * square
            else:
                sign = (v > square) - (v < square)
                self.v[i] = v - (1 - BETA2) * square * sign
        return self.m[i] / (sqrt(self.v[i]) + TAU)
