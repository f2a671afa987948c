"""The client's side: all that a method may touch there.

Its private state, its data, the network and its random streams, with the local-training helpers that make most
methods a few lines.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from fedtailor.local.descent import (
    Batch,
    Correction,
    Descent,
    Objective,
    batch_gradient,
    batches,
    descend,
    frozen_features,
    hessian_product,
    mean_gradient,
    plain_loss,
    step_count,
    take,
)
from fedtailor.local.metrics import outputs
from fedtailor.local.network import Loss, Network
from fedtailor.local.streams import seed_network, torch_seed, torch_stream

Message = Mapping[str, Tensor]
State = dict[str, Tensor]
Samples = tuple[Tensor, Tensor]


class Settings(TypedDict, total=False):
    """What a method may ask of one descent that differs from the experiment's own settings (see `Descent`)."""

    lr: float
    momentum: float
    weight_decay: float
    epochs: int
    steps: int | None
    batch: int | None
    drop_last: bool


@dataclass
class Client:
    """One client at work in one round.

    `state` is private, persists from visit to visit and holds named tensors only. `initial` is the network's first
    vector, which every client can make from the experiment's seed without a message. `participation` is the share of
    the clients that take part in a round on average, r/I.
    """

    id: int
    round: int
    seed: int
    state: State
    train: Samples
    validation: Samples
    network: Network
    initial: Tensor
    loss_function: Loss
    how: Descent
    keep_momentum: bool = False
    participation: float = 1.0
    _velocities: State = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """The number of training samples, n_i."""
        return len(self.train[1])

    @property
    def steps(self) -> int:
        """The number of steps in one descent with the experiment's settings."""
        return step_count(self.samples, self.how)

    def path(self, warm: bool = False) -> float:
        """How far one descent leads along a constant gradient of length 1, so that x − y over it is the mean gradient
        along the path: η K and, with momentum m, η (K − Σ m^k) / (1 − m), as a velocity has yet to build up unless
        the client is `warm`, with the one of its last visit."""
        m, steps = self.how.momentum, self.steps
        lost = 0.0 if warm else m * (1 - m**steps) / (1 - m)
        return self.how.lr * (steps - lost) / (1 - m)

    @property
    def body(self) -> slice:
        return self.network.body

    @property
    def head(self) -> slice:
        return self.network.head

    @property
    def layers(self) -> dict[str, slice]:
        return self.network.layers

    @property
    def norms(self) -> list[slice]:
        """The slices of normalisation layers."""
        return self.network.norms

    def stream(self, purpose: str, every_round: bool = True) -> torch.Generator:
        """This client's random stream for a purpose: another one every round, or one for good."""
        return torch_stream(self.seed, purpose, self.round if every_round else 0, self.id)

    def descend(
        self,
        theta: Tensor,
        *,
        correction: Correction | None = None,
        scale: Tensor | None = None,
        part: slice | None = None,
        each_step: Callable[[Tensor], None] | None = None,
        objective: Objective | None = None,
        name: str = "theta",
        purpose: str = "batches",
        **settings: Unpack[Settings],
    ) -> Tensor:
        """Local descent from `theta` on the training samples with the experiment's settings, or those given here.

        `correction` is added to every gradient (a vector, or a function of the present one), `scale` multiplies it,
        `part` trains a slice alone, `each_step` is called with the present vector after each step. `objective` is a
        function of a `Batch` in place of its loss.

        Two descents of one round see the same batches in the same order unless their `purpose` differs: so two models
        are compared on equal terms, and limit cases hold exactly. `name` tells the models of one client apart where
        momentum is kept from visit to visit.
        """
        how = replace(self.how, **settings)
        velocity = None
        if self.keep_momentum and how.momentum:
            velocity = self.state.setdefault(f"momentum/{name}", torch.zeros_like(theta))
            velocity = velocity[part] if part else velocity
        return descend(
            self.network,
            theta,
            *self.train,
            self.loss_function,
            how,
            self._begin(purpose),
            correction=correction,
            scale=scale,
            part=part,
            velocity=velocity,
            each_step=each_step,
            objective=objective,
        )

    def batches(self, *, purpose: str = "batches", **settings: Unpack[Settings]) -> Iterator[Batch]:
        """The batches of a descent, for a method that takes the steps itself: with `gradient(theta, batch)` and
        `step(theta, gradient)` they come to the same as `descend`."""
        x, y = self.train
        stream = self._begin(purpose)
        for chosen in batches(len(x), replace(self.how, **settings), stream, x.device):
            yield Batch(self.network, self.loss_function, take(x, chosen), take(y, chosen), chosen)

    def step(self, theta: Tensor, gradient: Tensor, *, lr: float | None = None, name: str = "theta") -> Tensor:
        """One step along a gradient, with the experiment's rate (or `lr`), momentum and weight decay.

        What BatchNorm saw in the last pass comes along. `name` tells the models of one client apart."""
        how, key = self.how, f"momentum/{name}"
        if how.weight_decay:
            gradient = gradient.add(theta, alpha=how.weight_decay)
        if how.momentum:
            velocities = self.state if self.keep_momentum else self._velocities
            before = velocities.get(key)
            gradient = velocities[key] = gradient if before is None else before.mul(how.momentum).add_(gradient)
        theta = theta.add(gradient, alpha=-(how.lr if lr is None else lr))
        for place in self.network.statistics:
            theta[place] = self.network.vector[place]
        return theta

    def _begin(self, purpose: str) -> torch.Generator:
        """Begin this round's stream for a purpose, and the one of the network's own draws."""
        seed_network(torch_seed(self.seed, purpose, "network", self.round, self.id), self.initial.device)
        return self.stream(purpose)

    def gradient(self, theta: Tensor, batch: Batch | None = None, objective: Objective = plain_loss) -> Tensor:
        """The gradient of the mean training loss at `theta`: ∇f_i(θ), one pass over all training samples; or that of
        one batch, where another objective may stand for the loss."""
        if batch is None:
            return self.loss_and_gradient(theta)[1]
        return batch_gradient(theta, replace(batch), objective)

    def hessian_product(self, theta: Tensor, direction: Tensor, batch: Batch) -> Tensor:
        """∇²f(θ) · direction on a batch, exactly."""
        return hessian_product(theta, direction, replace(batch))

    def loss_and_gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """f_i(θ) and ∇f_i(θ) in one pass over all training samples."""
        return mean_gradient(self.network, theta, *self.train, self.loss_function)

    @torch.no_grad()
    def loss(self, theta: Tensor, samples: Samples | None = None) -> Tensor:
        """The mean loss at `theta` over the training samples, or over those given: f_i(θ)."""
        x, y = samples or self.train
        return self.loss_function(outputs(self.network, theta, x), y)

    def features(self, theta: Tensor) -> Tensor | None:
        """What the body of `theta` makes of the training samples; None if the network has no cut before its head."""
        self.network.vector.copy_(theta)
        self.network.module.eval()
        return frozen_features(self.network, self.train[0])
