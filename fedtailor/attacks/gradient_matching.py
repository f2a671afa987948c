"""The gradient, or the change of a model, that guessed samples would have given, and its distance from what was seen.

All of it is differentiable in the guess: its inputs, its labels and the part of the model that is not known.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cosine_similarity

from fedtailor.attacks.evidence import Evidence
from fedtailor.training.network import Loss, Network

TINY = 1e-12


@dataclass
class Guess:
    """Guessed samples: inputs, targets as probabilities of the classes, and the model's unknown part, if any."""

    x: Tensor
    y: Tensor
    unknown: Tensor | None = None


@dataclass
class Matching:
    """The match of guesses with the evidence, in the server's own network and with the loss that clients minimise."""

    network: Network
    loss: Loss
    evidence: Evidence

    def __post_init__(self) -> None:
        layout, place = self.network.layout, self.evidence.place
        self._counted: Tensor | None = None
        if layout.buffers_in(place):  # no gradient is in them
            self._counted = layout.without_buffers(torch.ones_like(self.evidence.start))[place]
        self.seen = self._without_buffers(self.evidence.seen)

    def squared(self, guess: Guess) -> Tensor:
        """The squared distance from what was seen, as a share of its squared length."""
        return (self.predicted(guess) - self.seen).square().sum() / self.seen.square().sum().clamp(min=TINY)

    def cosine(self, guess: Guess) -> Tensor:
        """The cosine distance from what was seen."""
        return 1 - cosine_similarity(self.predicted(guess), self.seen, dim=0, eps=TINY)

    def predicted(self, guess: Guess) -> Tensor:
        """Compute the upload that the guessed samples would have given."""
        theta = self._start(guess)
        with self._mode(len(guess.x)):
            found = self._path(theta, guess) if self.evidence.rates else self._gradient(theta, guess)
        return self._without_buffers(found[self.evidence.place])

    def _without_buffers(self, part: Tensor) -> Tensor:
        return part if self._counted is None else part * self._counted

    def _start(self, guess: Guess) -> Tensor:
        start, place = self.evidence.start.detach(), self.evidence.unknown
        if guess.unknown is None or place is None:
            return start.clone().requires_grad_()
        theta = torch.cat([start[: place.start], guess.unknown, start[place.stop :]])
        return theta if theta.requires_grad else theta.requires_grad_()

    def _gradient(self, theta: Tensor, guess: Guess) -> Tensor:
        value = self.loss(self.outputs(theta, guess.x), guess.y)
        (found,) = torch.autograd.grad(value, theta, create_graph=True)
        return found

    def _path(self, start: Tensor, guess: Guess) -> Tensor:
        """The mean gradient along the client's steps, all on all of the guessed samples:
        v ← m v + s (∇f(θ) + correction + λ θ),  θ ← θ − η v."""
        evidence, theta, velocity = self.evidence, start, torch.zeros_like(start)
        for rate in evidence.rates:
            g = self._gradient(theta, guess)
            if evidence.correction is not None:
                g = g + evidence.correction
            if evidence.clip is not None:
                g = g * (evidence.clip / (g.norm() + 1e-6)).clamp(max=1.0)
            if evidence.weight_decay:
                g = g + evidence.weight_decay * theta
            if evidence.scale is not None:
                g = g * evidence.scale
            if evidence.moves is not None:
                g = _only(g, evidence.moves)
            velocity = evidence.momentum * velocity + g if evidence.momentum else g
            theta = theta - rate * velocity
        return (start - theta) / evidence.length

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """The network's outputs at a vector."""
        result: Tensor = functional_call(self.network.module, self.network.tensors(theta), (x,))
        return result

    @contextmanager
    def _mode(self, n_samples: int) -> Iterator[None]:
        """The mode that the client's network was in."""
        if self.evidence.training:
            self.network.train(n_samples)
        else:
            self.network.module.eval()
        yield


def _only(vector: Tensor, part: slice) -> Tensor:
    """The vector with zeros outside of a part."""
    mask = torch.zeros_like(vector)
    mask[part] = 1
    return vector * mask
