"""pFedMB as its paper has it: explicit branches, an autograd leaf for α and for each tensor of each branch, loops."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from tests.reference.batches import batches

Tensors = dict[str, Tensor]  # of one layer of one branch
Branches = list[list[Tensors]]  # W[l][b]


@dataclass(frozen=True)
class Dense:
    """A fully connected layer."""

    rows: int
    columns: int
    relu: bool = True
    buffers: ClassVar[tuple[str, ...]] = ()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.rows, self.columns), "bias": (self.rows,)}

    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        return x @ tensors["weight"].T + tensors["bias"]

    def seen(self, x: Tensor, buffers: Tensors) -> Tensors:
        return buffers


@dataclass(frozen=True)
class Norm:
    """BatchNorm in training: by the batch's mean and variance. Its buffers are running means of these."""

    rows: int
    relu: bool = True
    buffers: ClassVar[tuple[str, ...]] = ("mean", "variance", "count")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        rows = (self.rows,)
        return {"weight": rows, "bias": rows, "mean": rows, "variance": rows, "count": ()}

    def __call__(self, x: Tensor, tensors: Tensors) -> Tensor:
        centred = x - x.mean(0)
        return centred / (centred.square().mean(0) + 1e-5).sqrt() * tensors["weight"] + tensors["bias"]

    def seen(self, x: Tensor, buffers: Tensors) -> Tensors:
        """The buffers after a batch."""
        mean, variance = x.mean(0), (x - x.mean(0)).square().sum(0) / (len(x) - 1)
        return {
            "mean": 0.9 * buffers["mean"] + 0.1 * mean,
            "variance": 0.9 * buffers["variance"] + 0.1 * variance,
            "count": buffers["count"] + 1,
        }


Layers = Sequence[Dense | Norm]


def unflatten(vector: Tensor, layers: Layers) -> list[Tensors]:
    """A copy of a network's vector as the tensors of each layer."""
    pieces, start = [], 0
    for layer in layers:
        piece = {}
        for name, shape in layer.shapes.items():
            size = torch.Size(shape).numel()
            piece[name] = vector[start : start + size].clone().view(shape)
            start += size
        pieces.append(piece)
    assert start == len(vector)
    return pieces


def flatten(pieces: Sequence[Tensors]) -> Tensor:
    return torch.cat([tensor.flatten() for piece in pieces for tensor in piece.values()])


def as_branches(W: Tensor, layers: Layers) -> Branches:
    """W[l][b] from one vector for each branch."""
    rows = [unflatten(vector, layers) for vector in W]
    return [[row[layer] for row in rows] for layer in range(len(layers))]


def as_vectors(W: Branches) -> Tensor:
    return torch.stack([flatten([branches[b] for branches in W]) for b in range(len(W[0]))])


def row_of(alpha: Tensor, layer: int) -> Tensor:
    """The weights of a layer's branches. One row of α stands for all layers where they share it."""
    return alpha[layer] if len(alpha) > 1 else alpha[0]


def mixed(W: Branches, alpha: Tensor) -> list[Tensors]:
    """Eq. 1: the one network that the branches come to."""
    return [
        {
            name: sum((row_of(alpha, layer)[b] * tensors[name] for b, tensors in enumerate(branches)), torch.zeros(()))
            for name in branches[0]
        }
        for layer, branches in enumerate(W)
    ]


def inputs_and_outputs(x: Tensor, W: Branches, alpha: Tensor, layers: Layers) -> tuple[list[Tensor], Tensor]:
    """What enters each layer, and the network's outputs. Eq. 2: every branch receives x, and the outputs are combined
    with the weights α."""
    entered = []
    for number, (layer, branches) in enumerate(zip(layers, W, strict=True)):
        entered.append(x)
        shares = row_of(alpha, number)
        x = sum((shares[b] * layer(x, tensors) for b, tensors in enumerate(branches)), torch.zeros(()).to(x))
        x = x.relu() if layer.relu else x
    return entered, x


def multi_branch(x: Tensor, W: Branches, alpha: Tensor, layers: Layers) -> Tensor:
    return inputs_and_outputs(x, W, alpha, layers)[1]


def by_bisection(point: Tensor) -> Tensor:
    """The nearest point of the simplex is max(v − t, 0) with the t for which its entries sum to 1."""
    low, high = float(point.min()) - 1, float(point.max())
    for _ in range(100):
        middle = (low + high) / 2
        if float((point - middle).clamp(min=0).sum()) > 1:
            low = middle
        else:
            high = middle
    return (point - (low + high) / 2).clamp(min=0)


