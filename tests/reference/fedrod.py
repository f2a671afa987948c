"""FedRoD for a network of two dense layers, every formula written out (Chen & Chao 2022)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.sgd import mean

Velocity = tuple[Tensor, Tensor]  # of the generic model and of the personal head


@dataclass
class FedRoD:
    """The sizes of the network (inputs → tanh → outputs), and how it is trained."""

    features: int
    hidden: int
    classes: int
    bias: bool  # of the heads
    gamma: float
    steps: int
    lr: float
    momentum: float
    weight_decay: float
    keep_momentum: bool

    def run(
        self, data: list[tuple[Tensor, Tensor]], rounds: list[list[int]], theta: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the rounds with these participants. Return the generic model and every client's personal head."""
        size = self.classes * self.hidden + (self.classes if self.bias else 0)
        phis = [torch.zeros(size, dtype=theta.dtype) for _ in data]
        zeros = torch.zeros_like(theta), torch.zeros_like(phis[0])
        velocities: list[Velocity] = [zeros for _ in data]
        for participants in rounds:
            ends = []
            for i in participants:
                velocity = velocities[i] if self.keep_momentum else zeros
                end, phis[i], velocities[i] = self.trained(theta, phis[i], *data[i], velocity)
                ends.append(end)
            theta = mean(ends, [len(data[i][1]) for i in participants])
        return theta, phis

    def trained(
        self, theta: Tensor, phi: Tensor, x: Tensor, y: Tensor, velocity: Velocity
    ) -> tuple[Tensor, Tensor, Velocity]:
        """One client's steps, all with its whole data."""
        speed, own_speed = velocity
        for _ in range(self.steps):
            theta, phi = theta.detach().requires_grad_(), phi.detach().requires_grad_()
            balanced, plain = self.losses(theta, phi, x, y)
            (slope,), (own_slope,) = torch.autograd.grad(balanced, theta), torch.autograd.grad(plain, phi)
            theta, phi = theta.detach(), phi.detach()
            speed = self.momentum * speed + slope + self.weight_decay * theta
            own_speed = self.momentum * own_speed + own_slope + self.weight_decay * phi
            theta, phi = theta - self.lr * speed, phi - self.lr * own_speed
        return theta, phi, (speed, own_speed)

    def losses(self, theta: Tensor, phi: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The balanced loss of the generic model, and the plain one of both heads together."""
        first, cut = self.features * self.hidden, self.features * self.hidden + self.hidden
        counts = torch.tensor([(y == c).sum() for c in range(self.classes)]).to(x) ** self.gamma
        z = torch.tanh(x @ theta[:first].view(self.hidden, self.features).T + theta[first:cut])
        generic, own = self.head(z, theta[cut:]), self.head(z.detach(), phi)
        shares = counts * generic.exp() / (counts * generic.exp()).sum(1, keepdim=True)  # the balanced softmax
        both = (generic.detach() + own).softmax(1)
        one_each = range(len(y)), y
        return -shares[one_each].log().mean(), -both[one_each].log().mean()

    def head(self, z: Tensor, values: Tensor) -> Tensor:
        weights = self.classes * self.hidden
        logits = z @ values[:weights].view(self.classes, self.hidden).T
        return logits + values[weights:] if self.bias else logits
