"""FedAS sample by sample, on plain autograd (Yang et al. 2024)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import descend, mean

Order = Callable[[int, int], list[Tensor | None]]


@dataclass
class SlowFedAS:
    """The first `body` entries are the body. `features` are those of a client's samples under a model, `labels` their
    classes."""

    problem: Problem
    body: int
    features: Callable[[int, Tensor], Tensor]
    labels: list[Tensor]
    alignment: Order  # the batches of the alignment
    align_lr: float
    lr: float
    fisher: Order | None = None  # batches whose squared gradients are added up, as released; None: single samples
    own: dict[int, Tensor] = field(default_factory=dict)
    traces: dict[tuple[int, int], float] = field(default_factory=dict)  # by round and client
    begun: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # where the joint training began

    def run(self, rounds: list[list[int]]) -> Tensor:
        shared = self.problem.initial[: self.body]
        for number, participants in enumerate(rounds, 1):
            for i in participants:
                theta = torch.cat([shared, self.own.get(i, self.problem.initial)[self.body :]])
                if i in self.own:
                    theta = self.aligned(number, i, theta)
                self.begun[number, i] = theta

                def slope(at: Tensor, chosen: Tensor | None, i: int = i) -> Tensor:
                    return self.problem.slope(i, at, chosen)[1]

                self.own[i], _ = descend(slope, theta, self.problem.order(number, i), lr=self.lr)
                self.traces[number, i] = self.trace(number, i)
            weights = [self.traces[number, i] for i in participants]
            shared = mean([self.own[i][: self.body] for i in participants], weights)
        return shared

    def aligned(self, number: int, i: int, theta: Tensor) -> Tensor:
        old, labels = self.features(i, self.own[i]), self.labels[i]
        centres = {int(c): old[labels == c].mean(0) for c in labels.unique()}

        def slope(at: Tensor, chosen: Tensor | None) -> Tensor:
            at = at.detach().clone().requires_grad_()
            among = torch.arange(len(labels)) if chosen is None else chosen
            z, y = self.features(i, at)[among], labels[among]
            loss = sum(
                torch.nn.functional.mse_loss(z[y == c], centres[int(c)].expand_as(z[y == c])) for c in y.unique()
            )
            assert isinstance(loss, Tensor)
            return torch.autograd.grad(loss, at)[0]

        body = slice(0, self.body)
        return descend(slope, theta, self.alignment(number, i), lr=self.align_lr, part=body)[0]

    def trace(self, number: int, i: int) -> float:
        """The mean of the samples' squared gradients, or the sum of batches'."""
        if self.fisher is not None:
            slopes = [self.problem.slope(i, self.own[i], chosen)[1] for chosen in self.fisher(number, i)]
            return sum(float(slope @ slope) for slope in slopes)
        n = len(self.labels[i])
        slopes = [self.problem.slope(i, self.own[i], torch.tensor([k]))[1] for k in range(n)]
        return sum(float(slope @ slope) for slope in slopes) / n
