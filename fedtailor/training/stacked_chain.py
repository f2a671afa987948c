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
    IGNORED,
    MEAN,
    Back,
    Link,
    convolution_backward,
    is_chain,
    leaves,
    log_softmax_backward,
    max_pool2d,
    max_pool2d_backward,
    nll_loss,
    nll_loss_backward,
    padding_of,
    threshold_backward,
)
from fedtailor.training.inputs import sent
from fedtailor.training.layout import rows_as
from fedtailor.training.network import Loss, Network

NONE = 0  # the reduction that leaves every sample's loss alone

Parameter = tuple[Tensor, Tensor]  # the values, and where their gradient is written or added


def merged(x: Tensor) -> Tensor:
    """View (clients, batch, channels, …) as (batch, clients · channels, …): what a grouped convolution takes."""
    return x.transpose(0, 1).flatten(1, 2)


def parted(x: Tensor, clients: int) -> Tensor:
    """View (batch, clients · channels, …) as (clients, batch, channels, …)."""
    found: Tensor = x.unflatten(1, (clients, -1)).transpose(0, 1)
    return found


def linear(layer: nn.Linear, weight: Parameter, bias: Parameter | None, beta: float) -> Link:
    values, target = weight
    transposed = values.mT
    row = None if bias is None else bias[0].unsqueeze(1)

    def forward(x: Tensor) -> tuple[Tensor, Back]:
        def back(d: Tensor, wanted: bool) -> Tensor:
            dx = torch.bmm(d, values) if wanted else d  # before the values may change
            target.baddbmm_(d.mT, x, beta=beta)
            if bias is not None:
                _add(bias[1], d.sum(1), beta)
            return dx

        return (torch.bmm(x, transposed) if row is None else torch.baddbmm(row, x, transposed)), back

    return forward


def convolution(layer: nn.Conv2d, weight: Parameter, bias: Parameter | None, beta: float) -> Link:
    values, target = weight
    clients = len(values)
    geometry, groups = (layer.stride, padding_of(layer), layer.dilation), clients * layer.groups

    def forward(x: Tensor) -> tuple[Tensor, Back]:
        x, joined = merged(x), values.flatten(0, 1)  # a copy of the present values
        row = None if bias is None else bias[0].flatten()

        def back(d: Tensor, wanted: bool) -> Tensor:
            d, of_which = merged(d), (wanted, True, False)
            dx, dw, _ = convolution_backward(d, x, joined, None, *geometry, False, (0, 0), groups, of_which)
            _add(target, dw.unflatten(0, (clients, -1)), beta)
            if bias is not None:
                _add(bias[1], d.sum((0, 2, 3)).view(clients, -1), beta)
            return parted(dx, clients) if wanted else d

        return parted(torch.conv2d(x, joined, row, *geometry, groups), clients), back

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
        clients, x = len(x), merged(x)
        y, places = max_pool2d(x, *geometry)

        def back(d: Tensor, wanted: bool) -> Tensor:
            return parted(max_pool2d_backward(merged(d), x, *geometry, places), clients) if wanted else d

        return parted(y, clients), back

    return forward


def relu(layer: nn.ReLU) -> Link:
    def forward(x: Tensor) -> tuple[Tensor, Back]:
        y = torch.relu(x)
        return y, lambda d, wanted: threshold_backward(d, y, 0) if wanted else d

    return forward


def flatten(layer: nn.Flatten) -> Link:
    return lambda x: (x.flatten(2), lambda d, wanted: d.reshape(x.shape))


WITH_PARAMETERS: dict[type[nn.Module], Callable[..., Link]] = {nn.Linear: linear, nn.Conv2d: convolution}
WITHOUT: dict[type[nn.Module], Callable[[Any], Link]] = {nn.MaxPool2d: max_pool, nn.ReLU: relu, nn.Flatten: flatten}


class StackedChain:
    """The passes of a network, or of its head, that is a chain of common layers, for several clients.

    `vectors` and `gradients` have a row for each client. Autograd must be off meanwhile.
    """

    def __init__(self, network: Network, function: nn.Module, vectors: Tensor, gradients: Tensor) -> None:
        self.network, self.layers = network, list(leaves(function))
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
        x: Tensor,
        y: Tensor,
        sizes: Sequence[int],
        shares: float | Tensor,
        losses: Sequence[Loss],
        beta: float = 0.0,
        in_place: bool = False,
    ) -> Tensor | None:
        """Write each client's gradient, times its share, into its row of the gradients; with `beta` 1 add it there, or
        `in_place` to the parameters. Return the clients' losses, times their shares; none where all have the same.

        `sizes` are the numbers of samples in the clients' batches: the others fill these up.
        """
        way_back: list[Back] = []
        for link in self._at(rows, beta, in_place):
            x, back = link(x)
            way_back.append(back)
        value, d = loss_and_gradient(x, y, sizes, shares, losses)
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
        for layer in self.layers:
            if type(layer) in WITHOUT:
                yield WITHOUT[type(layer)](layer)
                continue
            found: list[Parameter | None] = []
            for name in ("weight", "bias"):
                where, tensor = self.places.get((id(layer), name)), getattr(layer, name)
                rows = None if where is None else (values[:, where], targets[:, where])
                found.append(None if rows is None else (rows_as(rows[0], tensor.shape), rows_as(rows[1], tensor.shape)))
            yield WITH_PARAMETERS[type(layer)](layer, *found, beta)


def loss_and_gradient(
    outputs: Tensor, y: Tensor, sizes: Sequence[int], shares: float | Tensor, losses: Sequence[Loss]
) -> tuple[Tensor | None, Tensor]:
    """Compute the clients' losses, times their shares, and the gradient of these by the outputs (clients, batch, …).
    Where all have the same share, there are no losses."""
    clients, batch = y.shape[:2]
    if outputs.dim() == 3 and y.dim() == 2 and all(loss is functional.cross_entropy for loss in losses):
        logarithms, flat = torch.log_softmax(outputs, 2).flatten(0, 1), y.flatten()
        if isinstance(shares, float) and min(sizes) == batch:
            mean, total = nll_loss(logarithms, flat, None, MEAN, IGNORED)
            d = nll_loss_backward(mean.fill_(shares * clients), logarithms, flat, None, MEAN, IGNORED, total)
            value = None
        else:
            weights = sample_weights(outputs, sizes, shares).flatten()
            each, total = nll_loss(logarithms, flat, None, NONE, IGNORED)
            d = nll_loss_backward(weights, logarithms, flat, None, NONE, IGNORED, total)
            value = (each * weights).view(clients, batch).sum(1)
        return value, log_softmax_backward(d, logarithms, 1, outputs.dtype).view(outputs.shape)
    outputs = outputs.detach().requires_grad_()
    with torch.enable_grad():
        # Copies, which a loss may change in place.
        values = [
            loss(of_client[:size].clone(), targets[:size])
            for loss, of_client, targets, size in zip(losses, outputs.unbind(), y.unbind(), sizes, strict=True)
        ]
        value = torch.stack(values) * shares
        return value.detach(), torch.autograd.grad(value.sum(), outputs)[0]


def sample_weights(like: Tensor, sizes: Sequence[int], shares: float | Tensor) -> Tensor:
    """Make each sample's weight in its client's mean loss, times the client's share: zero for those that fill up."""
    batch = like.shape[1]
    counts = torch.tensor(sizes, device="cpu")[:, None]
    there = torch.arange(batch, device="cpu") < counts
    return sent((there.double() / counts).to(like.dtype), like.device) * (
        shares[:, None] if isinstance(shares, Tensor) else shares
    )