def average(W: list[Branches], alpha: list[Tensor], n: list[int], before: Branches) -> Branches:
    """Eq. 5 by loops over layers, branches, tensors and participants."""
    after: Branches = []
    for layer in range(len(before)):
        after.append([])
        for b in range(len(before[layer])):
            tensors = {}
            for name, old in before[layer][b].items():
                above, below = torch.zeros_like(old), 0.0
                for i in range(len(W)):
                    share = float(row_of(alpha[i], layer)[b])
                    above += n[i] * share * W[i][layer][b][name]
                    below += n[i] * share
                tensors[name] = above / below if below > 0 else old
            after[layer].append(tensors)
    return after


@dataclass
class SlowPFedMB:
    """Algorithm 1 on these clients. The settings are those of the run; `branch_lr` is the rate of the branches, η_W, by
    default lr / Σ_b α_lb² for each layer."""

    layers: Layers
    data: list[tuple[Tensor, Tensor]]
    W: Branches
    alpha_lr: float
    lr: float
    seed: int
    epochs: int
    batch: int
    branch_lr: float | None = None
    per_layer: bool = True
    alpha_weighted: bool = True
    momentum: float = 0.0
    weight_decay: float = 0.0
    alpha: list[Tensor] = field(default_factory=list)  # every client's own

    def __post_init__(self) -> None:
        B, rows = len(self.W[0]), len(self.layers) if self.per_layer else 1
        self.alpha = [torch.full((rows, B), 1 / B, dtype=torch.float64) for _ in self.data]

    def round(self, number: int, participants: list[int]) -> None:
        local = []
        for i in participants:
            trained, self.alpha[i] = self.local_learning(number, i)
            local.append(trained)
        weights = [self.alpha[i] for i in participants]
        if not self.alpha_weighted:
            weights = [torch.ones_like(row) for row in weights]  # Eq. 6
        self.W = average(local, weights, [len(self.data[i][1]) for i in participants], self.W)

    def local_learning(self, number: int, client: int) -> tuple[Branches, Tensor]:
        """ClientLocalLearning of Algorithm 1."""
        (x, y), W, alpha = self.data[client], self.W, self.alpha[client]
        drawn = batches(len(y), self.seed, number, client, epochs=self.epochs, batch=self.batch)
        order = [torch.arange(len(y)) if chosen is None else chosen for chosen in drawn]
        for chosen in order:  # line 19
            leaf = alpha.clone().requires_grad_()
            loss = functional.cross_entropy(multi_branch(x[chosen], W, leaf, self.layers), y[chosen])
            (gradient,) = torch.autograd.grad(loss, [leaf])
            alpha = torch.stack([by_bisection(row) for row in alpha - self.alpha_lr * gradient])
        network = mixed(W, alpha)
        running = [
            {name: piece[name] for name in layer.buffers} for layer, piece in zip(self.layers, network, strict=True)
        ]
        velocity: dict[tuple[int, int, str], Tensor] = {}
        for chosen in order:  # line 20
            W = [[{name: t.detach().clone().requires_grad_() for name, t in ts.items()} for ts in layer] for layer in W]
            entered, outputs = inputs_and_outputs(x[chosen], W, alpha, self.layers)
            running = [
                layer.seen(inputs.detach(), buffers)
                for layer, inputs, buffers in zip(self.layers, entered, running, strict=True)
            ]
            loss = functional.cross_entropy(outputs, y[chosen])
            for layer, piece in zip(self.layers, mixed(W, alpha), strict=True):  # decay is that of the mix
                for name in set(piece) - set(layer.buffers):
                    loss = loss + 0.5 * self.weight_decay * piece[name].square().sum()
            loss.backward()
            for number_of_layer, (layer, branches) in enumerate(zip(self.layers, W, strict=True)):
                for b, tensors in enumerate(branches):
                    for name in set(tensors) - set(layer.buffers):
                        gradient = tensors[name].grad
                        assert gradient is not None
                        key = (number_of_layer, b, name)
                        velocity[key] = self.momentum * velocity.get(key, torch.zeros_like(gradient)) + gradient
                        rate = self.branch_lr
                        if rate is None:
                            rate = self.lr / sum(float(share) ** 2 for share in row_of(alpha, number_of_layer))
                        tensors[name] = tensors[name].detach() - rate * velocity[key]
        # Buffers are no weights: a client has one set of them, which all its branches get.
        W = [
            [{name: buffers.get(name, tensor) for name, tensor in tensors.items()} for tensors in branches]
            for branches, buffers in zip(W, running, strict=True)
        ]
        return [[{name: t.detach() for name, t in ts.items()} for ts in layer] for layer in W], alpha

    def personal(self, client: int) -> Tensor:
        """The server's W with the client's own α."""
        return flatten(mixed(self.W, self.alpha[client]))
