"""FedNTD sample by sample, the divergence written out (Lee et al. 2022)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import descend, mean


@dataclass
class SlowFedNTD:
    """`logits` are those of a client's samples under a model, `labels` their classes."""

    problem: Problem
    logits: Callable[[int, Tensor], Tensor]
    labels: list[list[int]]
    beta: float
    tau: float
    lr: float

    def run(self, rounds: list[list[int]]) -> Tensor:
        theta = self.problem.initial
        for number, participants in enumerate(rounds, 1):
            ends = []
            for i in participants:
                received = self.logits(i, theta)

                def slope(at: Tensor, chosen: Tensor | None, i: int = i, received: Tensor = received) -> Tensor:
                    at = at.detach().clone().requires_grad_()
                    kept = torch.autograd.grad(self.divergence(i, self.logits(i, at), received, chosen), at)[0]
                    return self.problem.slope(i, at, chosen)[1] + self.beta * self.tau**2 * kept

                ends.append(descend(slope, theta, self.problem.order(number, i), lr=self.lr)[0])
            theta = mean(ends, [self.problem.samples[i] for i in participants])
        return theta

    def divergence(self, i: int, present: Tensor, received: Tensor, chosen: Tensor | None) -> Tensor:
        among, total = range(len(self.labels[i])) if chosen is None else chosen.tolist(), torch.zeros(()).double()
        for k in among:
            wrong = [c for c in range(present.shape[1]) if c != self.labels[i][k]]
            q = [torch.exp(present[k, c] / self.tau) for c in wrong]
            p = [torch.exp(received[k, c] / self.tau) for c in wrong]
            for one, other in zip(p, q, strict=True):
                share = one / sum(p)
                total = total + share * torch.log(share / (other / sum(q)))
        return total / len(among)
