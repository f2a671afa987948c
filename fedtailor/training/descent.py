"""Local descent: the loop over batches that every method shares, on flat vectors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from fedtailor._common.errors import FedtailorError
from fedtailor.messages import State
from fedtailor.training.chain import chain_of
from fedtailor.training.inputs import Held, Inputs, apply, sent, take
from fedtailor.training.network import Loss, Network
from fedtailor.training.optimizer import OptimizerSettings, optimizer_step
from fedtailor.training.private_gradients import Private, sampling_rate

Correction = Tensor | Callable[[Tensor], Tensor]

EVALUATION_BATCH = 128  # samples a pass that needs no batches of its own; fixed, as it decides about last bits


def step_count(n_samples: int, settings: OptimizerSettings) -> int:
    """Count the steps of one descent."""
    count = settings.steps if settings.steps is not None else settings.epochs * _batches_in_epoch(n_samples, settings)
    return count if settings.share == 1 else max(1, int(settings.share * count))


def _batches_in_epoch(n_samples: int, settings: OptimizerSettings) -> int:
    size = settings.batch or n_samples
    whole, rest = divmod(n_samples, size)
    if settings.drop_last or (settings.join_last and rest == 1):
        return max(1, whole)
    return whole + (rest > 0)


def batches(
    n_samples: int, settings: OptimizerSettings, stream: torch.Generator, device: torch.device
) -> Iterator[Tensor | None]:
    """Yield the indices of each step's samples, shuffled anew every epoch; None stands for all of them."""
    size, count = settings.batch or n_samples, _batches_in_epoch(n_samples, settings)
    for step in range(step_count(n_samples, settings)):
        if size >= n_samples:
            yield None
            continue
        if step % count == 0:
            pieces = sent(torch.randperm(n_samples, generator=stream, device="cpu"), device).split(size)
            if settings.join_last and len(pieces[-1]) == 1 and not settings.drop_last:
                pieces = (*pieces[:-2], torch.cat(pieces[-2:]))
        yield pieces[step % count]


def augmented(x: Held, augment: Callable[[Tensor], Tensor] | None) -> Held:
    """Augment a batch's inputs, if they are to be, and are images."""
    return augment(x) if augment is not None and isinstance(x, Tensor) else x


@dataclass
class Batch:
    """One batch of samples in its pass through the network. A method's own objective is a function of it."""

    network: Network
    loss_function: Loss
    x: Held
    y: Tensor
    indices: Tensor | None = None  # of the samples in the client's training set; None: all of them
    rate: float = 1.0  # the share of these that is in such a batch

    @cached_property
    def features(self) -> Tensor:
        """The outputs of the body."""
        found = self.network.features(self.x)
        if found is None:
            raise FedtailorError("This method needs a network that can be cut between its body and its head.")
        return found

    @cached_property
    def outputs(self) -> Tensor:
        head = self.network.head_module() if "features" in vars(self) else None
        return self.network(self.x) if head is None else head(self.features)

    @property
    def loss(self) -> Tensor:
        return self.loss_function(self.outputs, self.y)

    @property
    def extra(self) -> Mapping[str, Tensor]:
        """The method's extra tensors, which this pass trains."""
        return cast(Mapping[str, Tensor], self.network.extra)


Objective = Callable[[Batch], Tensor]


def plain_loss(batch: Batch) -> Tensor:
    return batch.loss


def descend(
    network: Network,
    theta: Tensor,
    x: Inputs,
    y: Tensor,
    loss: Loss,
    settings: OptimizerSettings,
    stream: torch.Generator,
    *,
    correction: Correction | None = None,
    scale: Tensor | None = None,
    part: slice | None = None,
    moments: State | None = None,
    each_step: Callable[[Tensor], None] | None = None,
    objective: Objective | None = None,
    augment: Callable[[Tensor], Tensor] | None = None,
    private: Private | None = None,
) -> Tensor:
    """Descend from `theta` on the samples and return the new vector; `theta` itself is left alone.

    `correction` is added to every gradient: a constant vector, or a function of the present one. `scale` is a learning
    rate of its own for every entry. `part` restricts the steps to a slice (all these vectors then have its length);
    the head alone trains on features that are computed once. `moments` is what the optimiser remembers, updated in
    place. `each_step` is called after every step with the present vector. `objective` stands for the loss of a batch.
    `augment` changes each batch's inputs, but not features that are computed once. With `private`, each step draws a
    Poisson batch and takes its private gradient.
    """
    layout = network.layout
    whole = slice(0, layout.size)
    part, moments = part or whole, {} if moments is None else moments
    if network.stack is not None and private is None:
        how = (settings, stream, part, correction, scale, moments, each_step, objective, augment)
        if (found := network.stack.descend(network, theta, x, y, loss, *how)) is not None:
            return cast(Tensor, found)
    network.vector.copy_(theta)
    function = network.module
    if objective is None and part == layout.head != whole:
        function, x = head_on_features(network, x)
    else:
        network.train(len(x))
    vector, gradient = network.vector[part], network.gradient[part]
    buffers = layout.buffers_in(part) if layout.buffers else ()
    inside = [slice(b.start - part.start, b.stop - part.start) for b in buffers]
    chain = chain_of(network, function, x) if objective is None and private is None else None
    factors = settings.factors(step_count(len(x), settings))
    augment = augment if function is network.module else None
    network.gradient[layout.head.stop :] = 0  # of the extra tensors, which no chain writes
    begun = False
    with torch.no_grad():
        if chain is not None and augment is None and isinstance(x, Tensor):  # all samples at once
            x, begun = chain.begin(x), True
        drawn = batches(len(x), settings, stream, x.device)
        if private is not None:
            rate = sampling_rate(len(x), settings.batch)
            drawn = (private.draw(len(x), rate, x.device) for _ in range(step_count(len(x), settings)))
        for chosen, factor in zip(drawn, factors, strict=True):
            xs, ys = take(x, chosen), take(y, chosen)
            if augment is not None:
                xs = augmented(xs, augment)
            if private is None and function is network.module:  # a head on features is cheap
                network.differentiated += len(xs)
            if private is not None:
                private.write_gradient(network, function, xs, ys, loss, part, rate, len(x))
            elif chain is not None and isinstance(xs, Tensor):
                chain.differentiate(xs if begun else chain.begin(xs), ys, loss)
            else:
                network.gradient.zero_()
                with torch.enable_grad(), network.precision():
                    value = (
                        objective(Batch(network, loss, xs, ys, chosen)) if objective else loss(apply(function, xs), ys)
                    )
                value.backward()
            if correction is not None:
                gradient.add_(correction(vector) if callable(correction) else correction)
            optimizer_step(vector, gradient, moments, settings, factor, scale, inside)
            if each_step is not None:
                each_step(vector)
    return network.vector.clone()


