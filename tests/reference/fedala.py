"""FedALA as its paper has it: the mixing weights by autograd through the mix (Zhang et al. 2023)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import descend, mean


@dataclass
class SlowFedALA:
    """The entries from `cut` on are the p highest layers. `sampled` has the batches by which the weights learn in a
    round, one pass."""

    problem: Problem
    cut: int
    eta: float
    threshold: float
    most_passes: int
    sampled: Callable[[int, int], list[Tensor | None]]
    lr: float
    own: dict[int, Tensor] = field(default_factory=dict)  # each client's last model
    weights: dict[int, Tensor] = field(default_factory=dict)
    passes: list[int] = field(default_factory=list)  # of each time that weights learned

    def run(self, rounds: list[list[int]]) -> Tensor:
        theta = self.problem.initial.clone()
        for number, participants in enumerate(rounds, 1):
            for i in participants:
                start = self.start(number, i, theta)

                def slope(at: Tensor, chosen: Tensor | None, i: int = i) -> Tensor:
                    return self.problem.slope(i, at, chosen)[1]

                self.own[i], _ = descend(slope, start, self.problem.order(number, i), lr=self.lr)
            theta = mean([self.own[i] for i in participants], [self.problem.samples[i] for i in participants])
        return theta

    def start(self, number: int, i: int, theta: Tensor) -> Tensor:
        local = self.own.get(i, self.problem.initial)
        if torch.equal(local[self.cut :], theta[self.cut :]):
            return theta
        learned, losses = i in self.weights, []
        weights = self.weights.get(i, torch.ones_like(theta[self.cut :]))
        while True:
            of_batches = []
            for chosen in self.sampled(number, i):
                weights = weights.detach().requires_grad_()
                loss = self.problem.risk(i, self.mix(local, theta, weights), chosen)
                (slope,) = torch.autograd.grad(loss, weights)
                weights = (weights.detach() - self.eta * slope).clip(0, 1)
                of_batches.append(loss.item())
            losses.append(sum(of_batches) / len(of_batches))
            steady = len(losses) > 10 and float(torch.tensor(losses[-10:]).std(correction=0)) < self.threshold
            if learned or steady or len(losses) == self.most_passes:
                break
        self.weights[i] = weights.detach()
        self.passes.append(len(losses))
        return self.mix(local, theta, self.weights[i])

    def mix(self, local: Tensor, theta: Tensor, weights: Tensor) -> Tensor:
        high = local[self.cut :] + (theta - local)[self.cut :] * weights
        return torch.cat([theta[: self.cut], high])
