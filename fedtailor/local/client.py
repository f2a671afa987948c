"""The client's side: all that a method may touch there.

These are its private state, its data, the network and its random streams, and the helpers for local training that make
most methods a few lines.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self, TypedDict, Unpack

import torch
from torch import Tensor

from fedtailor.local.augmentation import Augmentation
from fedtailor.local.descent import (
    Batch,
    Correction,
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
from fedtailor.local.layout import Layout
from fedtailor.local.metrics import outputs
from fedtailor.local.network import Loss, Network
from fedtailor.local.optimizer import OptimizerSettings, sgd_step
from fedtailor.local.streams import seed_network, torch_seed, torch_stream
from fedtailor.messages import State

Data = tuple[Tensor, Tensor]  # inputs and targets


class Settings(TypedDict, total=False):
    """Settings of one descent that differ from the experiment's own (see `OptimizerSettings`)."""

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

    `state` is private, persists from round to round and holds named tensors only. `initial` is the network's initial
    vector, which every client can make from the experiment's seed without a message. `optimizer` has the experiment's
    settings of the local descent. `participation` is the share of the clients that take part in a round on average,
    r/I.
    """

    id: int
    round: int
    seed: int
    state: State
    train_data: Data
    validation_data: Data
    network: Network
    initial: Tensor
    loss_function: Loss
    optimizer: OptimizerSettings
    keep_momentum: bool = False
    participation: float = 1.0
    augmentation: Augmentation | None = None
    _velocities: State = field(default_factory=dict, init=False)  # each copy of a client has its own

    @property
    def n_samples(self) -> int:
        """The number of training samples, n_i."""
        return len(self.train_data[1])

    @property
    def n_steps(self) -> int:
        """The number of steps in one descent with the experiment's settings."""
        return step_count(self.n_samples, self.optimizer)

    @property
    def layout(self) -> Layout:
        return self.network.layout

    @property
    def body(self) -> slice:
        return self.layout.body

    @property
    def head(self) -> slice:
        return self.layout.head

    def fresh(self) -> Self:
        """Copy the client without its state and round: what the copy computes is the same in all rounds."""
        return replace(self, round=0, state={})

    def path_length(self, warm: bool = False) -> float:
        """Compute the length of one descent along a constant gradient of length 1.

        After a descent from x to y, (x − y) / length is the mean gradient along the path. The length is η K and, with
        momentum m, η (K − Σ m^k) / (1 − m), as a velocity has yet to build up; unless the client is `warm`: it then
        begins with the velocity of its last round.
        """
        m, steps = self.optimizer.momentum, self.n_steps
        lost = 0.0 if warm else m * (1 - m**steps) / (1 - m)
        return self.optimizer.lr * (steps - lost) / (1 - m)

    def stream(self, purpose: str, every_round: bool = True) -> torch.Generator:
        """Return the client's random stream for a purpose: another one every round, or always the same."""
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
        """Descend from `theta` on the training samples, with the experiment's settings or those given here.

        `correction` is added to every gradient (a vector, or a function of the present one), `scale` multiplies it,
        `part` trains a slice alone, `each_step` is called with the present vector after each step. `objective` is a
        function of a `Batch` in place of its loss.

        Two descents of one round see the same batches in the same order unless their `purpose` differs: so two models
        are compared on equal terms, and limit cases hold exactly. `name` tells the models of one client apart where
        momentum is kept from round to round.
        """
        chosen = replace(self.optimizer, **settings)
        velocity = None
        if self.keep_momentum and chosen.momentum:
            velocity = self.state.setdefault(f"momentum/{name}", torch.zeros_like(theta))
            velocity = velocity[part] if part else velocity
        return descend(
            self.network,
            theta,
            *self.train_data,
            self.loss_function,
            chosen,
            self._begin(purpose),
            correction=correction,
            scale=scale,
            part=part,
            velocity=velocity,
            each_step=each_step,
            objective=objective,
            augment=self._augmenting(purpose),
        )

    def batches(self, *, purpose: str = "batches", **settings: Unpack[Settings]) -> Iterator[Batch]:
        """Yield the batches of a descent, for a method that takes the steps itself.

        With `gradient(theta, batch)` and `step(theta, gradient)` they come to the same as `descend`.
        """
        x, y = self.train_data
        stream, augment = self._begin(purpose), self._augmenting(purpose)
        for chosen in batches(len(x), replace(self.optimizer, **settings), stream, x.device):
            xs = take(x, chosen) if augment is None else augment(take(x, chosen))
            yield Batch(self.network, self.loss_function, xs, take(y, chosen), chosen)

    def step(self, theta: Tensor, gradient: Tensor, *, lr: float | None = None, name: str = "theta") -> Tensor:
        """Take one step along a gradient, with the experiment's rate (or `lr`), momentum and weight decay.

        BatchNorm's buffers are those of the last pass. `name` tells the models of one client apart.
        """
        chosen = self.optimizer if lr is None else replace(self.optimizer, lr=lr)
        velocities, key = self.state if self.keep_momentum else self._velocities, f"momentum/{name}"
        theta, before = theta.clone(), velocities.get(key)
        gradient = gradient.clone() if chosen.weight_decay else gradient  # only then is it overwritten
        velocity = sgd_step(theta, gradient, None if before is None else before.clone(), chosen)
        if velocity is not None:
            velocities[key] = velocity
        return self.layout.copy_buffers(theta, self.network.vector)

    def _begin(self, purpose: str) -> torch.Generator:
        """Begin this round's stream for a purpose, and the one of the network's own draws."""
        seed_network(torch_seed(self.seed, purpose, "network", self.round, self.id), self.initial.device)
        return self.stream(purpose)

    def _augmenting(self, purpose: str) -> Callable[[Tensor], Tensor] | None:
        """Make the function that changes each batch's images, with a stream of its own; None without augmentation."""
        if self.augmentation is None:
            return None
        return partial(self.augmentation, stream=torch_stream(self.seed, purpose, "augmentation", self.round, self.id))

    def gradient(self, theta: Tensor, batch: Batch | None = None, objective: Objective = plain_loss) -> Tensor:
        """Compute the gradient ∇f_i(θ) of the mean training loss, in one pass over all training samples.

        With a `batch`, it is the gradient on that batch alone, and an `objective` may stand for the loss.
        """
        if batch is None:
            return self.loss_and_gradient(theta)[1]
        return batch_gradient(theta, replace(batch), objective)

    def hessian_product(self, theta: Tensor, direction: Tensor, batch: Batch) -> Tensor:
        """Compute ∇²f(θ) · direction on a batch, exactly."""
        return hessian_product(theta, direction, replace(batch))

    def loss_and_gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Compute f_i(θ) and ∇f_i(θ) in one pass over all training samples."""
        return mean_gradient(self.network, theta, *self.train_data, self.loss_function)

    @torch.no_grad()
    def loss(self, theta: Tensor, data: Data | None = None) -> Tensor:
        """Compute the mean loss at `theta` over the training samples, f_i(θ), or over those given."""
        x, y = data or self.train_data
        return self.loss_function(outputs(self.network, theta, x), y)

    def features(self, theta: Tensor) -> Tensor | None:
        """Compute the features of the training samples at `theta`; None if the network has no cut before its head."""
        self.network.vector.copy_(theta)
        self.network.module.eval()
        return frozen_features(self.network, self.train_data[0])
