"""The forward and backward pass of a plain chain of layers for several clients at once, each with its own parameters.

A linear layer is one batched matrix product, a convolution a grouped one: the numbers are those of `chain.py` up to
rounding. Samples are (clients, batch, …), parameters (clients, …). Samples that only fill a client's batch up have a
weight of zero in its loss.

As there, a link is a function of the input. Its backward pass writes the gradient of the layer's parameters, or adds it
to what is there: to the parameters themselves, in a step of plain SGD.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtailor.training.chain import (
    Back,
    Link,
    convolution_backward,
    is_chain,
    leaves,
    max_pool2d,
    max_pool2d_backward,
    padding_of,
    threshold_backward,
)
from fedtailor.training.layout import rows_as
from fedtailor.training.network import Loss, Network
from fedtailor.training.stacked_batches import Step

# Batches of multiples of so many samples lie in columns on the CPU: products are up to 1.1 times as fast there, those
# with few outputs 1.9 times, and the loss 10 times. Of other sizes they are slower.
WIDE = 16

Parameter = tuple[Tensor, Tensor]  # the values, and where their gradient is written or added


def merged(x: Tensor) -> Tensor:
    """View (clients, batch, channels, …) as (batch, clients · channels, …): what a grouped convolution takes. So images
    stay from the first convolution or pool on, until they are flattened."""
    return x.transpose(0, 1).flatten(1, 2) if x.dim() == 5 else x


def parted(x: Tensor, clients: int) -> Tensor:
    """View (batch, clients · channels, …) as (clients, batch, channels, …)."""
    found: Tensor = x.unflatten(1, (clients, -1)).transpose(0, 1)
    return found


def linear(layer: nn.Linear, weight: Parameter, bias: Parameter | None, beta: float) -> Link:
    values, target = weight
    transposed = values.mT
    row, column = (None, None) if bias is None else (bias[0].unsqueeze(1), bias[0].unsqueeze(2))

    def forward(x: Tensor) -> tuple[Tensor, Back]:
        wide = x.device.type == "cpu" and x.shape[1] % WIDE == 0

        def back(d: Tensor, wanted: bool) -> Tensor:
            if wanted:  # before the values may change
                dx = torch.bmm(transposed, d.mT).mT if wide else torch.bmm(d, values)
            target.baddbmm_(d.mT, x, beta=beta)
            if bias is not None and beta:
                bias[1].add_(d.sum(1))
            elif bias is not None:
                torch.sum(d, 1, out=bias[1])
            return dx if wanted else d

        if wide:
            return _product(column, values, x.mT).mT, back
        return _product(row, x, transposed), back

    return forward


def _product(added: Tensor | None, one: Tensor, other: Tensor) -> Tensor:
    return torch.bmm(one, other) if added is None else torch.baddbmm(added, one, other)


def convolution(layer: nn.Conv2d, weight: Parameter, bias: Parameter | None, beta: float) -> Link:
    values, target = weight
    clients = len(values)
    geometry, groups = (layer.stride, padding_of(layer), layer.dilation), clients * layer.groups

    def forward(x: Tensor) -> tuple[Tensor, Back]:
        x, joined = merged(x), values.flatten(0, 1)  # a copy of the present values
        row = None if bias is None else bias[0].flatten()

        def back(d: Tensor, wanted: bool) -> Tensor:
            of_which = (wanted, True, False)
            dx, dw, _ = convolution_backward(d, x, joined, None, *geometry, False, (0, 0), groups, of_which)
            _add(target, dw.unflatten(0, (clients, -1)), beta)
            if bias is not None:
                _add(bias[1], d.sum((0, 2, 3)).view(clients, -1), beta)
            return dx if wanted else d

        return torch.conv2d(x, joined, row, *geometry, groups), back

    return forward


def _add(target: Tensor, gradient: Tensor, beta: float) -> None:
    """Write a gradient, or add it to what is there."""
    if beta:
        target.add_(gradient)
    else:
        target.copy_(gradient)


def max_pool(layer: nn.MaxPool2d) -> Link:
    pair = nn.modules.utils._pair
    geometry = (*map(pair, (layer.kernel_size, layer.stride, layer.padding, layer.dilation)), layer.ceil_mode)

    def forward(x: Tensor) -> tuple[Tensor, Back]:
        x = merged(x)
        y, places = max_pool2d(x, *geometry)
        return y, lambda d, wanted: max_pool2d_backward(d, x, *geometry, places) if wanted else d

    return forward


def relu(layer: nn.ReLU) -> Link:
    def forward(x: Tensor) -> tuple[Tensor, Back]:
        y = torch.relu_(x)  # nobody else's: samples of this pass, or a layer's outputs
        return y, lambda d, wanted: threshold_backward(d, y, 0) if wanted else d

    return forward


def flatten(layer: nn.Flatten, clients: int | None) -> Link:
    """Flatten samples; merged images of so many clients are parted."""

    def forward(x: Tensor) -> tuple[Tensor, Back]:
        x = x if clients is None else parted(x, clients)
        return x.flatten(2), lambda d, wanted: merged(d.reshape(x.shape)) if wanted else d

    return forward


WITH_PARAMETERS: dict[type[nn.Module], Callable[..., Link]] = {nn.Linear: linear, nn.Conv2d: convolution}
WITHOUT: dict[type[nn.Module], Callable[[Any], Link]] = {nn.MaxPool2d: max_pool, nn.ReLU: relu}


class StackedChain:
    """The passes of a network, or of its head, that is a chain of common layers, for several clients.

    `vectors` and `gradients` have a row for each client. Autograd must be off meanwhile.
    """

    def __init__(self, network: Network, function: nn.Module, vectors: Tensor, gradients: Tensor) -> None:
        self.network, self.layers = network, list(leaves(function))
        self.flattens = isinstance(self.layers[0], nn.Flatten)
        self.first = next(place for place, layer in enumerate(self.layers) if [*layer.parameters()])
        self.places = {(id(owner), name): where for owner, name, where in network.placed}
        self.vectors, self.gradients = vectors, gradients
        self._links: dict[tuple[int, int, float, bool], list[Link]] = {}

    @staticmethod
    def fits(function: nn.Module, x: Tensor) -> bool:
        """Find out whether the layers are those of a chain, for samples like these."""
        return is_chain(function, list(leaves(function)), x)

    def differentiate(
        self,
        rows: slice,
        step: Step,
        losses: Sequence[Loss],
        beta: float = 0.0,
        in_place: bool = False,
        valued: bool = False,
    ) -> Tensor | None:
        """Write the gradient of each client's loss, by the samples' weights, into its row of the gradients; with `beta`
        1 add it there, or `in_place` to the parameters. Return these losses if they are `valued`."""
        way_back: list[Back] = []
        x = step.x
        for link in self._at(rows, beta, in_place):
            x, back = link(x)
            way_back.append(back)
        value, d = loss_and_gradient(x, step, losses, valued)
        for back in reversed(way_back[self.first + 1 :]):
            d = back(d, True)
        way_back[self.first](d, False)
        return value

    def outputs(self, rows: slice, x: Tensor) -> Tensor:
        """Compute each client's outputs."""
        for link in self._at(rows, 0.0, False):
            x, _ = link(x)
        return x

    def _at(self, rows: slice, beta: float, in_place: bool) -> list[Link]:
        """Make the links for these rows, or find those of the last pass."""
        key = (rows.start, rows.stop, beta, in_place)
        if key not in self._links:
            values = self.vectors[rows]
            self._links = {key: list(self._made(values, values if in_place else self.gradients[rows], beta))}
        return self._links[key]

    def _made(self, values: Tensor, targets: Tensor, beta: float) -> Iterator[Link]:
        images = False  # merged
        for layer in self.layers:
            if isinstance(layer, nn.Flatten):
                yield flatten(layer, len(values) if images else None)
                images = False
                continue
            images |= isinstance(layer, nn.Conv2d | nn.MaxPool2d)
            if type(layer) in WITHOUT:
                yield WITHOUT[type(layer)](layer)
                continue
            found: list[Parameter | None] = []
            for name in ("weight", "bias"):
                where, tensor = self.places.get((id(layer), name)), getattr(layer, name)
                rows = None if where is None else (values[:, where], targets[:, where])
                found.append(None if rows is None else (rows_as(rows[0], tensor.shape), rows_as(rows[1], tensor.shape)))
            yield WITH_PARAMETERS[type(layer)](layer, *found, beta)
        if images:
            yield lambda x: (parted(x, len(values)), lambda d, wanted: merged(d))


