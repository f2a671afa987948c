"""The client's side: all that a method may touch there.

These are its private state, its data, the network and its random streams, and the helpers for local training that make
most methods a few lines.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Self, TypedDict, Unpack

import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.messages import State
from fedtailor.training.augmentation import Augmentation
from fedtailor.training.descent import (
    Batch,
    Correction,
    Objective,
    augmented,
    batch_gradient,
    batches,
    descend,
    hessian_product,
    mean_gradient,
    plain_loss,
    private_gradient,
    step_count,
)
from fedtailor.training.inputs import Inputs, take
from fedtailor.training.layout import Layout
from fedtailor.training.network import Loss, Network
from fedtailor.training.optimizer import OptimizerSettings, optimizer_step
from fedtailor.training.predictions import features, outputs
from fedtailor.training.private_gradients import Private, sampling_rate
from fedtailor.training.streams import seed_network, torch_seed, torch_stream

Data = tuple[Inputs, Tensor]  # inputs and targets
HeadStart = Literal["network", "uniform"]


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
class Steering:
    """A correction from outside of every descent of the model `theta`, in a slice of its vector (see `Composition`).

    `correction` and `each_step` are those of `Client.descend`, on the slice alone. `last` is the vector at the end of
    the last such descent, and `settings` those in which it differed from the experiment's.
    """

    place: slice
    correction: Correction | None = None
    each_step: Callable[[Tensor], None] | None = None
    last: Tensor | None = None
    settings: Settings = field(default_factory=Settings)

    def moves(self, part: slice) -> bool:
        """Find out whether training this part of the vector moves the slice."""
        return bool(max(part.start, self.place.start) < min(part.stop, self.place.stop))

    def added(self, vector: Tensor, part: slice) -> Tensor:
        """Return the correction at this vector, for a part of it: zeros outside of the slice."""
        whole = torch.zeros_like(vector)
        if self.correction is not None:
            there = vector[self.place]
            whole[self.place] = self.correction(there) if callable(self.correction) else self.correction
        return whole[part]


@dataclass
class Client:
    """One client at work in one round.

    `state` is private, persists from round to round and holds named tensors only. `initial` is the network's initial
    vector, which every client can make from the experiment's seed without a message. `loss_function` is the loss that
    is trained, with label smoothing and class weights. `optimizer` has the experiment's settings of the local descent,
    and this round's factor of the learning rate. `participation` is the share of the clients that take part in a round
    on average, r/I.

    `private` is there while a client trains under privacy of its samples. Then `descend` and `gradient` take private
    gradients, unless their result `stays`: it never leaves the client, and nothing that leaves depends on it. What has
    no private version (a loss, features, another objective, a Hessian) is refused.
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
    private: Private | None = None  # the same for all copies: no noise is drawn twice
    steering: Steering | None = None
    # Each copy of a client has its own:
    _moments: dict[str, State] = field(default_factory=dict, init=False)  # what `step` remembers of each model
    _factor: float | None = field(default=None, init=False)  # of the learning rate, in the present step of `batches`

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
        """The parts of the vector: body, head, layers, buffers."""
        return self.network.layout

    @property
    def body(self) -> slice:
        """The slice of the vector that is the body: all but the head."""
        return self.layout.body

    @property
    def head(self) -> slice:
        """The slice of the vector that is the head."""
        return self.layout.head

    @property
    def lr(self) -> float:
        """The learning rate now: the experiment's by this round's factor and, in `batches`, by the step's."""
        return self.optimizer.lr * (self.optimizer.factor if self._factor is None else self._factor)

    def fresh(self) -> Self:
        """Copy the client without its state and round: what the copy computes is the same in all rounds.

        Its learning rate is the experiment's own, without a round's factor.
        """
        return replace(self, round=0, state={}, optimizer=replace(self.optimizer, factor=1.0), steering=None)

    def path_length(self, warm: bool = False) -> float:
        """Compute the length of one descent of SGD along a constant gradient of length 1.

        After a descent from x to y, (x − y) / length is the mean gradient along the path. The length is Σ η_k over the
        steps k = 1 … K and, with momentum m, Σ η_k (1 − m^k) / (1 − m), as a velocity has yet to build up; unless the
        client is `warm`: it then begins with the velocity of its last round.
        """
        straight = self.optimizer.lr * sum(self.optimizer.factors(self.n_steps))
        return (straight - (0.0 if warm else self.carried_length())) / (1 - self.optimizer.momentum)

    def carried_length(self) -> float:
        """Compute how far one descent of SGD leads by a velocity of length 1 that it begins with, Σ η_k m^k."""
        m, factors = self.optimizer.momentum, self.optimizer.factors(self.n_steps)
        return self.optimizer.lr * sum(factor * m**k for k, factor in enumerate(factors, 1))

    def stream(self, purpose: str, every_round: bool = True) -> torch.Generator:
        """Return the client's random stream for a purpose: another one every round, or always the same."""
        return torch_stream(self.seed, purpose, self.round if every_round else 0, self.id)

    def initial_head(self, start: HeadStart = "network") -> Tensor:
        """Return the head that this client begins with: the network's initial one, the same for all clients, or one of
        its own with all entries (biases too) uniform in [0, 1), the same in every round."""
        head = self.initial[self.head]
        if start == "network":
            return head
        stream = self.stream("head", every_round=False)
        return torch.rand(len(head), generator=stream, dtype=head.dtype, device="cpu").to(head.device)

    def own_head(self, start: HeadStart = "network") -> Tensor:
        """Return the head that this client keeps in its state, or else the one that it begins with."""
        head = self.state.get("head")
        return self.initial_head(start) if head is None else head

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
        stays: bool = False,
        **settings: Unpack[Settings],
    ) -> Tensor:
        """Descend from `theta` on the training samples, with the experiment's settings or those given here.

        `correction` is added to every gradient (a vector, or a function of the present one), `scale` is a learning
        rate of its own for every entry, `part` trains a slice alone, `each_step` is called with the present vector
        after each step. `objective` is a function of a `Batch` in place of its loss.

        Two descents of one round see the same batches in the same order unless their `purpose` differs: so two models
        are compared on equal terms, and limit cases hold exactly. `name` tells the models of one client apart where
        momentum is kept from round to round. `stays` says that nothing that leaves the client depends on the result.
        """
        private = None if stays else self.private
        if private is not None and objective is not None:
            raise NotPrivate("an objective of its own")
        chosen, steering = replace(self.optimizer, **settings), self.steering
        moments = self.moments(name, theta, chosen) if self.keep_momentum else {}
        trained, vector = part or slice(0, self.layout.size), self.network.vector
        if steering is None or name != "theta" or not steering.moves(trained):
            steering = None
        else:
            own, follow = correction, each_step

            def correction(v: Tensor) -> Tensor:
                added = steering.added(vector, trained)
                return added if own is None else added + (own(v) if callable(own) else own)

            def each_step(v: Tensor) -> None:
                if follow is not None:
                    follow(v)
                if steering.each_step is not None:
                    steering.each_step(vector[steering.place])

        found = descend(
            self.network,
            theta,
            *self.train_data,
            self.loss_function,
            chosen,
            self._begin(purpose),
            correction=correction,
            scale=scale,
            part=part,
            moments={moment: tensor[part] for moment, tensor in moments.items()} if part else moments,
            each_step=each_step,
            objective=objective,
            augment=None if self.augmentation is None else self._augmenting(purpose, private),
            private=private,
        )
        if steering is not None:
            steering.last, steering.settings = found, settings
        return found

    def fine_tuned(self, theta: Tensor, epochs: int, part: slice | None = None) -> Tensor:
        """Fine-tune a model on the training samples. The stream is the same in all rounds and no velocity is left from
        before: a model that did not change need not be evaluated again."""
        if not epochs:
            return theta
        return self.fresh().descend(theta, part=part, epochs=epochs, steps=None, purpose="fine-tuning")

    def batches(self, *, purpose: str = "batches", **settings: Unpack[Settings]) -> Iterator[Batch]:
        """Yield the batches of a descent, for a method that takes the steps itself.

        With `gradient(theta, batch)` and `step(theta, gradient)` they come to the same as `descend`. A private gradient
        takes of a batch its sampling rate alone, and draws a Poisson batch of its own.
        """
        (x, y), chosen = self.train_data, replace(self.optimizer, **settings)
        rate = sampling_rate(len(x), chosen.batch)
        stream, factors = self._begin(purpose), chosen.factors(step_count(len(x), chosen))
        augment = self._augmenting(purpose)
        try:
            for indices, self._factor in zip(batches(len(x), chosen, stream, x.device), factors, strict=True):
                xs = augmented(take(x, indices), augment)
                yield Batch(self.network, self.loss_function, xs, take(y, indices), indices, rate)
        finally:
            self._factor = None

    def step(self, theta: Tensor, gradient: Tensor, *, lr: float | None = None, name: str = "theta") -> Tensor:
        """Take one step along a gradient, with the experiment's optimiser, at its rate or at `lr`.

        Either is multiplied by the factors of the experiment's schedules, in the step that `batches` is at. BatchNorm's
        buffers are those of the last pass. `name` tells the models of one client apart.
        """
        chosen = self.optimizer if lr is None else replace(self.optimizer, lr=lr)
        theta, factor = theta.clone(), chosen.factor if self._factor is None else self._factor
        if chosen.weight_decay or chosen.clip:  # only then is it overwritten
            gradient = gradient.clone()
        gradient = self.layout.without_buffers(gradient) if chosen.clip else gradient
        steering = self.steering if name == "theta" else None
        if steering is not None:
            gradient = gradient + steering.added(theta, slice(None))
        optimizer_step(theta, gradient, self.moments(name, theta, chosen), chosen, factor)
        theta = self.layout.copy_buffers(theta, self.network.vector)
        if steering is not None:
            steering.last = theta
            if steering.each_step is not None:
                steering.each_step(theta[steering.place])
        return theta

    def moments(self, name: str, like: Tensor, settings: OptimizerSettings | None = None) -> State:
        """Get what the optimiser remembers of the model `name`: momentum, or Adam's mean, square and steps.

        Updated in place, they are kept in the state where momentum is kept, and else begin anew in every round.
        """
        if not self.keep_momentum:
            return self._moments.setdefault(name, {})
        needed = (settings or self.optimizer).moments
        return {moment: self.state.setdefault(f"{moment}/{name}", torch.zeros_like(like)) for moment in needed}

    def _begin(self, purpose: str) -> torch.Generator:
        """Begin this round's stream for a purpose, and the one of the network's own draws."""
        seed_network(torch_seed(self.seed, purpose, "network", self.round, self.id), self.initial.device)
        return torch_stream(self.seed, purpose, self.round, self.id)

    def _augmenting(self, purpose: str, private: Private | None = None) -> Callable[[Tensor], Tensor] | None:
        """Make the function that changes each batch's images, with a stream of its own; None without augmentation.

        The stream of a private batch is as secret as the noise: who knew it would see by it which samples are there.
        """
        if self.augmentation is None:
            return None
        if private is not None:
            return partial(self.augmentation, stream=torch.Generator().manual_seed(private.source.seed()))
        return partial(self.augmentation, stream=torch_stream(self.seed, purpose, "augmentation", self.round, self.id))

    def gradient(
        self, theta: Tensor, batch: Batch | None = None, objective: Objective = plain_loss, *, stays: bool = False
    ) -> Tensor:
        """Compute the gradient ∇f_i(θ) of the mean training loss, in one pass over all training samples.

        With a `batch`, it is the gradient on that batch alone, and an `objective` may stand for the loss. `stays` says
        that nothing that leaves the client depends on it.
        """
        if self.private is not None and not stays:
            if objective is not plain_loss:
                raise NotPrivate("an objective of its own")
            augment = None if batch is None else self._augmenting("", self.private)
            rate = None if batch is None else batch.rate
            return private_gradient(
                self.private, self.network, theta, *self.train_data, self.loss_function, rate, augment
            )
        if batch is None:
            return mean_gradient(self.network, theta, *self.train_data, self.loss_function)[1]
        return batch_gradient(theta, replace(batch), objective)

    def hessian_product(self, theta: Tensor, direction: Tensor, batch: Batch) -> Tensor:
        """Compute ∇²f(θ) · direction on a batch, exactly."""
        self._refuse("a Hessian product")
        return hessian_product(theta, direction, replace(batch))

    def loss_and_gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Compute f_i(θ) and ∇f_i(θ) in one pass over all training samples."""
        self._refuse("the training loss")
        return mean_gradient(self.network, theta, *self.train_data, self.loss_function)

    @torch.no_grad()
    def loss(self, theta: Tensor, data: Data | None = None) -> Tensor:
        """Compute the mean loss at `theta` over the training samples, f_i(θ), or over those given."""
        self._refuse("a loss")
        x, y = data or self.train_data
        # Alone: methods take small differences between losses (FedFomo), of which rounding is a large part.
        return self.loss_function(outputs(self.network, theta, x, alone=True), y)

    def features(self, theta: Tensor, x: Inputs | None = None) -> Tensor | None:
        """Compute the features of the training samples at `theta`, or of the inputs given, in evaluation mode; None if
        the network has no cut before its head."""
        self._refuse("the features of samples")
        return features(self.network, theta, self.train_data[0] if x is None else x)

    def flat_features(self, theta: Tensor, x: Inputs | None = None) -> Tensor:
        """Compute the features as rows of numbers, for a method that cannot do without."""
        found = self.features(theta, x)
        if found is None:
            raise FedtailorError("This method needs a network that can be cut between its body and its head.")
        return found.flatten(1)

    def outputs(self, theta: Tensor, x: Inputs | None = None) -> Tensor:
        """Compute the outputs for the training samples at `theta`, or for the inputs given, in evaluation mode."""
        self._refuse("the outputs for samples")
        return outputs(self.network, theta, self.train_data[0] if x is None else x)

    @property
    def class_counts(self) -> Tensor:
        """The number of training samples of each class, as floating-point numbers; refuses targets without classes."""
        y, classes = self.train_data[1], self.layout.n_outputs
        if y.is_floating_point() or y.dim() != 1 or classes is None:
            raise FedtailorError("This method needs classes: its targets must be one class label per sample.")
        return y.bincount(minlength=classes).to(self.initial)

    def class_means(self, rows: Tensor) -> Tensor:
        """Compute the mean of each class's rows, such as the features of the training samples: one row a class, zeros
        for a class that the client lacks (see `class_counts`)."""
        counts = self.class_counts
        sums = rows.new_zeros(len(counts), rows.shape[1]).index_add_(0, self.train_data[1], rows)
        return sums / counts.clamp(min=1)[:, None]

    def extra(self, theta: Tensor) -> dict[str, Tensor]:
        """View the method's extra tensors in a vector, by name."""
        return self.layout.extras(theta)

    def _refuse(self, what: str) -> None:
        """Refuse what has no private version while the client trains under privacy of its samples."""
        if self.private is not None:
            raise NotPrivate(what)


class NotPrivate(FedtailorError):
    """A method uses something that privacy of single samples cannot protect."""

    def __init__(self, what: str, method: str = "The method") -> None:
        super().__init__(
            f"{method} uses {what}, which privacy of single samples cannot protect: take another method, or the level "
            "client in --privacy."
        )
        self.what = what
