"""FedPAC with loops over samples, classes and clients, and a search through all supports for α (Xu et al. 2023)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import descend, mean

Order = Callable[[int, int], list[Tensor | None]]
Rows = dict[int, list[Tensor]]


@dataclass
class SlowFedPAC:
    """The first `body` entries are the body. `features` are those of a client's samples under a model, `labels` their
    classes."""

    problem: Problem
    body: int
    features: Callable[[int, Tensor], Tensor]
    labels: list[Tensor]
    lam: float
    head_order: Order
    head_lr: float
    lr: float
    own: dict[int, Tensor] = field(default_factory=dict)  # last models
    heads: dict[int, Tensor] = field(default_factory=dict)  # after mixing
    prototypes: dict[int, Tensor] = field(default_factory=dict)  # by class
    alpha: dict[int, dict[int, float]] = field(default_factory=dict)  # of each client's last mix
    begun: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # heads, by round and client

    def run(self, rounds: list[list[int]]) -> Tensor:
        shared, first = self.problem.initial[: self.body], self.problem.initial[self.body :]
        for number, participants in enumerate(rounds, 1):
            h, v, found = {}, {}, dict[int, list[tuple[int, Tensor]]]()
            for i in participants:
                self.begun[number, i] = self.heads.get(i, first)
                theta = torch.cat([shared, self.begun[number, i]])
                h[i], v[i] = self.statistics(i, theta)
                self.own[i] = self.trained(number, i, theta)
                for c, rows in self.by_class(i, self.own[i]).items():
                    found.setdefault(c, []).append((len(rows), sum(rows[1:], rows[0]) / len(rows)))
            for c, each in found.items():
                self.prototypes[c] = mean([p for _, p in each], [float(n) for n, _ in each])
            shared = mean([self.own[i][: self.body] for i in participants], [len(self.labels[i]) for i in participants])
            trained = {i: self.own[i][self.body :] for i in participants}
            for i in participants:
                self.alpha[i] = self.weights(i, participants, h, v)
                self.heads[i] = mean([trained[j] for j in participants], [self.alpha[i][j] for j in participants])
        return shared

    def by_class(self, i: int, theta: Tensor) -> Rows:
        rows: Rows = {}
        for z, y in zip(self.features(i, theta), self.labels[i].tolist(), strict=True):
            rows.setdefault(y, []).append(z)
        return rows

    def statistics(self, i: int, theta: Tensor) -> tuple[Tensor, float]:
        """The mean of e_y ⊗ z over the samples, and the variance of that mean."""
        each = []
        for z, y in zip(self.features(i, theta), self.labels[i].tolist(), strict=True):
            each.append(torch.zeros(10, len(z), dtype=z.dtype))
            each[-1][y] = z
        h = sum(each[1:], each[0]) / len(each)
        return h, sum(float(((one - h) ** 2).sum()) for one in each) / len(each) / len(each)

    def trained(self, number: int, i: int, theta: Tensor) -> Tensor:
        targets = {c: sum(rows[1:], rows[0]) / len(rows) for c, rows in self.by_class(i, theta).items()}
        targets |= self.prototypes

        def plain(at: Tensor, chosen: Tensor | None) -> Tensor:
            return self.problem.slope(i, at, chosen)[1]

        def aligned(at: Tensor, chosen: Tensor | None) -> Tensor:
            at = at.detach().clone().requires_grad_()
            z, labels, total = self.features(i, at), self.labels[i].tolist(), 0.0 * at.sum()
            among = range(len(labels)) if chosen is None else chosen.tolist()
            for k in among:
                total = total + ((z[k] - targets[labels[k]]) ** 2).mean()
            return plain(at, chosen) + self.lam * torch.autograd.grad(total / len(among), at)[0]

        head, body = slice(self.body, None), slice(0, self.body)
        theta, _ = descend(plain, theta, self.head_order(number, i), lr=self.head_lr, part=head)
        slope = aligned if self.prototypes else plain
        return descend(slope, theta, self.problem.order(number, i), lr=self.lr, part=body)[0]

    def weights(self, i: int, clients: list[int], h: dict[int, Tensor], v: dict[int, float]) -> dict[int, float]:
        P = np.array([[float(((h[i] - h[j]) * (h[i] - h[k])).sum()) for k in clients] for j in clients])
        P += np.diag([v[j] for j in clients])
        return dict(zip(clients, smallest(P).tolist(), strict=True))


def smallest(P: np.ndarray) -> np.ndarray:
    """The α of the simplex with the smallest αᵀPα: for every support, the stationary point, if it is in the simplex."""
    found = []
    for size in range(1, len(P) + 1):
        for support in map(list, combinations(range(len(P)), size)):
            system = np.ones((size + 1, size + 1))
            system[:size, :size], system[size, size] = P[np.ix_(support, support)], 0.0
            solution, *_ = np.linalg.lstsq(system, np.eye(size + 1)[size], rcond=None)
            alpha = np.zeros(len(P))
            alpha[support] = solution[:size]
            if (alpha > -1e-9).all() and abs(alpha.sum() - 1) < 1e-9:
                found.append(alpha)
    return min(found, key=lambda alpha: float(alpha @ P @ alpha))
