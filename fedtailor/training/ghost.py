"""Clipped sums of per-example gradients in one pass forth and back through a chain of common layers.

The gradient of a linear layer by one example is the outer product d xᵀ, of norm ‖d‖ ‖x‖: its length is known without
it. So one pass finds the norms of all examples, and the sum of their clipped gradients is one matrix product a layer,
each example's d times its factor. A convolution's gradient by one example is small, and is computed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtailor.training.chain import Chain, chain_of, convolution_backward, leaves, padding_of
from fedtailor.training.inputs import Held
from fedtailor.training.network import Loss, Network


class Linear:
    """A linear layer's input x and the gradient d of its output: g_i = d_i x_iᵀ, and d_i for the bias."""

    def __init__(self, layer: nn.Linear, x: Tensor, d: Tensor) -> None:
        self.layer, self.x, self.d = layer, x, d

    def squares(self) -> Tensor:
        """Compute the squared norm of each example's gradient."""
        lengths = self.x.square().sum(1)
        return self.d.square().sum(1) * (lengths if self.layer.bias is None else lengths + 1)

    def write(self, factors: Tensor) -> None:
        """Write the sum of the examples' gradients, each times its factor, into the layer's own gradient."""
        d = self.d * factors[:, None]
        assert self.layer.weight.grad is not None
        torch.mm(d.t(), self.x, out=self.layer.weight.grad)
        if self.layer.bias is not None:
            torch.sum(d, 0, out=self.layer.bias.grad)

    def back(self) -> Tensor:
        """Compute the gradient of the input."""
        return self.d.mm(self.layer.weight)


class Convolution:
    """A convolution's input x and the gradient d of its output: g_i is the sum of d_i times the patches of x_i."""

    def __init__(self, layer: nn.Conv2d, x: Tensor, d: Tensor) -> None:
        self.layer, self.x, self.d = layer, x, d

    def squares(self) -> Tensor:
        """Compute the squared norm of each example's gradient."""
        layer, d = self.layer, self.d.flatten(2)
        patches = functional.unfold(self.x, layer.kernel_size, layer.dilation, padding_of(layer), layer.stride)
        self.weights, self.biases = torch.bmm(d, patches.transpose(1, 2)).flatten(1), d.sum(2)
        squares = self.weights.square().sum(1)
        return squares if layer.bias is None else squares + self.biases.square().sum(1)

    def write(self, factors: Tensor) -> None:
        """Write the sum of the examples' gradients, each times its factor, into the layer's own gradient."""
        weight, bias = self.layer.weight, self.layer.bias
        assert weight.grad is not None
        weight.grad.copy_((factors @ self.weights).view(weight.shape))
        if bias is not None:
            torch.mv(self.biases.t(), factors, out=bias.grad)

    def back(self) -> Tensor:
        """Compute the gradient of the input."""
        layer, only_input = self.layer, (True, False, False)
        geometry = (layer.stride, padding_of(layer), layer.dilation, False, (0, 0), 1)
        return convolution_backward(self.d, self.x, layer.weight, None, *geometry, only_input)[0]  # type: ignore[no-any-return]


KINDS: dict[type[nn.Module], Any] = {nn.Linear: Linear, nn.Conv2d: Convolution}


class Ghost:
    """The layers of a chain, and which of them are in the trained part of the vector."""

    def __init__(self, chain: Chain, layers: list[nn.Module], trained: list[bool]) -> None:
        self.links, self.layers, self.trained, self.first = chain.links, layers, trained, trained.index(True)

    def write_clipped_sum(self, x: Tensor, y: Tensor, loss: Loss, clip: float) -> Tensor:
        """Write the sum of the examples' gradients, each clipped, into the network's; return their norms.

        The sum is of no use if one of the norms is not finite. Autograd must be off meanwhile.
        """
        given, backs = [], []
        for link in self.links:
            given.append(x)
            x, back = link(x)
            backs.append(back)
        d, trained = gradients_of_losses(x, y, loss), list[Any]()
        for place in range(len(self.layers) - 1, self.first - 1, -1):
            kind = KINDS.get(type(self.layers[place]))
            layer = kind(self.layers[place], given[place], d) if kind else None
            if self.trained[place]:
                trained.append(layer)
            if place > self.first:
                d = backs[place](d, True) if layer is None else layer.back()
        norms = torch.stack([layer.squares() for layer in trained]).sum(0).sqrt()
        factors = clip_factors(norms, clip)
        for layer in trained:
            layer.write(factors)
        return norms


def ghost_of(network: Network, function: nn.Module, x: Held, part: slice) -> Ghost | None:
    """Return the way to clipped sums through a chain; None if the network is no chain or the part cuts a layer."""
    chain = chain_of(network, function, x)
    if chain is None:
        return None
    layers, trained = list(leaves(function)), []
    for layer in layers:
        places = [place_of(network, parameter) for parameter in layer.parameters()]
        inside = [part.start <= place.start and place.stop <= part.stop for place in places]
        outside = [place.stop <= part.start or part.stop <= place.start for place in places]
        if not (all(inside) or all(outside)) or (isinstance(layer, nn.Conv2d) and layer.groups > 1):
            return None
        trained.append(bool(places) and all(inside))
    return Ghost(chain, layers, trained) if any(trained) else None


def place_of(network: Network, parameter: Tensor) -> slice:
    """Find the place of a parameter in the vector, of which it is a view."""
    start = parameter.storage_offset() - network.vector.storage_offset()
    return slice(start, start + parameter.numel())


def clip_factors(norms: Tensor, clip: float) -> Tensor:
    """Compute min(1, C / ‖g_i‖)."""
    return (clip / norms).clamp(max=1.0)


def gradients_of_losses(outputs: Tensor, y: Tensor, loss: Loss) -> Tensor:
    """Compute the gradient of each example's own loss by its outputs.

    Cross-entropy's is written out; for any other loss, each example is a batch of one.
    """
    if loss is functional.cross_entropy and outputs.dim() == 2 and y.dim() == 1 and not y.is_floating_point():
        d = torch.softmax(outputs, 1)
        return d.scatter_add_(1, y[:, None], d.new_full((len(y), 1), -1.0))
    outputs = outputs.detach().clone().requires_grad_()
    with torch.enable_grad():
        losses = [loss(o.clone(), t) for o, t in zip(outputs.split(1), y.split(1), strict=True)]
        return torch.autograd.grad(torch.stack(losses).sum(), outputs)[0]
