"""FedDBE with plain autograd, the memory beside the model (Zhang et al. 2023)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.reference.problem import Problem
from tests.reference.sgd import descend, mean


@dataclass
class SlowFedDBE:
    """`features` are those of some of a client's samples under a model, `head` makes logits of them, `labels` are the
    classes."""

    problem: Problem
    features: Callable[[int, Tensor], Tensor]
    head: Callable[[Tensor, Tensor], Tensor]
    labels: list[Tensor]
    kappa: float
    mu: float
    lr: float
    memory: dict[int, Tensor] = field(default_factory=dict)
    means: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by round and client
    consensus: Tensor | None = None

    def run(self, rounds: list[list[int]]) -> Tensor:
        theta = self.problem.initial
        for number, participants in enumerate(rounds, 1):
            weights, ends = [self.problem.samples[i] for i in participants], []
            for i in participants:
                ends.append(self.plain(number, i, theta) if self.consensus is None else self.work(number, i, theta))
            theta = mean(ends, weights)
            if self.consensus is None:
                self.consensus = mean([self.means[number, i] for i in participants], weights)
        return theta

    def plain(self, number: int, i: int, theta: Tensor) -> Tensor:
        def slope(at: Tensor, chosen: Tensor | None) -> Tensor:
            return self.problem.slope(i, at, chosen)[1]

        theta, _ = descend(slope, theta, self.problem.order(number, i), lr=self.lr)
        self.means[number, i] = self.features(i, theta).mean(0)
        return theta

    def work(self, number: int, i: int, theta: Tensor) -> Tensor:
        """Both the model and the memory step along the gradient of the same loss."""
        assert self.consensus is not None
        memory = self.memory.get(i, torch.zeros_like(self.consensus))
        running = torch.zeros_like(memory)
        for chosen in self.problem.order(number, i):
            among = torch.arange(len(self.labels[i])) if chosen is None else chosen
            at, m = theta.clone().requires_grad_(), memory.clone().requires_grad_()
            z = self.features(i, at)[among]
            now = (1 - self.mu) * running + self.mu * z.mean(0)
            away = 0.5 * ((now - self.consensus) ** 2).sum() / len(memory)
            loss = cross_entropy(self.head(at, z + m), self.labels[i][among]) + self.kappa * away
            slopes = torch.autograd.grad(loss, (at, m))
            theta, memory = theta - self.lr * slopes[0], memory - self.lr * slopes[1]
            running = now.detach()
        self.memory[i], self.means[number, i] = memory, running
        return theta