def loss_and_gradient(
    outputs: Tensor, step: Step, losses: Sequence[Loss], valued: bool
) -> tuple[Tensor | None, Tensor]:
    """Compute the clients' losses by the weights of their samples, if they are `valued`, and the gradient of these by
    the outputs (clients, batch, …)."""
    y, weights = step.y, step.weights
    if outputs.dim() == 3 and y.dim() == 2 and all(loss is functional.cross_entropy for loss in losses):
        index = y.unsqueeze(2)
        value = -(torch.log_softmax(outputs, 2).gather(2, index) * weights).sum((1, 2)) if valued else None
        in_columns = outputs.stride(1) == 1
        likely = torch.softmax(outputs.mT, 1).mT if in_columns else torch.softmax(outputs, 2)
        return value, likely.scatter_(2, index, -1.0, reduce="add").mul_(weights)
    outputs = outputs.detach().requires_grad_()
    with torch.enable_grad():
        # Copies, which a loss may change in place.
        found = [
            loss(of_client[:size].clone(), targets[:size])
            for loss, of_client, targets, size in zip(losses, outputs.unbind(), y.unbind(), step.sizes, strict=True)
        ]
        values = torch.stack(found) * weights.sum((1, 2))
        return values.detach(), torch.autograd.grad(values.sum(), outputs)[0]