def batch_gradient(theta: Tensor, batch: Batch, objective: Objective = plain_loss) -> Tensor:
    """Compute the gradient of a batch's loss, or of another objective, at `theta`."""
    if batch.network.stack is not None and objective is plain_loss:
        found = batch.network.stack.gradient(theta, batch)
        if found is not None:
            return cast(Tensor, found)
    network = _at(theta, batch)
    network.differentiated += len(batch.x)
    chain = chain_of(network, network.module, batch.x) if objective is plain_loss else None
    if chain is not None and isinstance(batch.x, Tensor):
        with torch.no_grad():
            chain.differentiate(chain.begin(batch.x), batch.y, batch.loss_function)
    else:
        with network.precision():
            value = objective(batch)
        value.backward()
    return network.gradient.clone()


def private_gradient(
    private: Private,
    network: Network,
    theta: Tensor,
    x: Inputs,
    y: Tensor,
    loss: Loss,
    rate: float | None,
    augment: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute the private gradient at `theta` by a Poisson batch of the samples with this sampling rate.

    Without one, it is that of all samples in evaluation mode, as `mean_gradient` has it.
    """
    n, whole = len(x), slice(0, network.layout.size)
    network.vector.copy_(theta)
    if rate is None:
        network.module.eval()
    else:
        network.train(n)
        chosen = private.draw(n, rate, x.device)
        x, y = augmented(take(x, chosen), augment), take(y, chosen)
    private.write_gradient(network, network.module, x, y, loss, whole, rate or 1.0, n)
    return network.gradient.clone()


def hessian_product(theta: Tensor, direction: Tensor, batch: Batch) -> Tensor:
    """Compute ∇²f(θ) times a direction, exactly: the gradient of ⟨∇f(θ), direction⟩."""
    network = _at(theta, batch)
    network.differentiated += 2 * len(batch.x)
    parameters = [parameter for parameter in network.module.parameters() if parameter.requires_grad]
    network.gradient.copy_(direction)
    directions = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    network.gradient.zero_()
    with network.precision():
        loss = batch.loss
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    assert isinstance(slope, Tensor)
    slope.backward()
    return network.gradient.clone()


def _at(theta: Tensor, batch: Batch) -> Network:
    """Set the batch's network to `theta`, in training mode and with a gradient of zero."""
    network = batch.network
    network.train(len(batch.x))
    network.vector.copy_(theta)
    network.gradient.zero_()
    return network


def head_on_features(network: Network, x: Inputs) -> tuple[nn.Module, Inputs]:
    """Return what each step runs if only the head is trained, and its inputs: the head, on the features of a frozen
    body in evaluation mode; or the network on the samples, if it cannot be cut."""
    network.module.eval()
    head = network.head_module()
    for layer in [head] if head is not None else map(network.module.get_submodule, network.head_names):
        network.train(len(x), layer)
    features = frozen_features(network, x)
    return (network.module, x) if features is None or head is None else (head, features)


@torch.no_grad()
def frozen_features(network: Network, x: Inputs) -> Tensor | None:
    """Compute the features of all samples; None if the network has no cut between body and head."""
    if not len(x):
        return network.vector.new_empty(0, network.layout.n_features or 0)
    with network.precision():
        pieces = [network.features(piece) for piece in x.split(EVALUATION_BATCH)]
    found = [piece.to(network.vector.dtype) for piece in pieces if piece is not None]
    return torch.cat(found) if len(found) == len(pieces) else None


def mean_gradient(network: Network, theta: Tensor, x: Inputs, y: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Compute the mean loss at `theta` over all samples, and its gradient, in one pass over the data."""
    if network.stack is not None and (found := network.stack.mean_gradient(network, theta, x, y, loss)) is not None:
        return cast(tuple[Tensor, Tensor], found)
    network.vector.copy_(theta)
    network.module.eval()
    network.gradient.zero_()
    network.differentiated += len(x)
    total = torch.zeros((), device=theta.device, dtype=theta.dtype)
    for xs, ys in zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True):
        with network.precision():
            value = loss(network(xs), ys) * (len(xs) / len(x))
        value.backward()
        total += value.detach()
    return total, network.gradient.clone()
