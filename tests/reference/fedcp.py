"""FedCP sample by sample and pair by pair, body, heads and policy apart (Zhang et al. 2023)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import mean

Parts = tuple[Tensor, ...]  # of the policy: weights, biases, and gain and shift of the normalisation


@dataclass
class SlowFedCP:
    """`features` are those of a client's samples under a body, `uniform` has the numbers of a round's noise, one for
    each feature of each sample of each batch; None is for a policy without noise."""

    problem: Problem
    features: Callable[[int, Tensor], Tensor]
    labels: list[list[int]]
    uniform: Callable[[int, int], Callable[[int, int], Tensor]] | None
    lam: float
    lr: float
    heads: dict[int, Parts] = field(default_factory=dict)

    def run(self, rounds: list[list[int]], body: Tensor, head: Parts, policy: Parts) -> tuple[Tensor, Parts, Parts]:
        for number, participants in enumerate(rounds, 1):
            ends = [self.work(number, i, body, head, policy) for i in participants]
            weights = [self.problem.samples[i] for i in participants]
            body = mean([end[0] for end in ends], weights)
            head, policy = (
                tuple(mean(list(alike), weights) for alike in zip(*(end[place] for end in ends), strict=True))
                for place in (1, 2)
            )
        return body, head, policy

    def work(self, number: int, i: int, body: Tensor, head: Parts, policy: Parts) -> tuple[Tensor, Parts, Parts]:
        own = self.heads.get(i, head)
        received, context = self.features(i, body), self.context(own)
        draw = self.uniform(number, i) if self.uniform else None
        trained = [body, *own, *policy]
        for chosen in self.problem.order(number, i):
            among = list(range(len(self.labels[i]))) if chosen is None else chosen.tolist()
            trained = [tensor.clone().requires_grad_() for tensor in trained]
            mine, rest = tuple(trained[1:3]), tuple(trained[3:])
            z, loss = self.features(i, trained[0])[among], torch.zeros(()).double()
            noise = torch.full_like(z, 0.5) if draw is None else draw(*z.shape)
            for k, sample in enumerate(among):
                logits = self.logits(z[k], mine, head, self.share(rest, z[k] * context, noise[k]))
                loss = loss - torch.log(torch.exp(logits[self.labels[i][sample]]) / torch.exp(logits).sum())
            loss = loss / len(among) + self.lam * self.discrepancy(z, received[among])
            slopes = torch.autograd.grad(loss, trained)
            trained = [tensor.detach() - self.lr * slope for tensor, slope in zip(trained, slopes, strict=True)]
        self.heads[i] = tuple(trained[1:3])
        between = tuple((one + other) / 2 for one, other in zip(self.heads[i], head, strict=True))
        return trained[0], between, tuple(trained[3:])

    def predict(self, i: int, z: Tensor, head: Parts, policy: Parts) -> Tensor:
        own = self.heads.get(i, head)
        half, context = torch.full_like(z[0], 0.5), self.context(own)
        return torch.stack([self.logits(row, own, head, self.share(policy, row * context, half)) for row in z])

    def context(self, own: Parts) -> Tensor:
        v = sum(row for row in own[0])
        assert isinstance(v, Tensor)
        return v / torch.sqrt((v**2).sum())

    def share(self, policy: Parts, x: Tensor, uniform: Tensor) -> Tensor:
        W, b, gain, shift = policy
        a = W @ x + b
        a = gain * (a - a.mean()) / torch.sqrt(((a - a.mean()) ** 2).mean() + 1e-5) + shift
        a = torch.where(a > 0, a, torch.zeros_like(a))
        one, other = torch.exp(a[: len(x)]) * uniform, torch.exp(a[len(x) :]) * (1 - uniform)
        return one / (one + other)

    def logits(self, z: Tensor, own: Parts, head: Parts, r: Tensor) -> Tensor:
        return own[0] @ (r * z) + own[1] + head[0] @ ((1 - r) * z) + head[1]

    def discrepancy(self, z: Tensor, other: Tensor) -> Tensor:
        total = torch.zeros(()).double()
        for j in range(len(z)):
            for k in range(len(z)):
                for width in (10, 15, 20, 50):
                    for a, b, weight in ((z[j], z[k], 1), (other[j], other[k], 1), (z[j], other[k], -2)):
                        total = total + weight * torch.exp(-((a - b) ** 2).sum() / 2 / width)
        return total / len(z) ** 2
