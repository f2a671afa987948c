"""FedProto with loops over samples and classes (Tan et al. 2022)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import descend


@dataclass
class SlowFedProto:
    """`features` are those of a client's samples under a model, `labels` their classes."""

    problem: Problem
    features: Callable[[int, Tensor], Tensor]
    labels: list[Tensor]
    lam: float
    by_samples: bool
    lr: float
    own: dict[int, Tensor] = field(default_factory=dict)
    prototypes: dict[int, Tensor] = field(default_factory=dict)  # by class

    def run(self, rounds: list[list[int]]) -> None:
        for number, participants in enumerate(rounds, 1):
            found: dict[int, list[tuple[float, Tensor]]] = {}
            for i in participants:

                def slope(at: Tensor, chosen: Tensor | None, i: int = i) -> Tensor:
                    return self.problem.slope(i, at, chosen)[1] + self.lam * self.pull(i, at, chosen)

                start = self.own.get(i, self.problem.initial)
                self.own[i], _ = descend(slope, start, self.problem.order(number, i), lr=self.lr)
                for c, rows in self.by_class(i, self.own[i]).items():
                    weight = len(rows) if self.by_samples else 1
                    found.setdefault(c, []).append((float(weight), sum(rows[1:], rows[0]) / len(rows)))
            for c, each in found.items():
                self.prototypes[c] = sum(w * p for w, p in each) / sum(w for w, _ in each)  # type: ignore[assignment]

    def by_class(self, i: int, theta: Tensor) -> dict[int, list[Tensor]]:
        rows: dict[int, list[Tensor]] = {}
        for z, y in zip(self.features(i, theta), self.labels[i].tolist(), strict=True):
            rows.setdefault(y, []).append(z)
        return rows

    def pull(self, i: int, theta: Tensor, chosen: Tensor | None) -> Tensor:
        """The gradient of the mean squared distance to the prototypes; samples without one count as there."""
        theta = theta.detach().clone().requires_grad_()
        z, labels = self.features(i, theta), self.labels[i].tolist()
        among = range(len(labels)) if chosen is None else chosen.tolist()
        total = 0.0 * theta.sum()
        for k in among:
            if labels[k] in self.prototypes:
                total = total + ((z[k] - self.prototypes[labels[k]]) ** 2).mean()
        return torch.autograd.grad(total / len(among), theta)[0]

    def distances(self, z: Tensor) -> dict[int, float]:
        """The squared distance of a sample's features to each prototype that there is."""
        return {c: float(((z - p) ** 2).sum()) for c, p in self.prototypes.items()}
