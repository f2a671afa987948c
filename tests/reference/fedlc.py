"""FedLC sample by sample, the calibrated softmax written out (Zhang et al. 2022)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import descend, mean


@dataclass
class SlowFedLC:
    """`logits` are those of a client's samples under a model, `labels` their classes."""

    problem: Problem
    logits: Callable[[int, Tensor], Tensor]
    labels: list[Tensor]
    tau: float
    least: float
    lr: float

    def run(self, rounds: list[list[int]]) -> Tensor:
        theta = self.problem.initial
        for number, participants in enumerate(rounds, 1):
            ends = []
            for i in participants:

                def slope(at: Tensor, chosen: Tensor | None, i: int = i) -> Tensor:
                    at = at.detach().clone().requires_grad_()
                    return torch.autograd.grad(self.loss(i, at, chosen), at)[0]

                ends.append(descend(slope, theta, self.problem.order(number, i), lr=self.lr)[0])
            theta = mean(ends, [self.problem.samples[i] for i in participants])
        return theta

    def loss(self, i: int, theta: Tensor, chosen: Tensor | None) -> Tensor:
        logits, labels, total = self.logits(i, theta), self.labels[i].tolist(), torch.zeros((), dtype=theta.dtype)
        among = range(len(labels)) if chosen is None else chosen.tolist()
        for k in among:
            shares = {}
            for c in range(logits.shape[1]):
                count = max(float(labels.count(c)), self.least)
                if count > 0:
                    shares[c] = torch.exp(logits[k, c] - self.tau / count**0.25)
            total = total - torch.log(shares[labels[k]] / sum(shares.values()))
        return total / len(among)
