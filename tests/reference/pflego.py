"""PFLEGO as its paper has it: the whole network in every step, by plain autograd. No step draws a batch."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

BODY = [(7, 64), (6, 7)]  # the layers of mlp:7,6 before its head, which has 6 weights and a bias for each class
Data = tuple[Tensor, Tensor]


def logits(x: Tensor, body: Tensor, head: Tensor) -> Tensor:
    """W φ(x; θ): the network from its two vectors."""
    start = 0
    for rows, columns in BODY:
        weights = body[start : start + rows * columns].view(rows, columns)
        bias = body[start + rows * columns : start + rows * columns + rows]
        x = (x @ weights.T + bias).relu()
        start += rows * columns + rows
    assert start == len(body)
    weights, bias = head[: len(head) // 7 * 6].view(-1, 6), head[len(head) // 7 * 6 :]
    return x @ weights.T + bias


def gradients(data: Data, body: Tensor, head: Tensor, classes: int | None = None) -> tuple[Tensor, Tensor]:
    """∇_θ ℓ_i and ∇_W ℓ_i by autograd through the whole network (Eq. 2), whose head has so many outputs (or all)."""
    body, head = body.clone().requires_grad_(), head.clone().requires_grad_()
    x, y = data
    loss = functional.cross_entropy(logits(x, body, head)[:, :classes], y)
    of_body, of_head = torch.autograd.grad(loss, [body, head])
    return of_body, of_head


def after_inner_steps(
    data: Data, body: Tensor, head: Tensor, steps: int, beta: float, classes: int | None = None
) -> Tensor:
    """A head after its own steps."""
    for _ in range(steps):
        head = head - beta * gradients(data, body, head, classes)[1]
    return head


@dataclass
class SlowPFLEGO:
    """Algorithm 1. `inverse` is I/r, `classes` the number of each client's outputs (None: all)."""

    data: list[Data]
    body: Tensor
    heads: list[Tensor]
    beta: float
    rho: float
    tau: int
    inverse: float
    adam: bool = False
    released_weights: bool = False
    classes: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.classes = self.classes or [None] * len(self.data)
        self.body, self.heads = self.body.clone().requires_grad_(), [head.clone() for head in self.heads]
        self.optimizer = (torch.optim.Adam if self.adam else torch.optim.SGD)([self.body], lr=self.rho)

    def round(self, participants: list[int]) -> None:
        """With nobody, it has no effect."""
        sizes = [len(y) for _, y in self.data]
        total = sum(sizes[i] for i in participants) if self.released_weights else sum(sizes)
        step = torch.zeros_like(self.body)
        for i in participants:
            self.heads[i], gradient = self.client_update(i)
            step += self.inverse * sizes[i] / total * gradient
        if participants:
            self.body.grad = step
            self.optimizer.step()  # Eq. 4

    def client_update(self, i: int) -> tuple[Tensor, Tensor]:
        """A client's new head, and the gradient that goes up."""
        body = self.body.detach()
        head = after_inner_steps(self.data[i], body, self.heads[i], self.tau - 1, self.beta, self.classes[i])
        of_body, of_head = gradients(self.data[i], body, head, self.classes[i])
        return head - self.rho * self.inverse * of_head, of_body  # Eq. 3
