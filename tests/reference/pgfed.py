"""PGFed, PGFedMo and PGFed-CE as Algorithm 1 has them: loops over i and j, plain autograd."""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.problem import Problem


@dataclass
class SlowPGFed:
    """Algorithm 1, and what it came to in each round. `missing` are the (round, client) whose reply never came."""

    problem: Problem
    rounds: list[list[int]]
    mu: float
    alpha_lr: float
    lr: float
    momentum: float = 0.0
    keep_momentum: bool = False
    weight_decay: float = 0.0
    missing: Collection[tuple[int, int]] = ()
    alpha_max: float = float("inf")
    models: list[Tensor] = field(default_factory=list)  # θ_glob after each round
    matrices: list[Tensor] = field(default_factory=list)  # A after each round
    gradients: list[dict[int, Tensor]] = field(default_factory=list)  # ∇f_i of each round's participants
    own: dict[int, Tensor] = field(default_factory=dict)  # every client's last θ_i
    auxiliary: dict[int, Tensor] = field(default_factory=dict)  # every client's last g̃_i, where one is kept
    warm: set[int] = field(default_factory=set)  # who begins with the velocity of an earlier round

    def run(self) -> None:
        N, M = len(self.problem.samples), len(self.rounds[0])
        A = [[1 / M for _ in range(N)] for _ in range(N)]  # lines 1-2
        glob, velocity = self.problem.initial.clone(), {}
        before: dict[int, tuple[float, Tensor]] = {}  # g⁽¹⁾ and ∇ of the last round's participants
        for number, called in enumerate(self.rounds, 1):
            now, ends = {}, {}
            participants = [i for i in called if (number, i) not in self.missing]
            for i in participants:
                new, bar = torch.zeros_like(glob), torch.zeros_like(glob)
                for j, (_, gradient) in before.items():
                    new = new + self.mu * A[i][j] * gradient  # line 10
                    bar = bar + self.mu / len(before) * gradient  # line 11
                used = self.used(i, new) if before else new
                theta, speed = glob.clone(), velocity.get(i, torch.zeros_like(glob))
                for batch in self.problem.order(number, i):
                    slope = self.problem.slope(i, theta, batch)[1] + self.weight_decay * theta + used
                    speed = self.momentum * speed + slope
                    theta = theta - self.lr * speed
                    second = self.second(bar, theta, glob)
                    for j, (first, _) in before.items():
                        A[i][j] = min(self.alpha_max, max(0.0, A[i][j] - self.alpha_lr * (first + second)))
                value, gradient = self.problem.slope(i, theta)
                gradient = self.uploaded(number, i, gradient, glob, theta, new)
                now[i] = (self.mu * (value - float(gradient @ theta)), gradient)
                ends[i] = theta
                if self.momentum and self.keep_momentum:
                    velocity[i] = speed
                    self.warm.add(i)
            total = sum(self.problem.samples[i] for i in participants)
            glob = sum((self.problem.samples[i] / total * ends[i] for i in participants), torch.zeros_like(glob))
            before = now
            self.own |= ends
            self.models.append(glob)
            self.matrices.append(torch.tensor(A, dtype=torch.float64))
            self.gradients.append({i: gradient for i, (_, gradient) in now.items()})

    def used(self, i: int, new: Tensor) -> Tensor:
        """ClientUpdate, lines 5-6: the g̃ that the client takes."""
        return new

    def second(self, bar: Tensor, theta: Tensor, glob: Tensor) -> float:
        """Line 9: g⁽²⁾."""
        return float(bar @ theta)

    def uploaded(self, number: int, i: int, gradient: Tensor, glob: Tensor, theta: Tensor, new: Tensor) -> Tensor:
        """The ∇f_i that counts in the next round."""
        return gradient


@dataclass
class SlowPGFedMo(SlowPGFed):
    """Line 6 with a momentum β."""

    beta: float = 0.5

    def used(self, i: int, new: Tensor) -> Tensor:
        mixed = new
        if i in self.auxiliary:
            mixed = (1 - self.beta) * new + self.beta * self.auxiliary[i]
        self.auxiliary[i] = mixed
        return mixed


@dataclass
class SlowPGFedCE(SlowPGFed):
    """ḡᵀθ_glob for ḡᵀθ, and the mean gradient along the path, without g̃, for ∇f_i."""

    def second(self, bar: Tensor, theta: Tensor, glob: Tensor) -> float:
        return float(bar @ glob)

    def uploaded(self, number: int, i: int, gradient: Tensor, glob: Tensor, theta: Tensor, new: Tensor) -> Tensor:
        return (glob - theta) / self.path(len(self.problem.order(number, i)), warm=i in self.warm) - new

    def path(self, steps: int, warm: bool) -> float:
        """How far the steps lead along a constant gradient of length 1: a velocity builds up from 0, or is there
        already, at 1 / (1 − m), with a client that kept the one of its last round."""
        far, speed = 0.0, 1 / (1 - self.momentum) if warm else 0.0
        for _ in range(steps):
            speed = self.momentum * speed + 1.0
            far += self.lr * speed
        return far
