"""GPFL sample by sample, body, head, valve and embeddings apart (Zhang et al. 2023)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import mean

Half = list[Tensor]  # of the valve, γ or β: weights, biases, and gain and shift of the normalisation


@dataclass
class SlowGPFL:
    """`features` are those of a client's samples under a body. What is trained together is a list: body, weights and
    biases of the head, embeddings, γ and β."""

    problem: Problem
    features: Callable[[int, Tensor], Tensor]
    labels: list[list[int]]
    lam: float
    mu: float
    own_embeddings: bool
    lr: float
    heads: dict[int, list[Tensor]] = field(default_factory=dict)
    embeddings: dict[int, Tensor] = field(default_factory=dict)

    def run(self, rounds: list[list[int]], body: Tensor, head: list[Tensor], guide: list[Tensor]) -> list[Tensor]:
        """Return the shared body, embeddings and valve."""
        shared = [body, *guide]
        for number, participants in enumerate(rounds, 1):
            ends = [self.work(number, i, shared, head) for i in participants]
            weights = [self.problem.samples[i] for i in participants]
            shared = [mean(list(alike), weights) for alike in zip(*ends, strict=True)]
        return shared

    def work(self, number: int, i: int, shared: list[Tensor], head: list[Tensor]) -> list[Tensor]:
        received = shared[1]
        generic, personal = self.conditions(i, received)
        trained = [shared[0], *self.heads.get(i, head), *shared[1:]]
        for chosen in self.problem.order(number, i):
            among = list(range(len(self.labels[i]))) if chosen is None else chosen.tolist()
            trained = [tensor.clone().requires_grad_() for tensor in trained]
            body, W, b, E, *valve = trained
            z, loss = self.features(i, body), torch.zeros(()).double()
            for k in among:
                y = self.labels[i][k]
                logits, led = W @ self.valve(z[k], personal, valve) + b, self.valve(z[k], generic, valve)
                cosines = 0 * E.sum(1)
                if led.any():  # features that are all 0 have no direction
                    cosines = torch.stack([(led @ e) / (led @ led).sqrt() / (e @ e).sqrt() for e in E])
                for scores in (logits, cosines):
                    loss = loss - torch.log(torch.exp(scores[y]) / torch.exp(scores).sum())
                loss = loss + self.lam * ((led - received[y]) ** 2).sum().sqrt()
            slopes = torch.autograd.grad(loss / len(among), trained)
            decayed = [0.0] * 3 + [self.mu] * (len(trained) - 3)
            trained = [
                tensor.detach() - self.lr * (slope + decay * tensor.detach())
                for tensor, slope, decay in zip(trained, slopes, decayed, strict=True)
            ]
        self.heads[i], self.embeddings[i] = trained[1:3], trained[3]
        return [trained[0], *trained[3:]]

    def predict(self, i: int, z: Tensor, head: list[Tensor], shared: list[Tensor]) -> Tensor:
        W, b = self.heads.get(i, head)
        _, personal = self.conditions(i, shared[1])
        return torch.stack([W @ self.valve(row, personal, shared[2:]) + b for row in z])

    def conditions(self, i: int, received: Tensor) -> tuple[Tensor, Tensor]:
        E = self.embeddings.get(i, 0 * received) if self.own_embeddings else received
        personal = torch.zeros_like(E[0])
        for y in self.labels[i]:
            personal = personal + E[y] / len(self.labels[i])
        return sum(E[1:], E[0]) / len(E), personal

    def valve(self, z: Tensor, c: Tensor, halves: list[Tensor]) -> Tensor:
        gamma, beta = self.conditional(c, halves[:4]), self.conditional(c, halves[4:])
        out = z + gamma * z + beta
        return torch.where(out > 0, out, torch.zeros_like(out))

    def conditional(self, c: Tensor, half: Half) -> Tensor:
        W, b, gain, shift = half
        a = W @ c + b
        a = torch.where(a > 0, a, torch.zeros_like(a))
        return gain * (a - a.mean()) / torch.sqrt(((a - a.mean()) ** 2).mean() + 1e-5) + shift
