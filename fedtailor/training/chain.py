"""Gradients without autograd: the forward and backward pass of a plain chain of layers, written out.

Autograd records every operation, takes fresh memory for every gradient and adds it to what was there before. A chain of
common layers needs none of that: here the operations that autograd would call are called in the same order, and write
into the network's gradient. So the numbers are the same to the last bit, in less time; but for the biases of
convolutions, whose gradient is summed in another order, and agrees up to rounding.

A link of the chain is a function of the input. It returns the layer's output and its backward pass: a function of the
output's gradient that writes those of the layer's parameters and returns that of the input, if it is wanted.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from fedtailor.training.inputs import Inputs, Lazy, Several
from fedtailor.training.network import Loss, Network

Back = Callable[[Tensor, bool], Tensor]
Link = Callable[[Tensor], tuple[Tensor, Back]]

aten = torch.ops.aten
# The operations of the backward pass, each as its one overload: looking that up takes longer than some of them.
convolution_backward: Any = aten.convolution_backward.default
max_pool2d: Any = aten.max_pool2d_with_indices.default
max_pool2d_backward: Any = aten.max_pool2d_with_indices_backward.default
threshold_backward: Any = aten.threshold_backward.default
nll_loss: Any = aten.nll_loss_forward.default
nll_loss_backward: Any = aten.nll_loss_backward.default
log_softmax_backward: Any = aten._log_softmax_backward_data.default
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MEAN, IGNORED = 1, -100  # cross-entropy's defaults: the reduction, and the target that is left out


def linear(layer: nn.Linear) -> Link:
    weight, bias = _detached(layer)
    transposed = weight.t()
    weight_gradient, bias_gradient = _gradients(layer)

    def forward(x: Tensor) -> tuple[Tensor, Back]:
        def back(d: Tensor, wanted: bool) -> Tensor:
            torch.mm(d.t(), x, out=weight_gradient)
            if bias_gradient is not None:
                torch.sum(d, 0, out=bias_gradient)
            return d.mm(weight) if wanted else d

        return (x.mm(transposed) if bias is None else torch.addmm(bias, x, transposed)), back

    return forward


def convolution(layer: nn.Conv2d) -> Link:
    weight, bias = _detached(layer)
    weight_gradient, bias_gradient = _gradients(layer)
    geometry = (layer.stride, padding_of(layer), layer.dilation)

    def forward(x: Tensor) -> tuple[Tensor, Back]:
        def back(d: Tensor, wanted: bool) -> Tensor:
            of_which = (wanted, True, False)
            dx, dw, _ = convolution_backward(d, x, weight, None, *geometry, False, (0, 0), layer.groups, of_which)
            weight_gradient.copy_(dw)
            if bias_gradient is not None:  # a sum of its own is faster than to ask the convolution for it
                torch.sum(d, (0, 2, 3), out=bias_gradient)
            return dx if wanted else d

        return torch.conv2d(x, weight, bias, *geometry, layer.groups), back

    return forward


def padding_of(layer: nn.Conv2d) -> Any:
    """Return a convolution's padding in numbers."""
    if not isinstance(layer.padding, str):
        return layer.padding
    sizes = zip(layer.kernel_size, layer.dilation, strict=True)
    return tuple((size - 1) * dilation // 2 if layer.padding == "same" else 0 for size, dilation in sizes)


def max_pool(layer: nn.MaxPool2d) -> Link:
    pair = nn.modules.utils._pair
    geometry = (*map(pair, (layer.kernel_size, layer.stride, layer.padding, layer.dilation)), layer.ceil_mode)

    def forward(x: Tensor) -> tuple[Tensor, Back]:
        y, places = max_pool2d(x, *geometry)
        return y, lambda d, wanted: max_pool2d_backward(d, x, *geometry, places) if wanted else d

    return forward


def relu(layer: nn.ReLU) -> Link:
    def forward(x: Tensor) -> tuple[Tensor, Back]:
        y = torch.relu(x)
        return y, lambda d, wanted: threshold_backward(d, y, 0) if wanted else d

    return forward


def flatten(layer: nn.Flatten) -> Link:
    return lambda x: (x.flatten(1), lambda d, wanted: d.reshape(x.shape))


LINKS: dict[type[nn.Module], Callable[[Any], Link]] = {
    nn.Linear: linear,
    nn.Conv2d: convolution,
    nn.MaxPool2d: max_pool,
    nn.ReLU: relu,
    nn.Flatten: flatten,
}


DIMENSIONS = {nn.Linear: 2, nn.Conv2d: 4, nn.MaxPool2d: 4}  # of the input, where a layer would take others too


class Chain:
    """The forward and backward pass of a network, or of its head, if it is a chain of common layers.

    Autograd must be off meanwhile.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.links = [LINKS[type(layer)](layer) for layer in layers]
        self.first = next(place for place, layer in enumerate(layers) if [*layer.parameters()])  # with a gradient

    def begin(self, x: Tensor) -> Tensor:
        """Run the layers before the first parameter, once for all samples."""
        for link in self.links[: self.first]:
            x, _ = link(x)
        return x

    def differentiate(self, x: Tensor, y: Tensor, loss: Loss) -> None:
        """Write the gradient of the loss into that of the network, for samples that `begin` has seen."""
        way_back: list[Back] = []
        for link in self.links[self.first :]:
            x, back = link(x)
            way_back.append(back)
        d = _gradient_of_loss(x, y, loss)
        for back in reversed(way_back[1:]):
            d = back(d, True)
        way_back[0](d, False)


def chain_of(network: Network, function: nn.Module, x: Inputs) -> Chain | None:
    """Return the chain of a network, or of its head, for samples like these; None if it has none.

    It is found once and kept at the network. Hooks are looked for again only after one was registered anywhere.
    """
    x = x.like if isinstance(x, Lazy) else x
    if network.autocast or isinstance(x, Several):  # autograd knows what is computed in which precision
        return None
    key = (function is network.module, x.dim(), x.device.type)
    if key not in network.chains:
        network.chains[key] = find_chain(function, x)
    chain: Chain | None = network.chains[key]
    if chain is not None and RemovableHandle.next_id != network.hooks_seen:
        if has_hooks(network.module):
            return None
        network.hooks_seen = RemovableHandle.next_id
    return chain


def find_chain(module: nn.Module, x: Tensor) -> Chain | None:
    """Make the chain of this module; None if it is none, or not on the CPU. The caller must look for hooks."""
    layers = list(leaves(module))
    return Chain(layers) if x.device.type == "cpu" and is_chain(module, layers, x) else None


def is_chain(module: nn.Module, layers: list[nn.Module], x: Tensor) -> bool:
    """Find out whether these layers of a module are supported for samples like these, and share no parameters."""
    parameters = list(module.parameters())
    own = sum(len(list(layer.parameters())) for layer in layers)  # more than these if layers share some
    if not parameters or own != len(parameters):
        return False
    dimensions = x.dim()
    for layer in layers:
        if type(layer) not in LINKS or not _common(layer) or DIMENSIONS.get(type(layer), dimensions) != dimensions:
            return False
        dimensions = 2 if isinstance(layer, nn.Flatten) else dimensions
    return all(p.requires_grad and p.grad is not None for p in parameters)


def has_hooks(module: nn.Module) -> bool:
    """Find out whether the module, its layers or its parameters have hooks of any kind."""
    everything: list[Any] = [*module.modules(), *module.parameters()]
    return any(
        any(vars(thing).get(name) for name in HOOKS) or bool(getattr(thing, "_backward_hooks", None))
        for thing in everything
    )


def leaves(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a Sequential, and of those in it."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from leaves(child)
    else:
        yield module


def _common(layer: nn.Module) -> bool:
    """Find out whether the link of a layer's kind supports its settings."""
    match layer:
        case nn.Conv2d():
            even = any((k - 1) * d % 2 for k, d in zip(layer.kernel_size, layer.dilation, strict=True))
            return layer.padding_mode == "zeros" and not (layer.padding == "same" and even)
        case nn.MaxPool2d():
            return not layer.return_indices
        case nn.Flatten():
            return (layer.start_dim, layer.end_dim) == (1, -1)
    return True


def _gradient_of_loss(outputs: Tensor, y: Tensor, loss: Loss) -> Tensor:
    """Compute the gradient of the loss by the outputs: of cross-entropy written out, of any other one by autograd."""
    if loss is functional.cross_entropy and outputs.dim() == 2 and y.dim() == 1:
        logarithms = torch.log_softmax(outputs, 1)
        value, total = nll_loss(logarithms, y, None, MEAN, IGNORED)
        d = nll_loss_backward(value.fill_(1.0), logarithms, y, None, MEAN, IGNORED, total)
        return log_softmax_backward(d, logarithms, 1, outputs.dtype)  # type: ignore[no-any-return]
    outputs.requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(loss(outputs.clone(), y), outputs)[0]  # a copy, which a loss may change in place


def _detached(layer: nn.Linear | nn.Conv2d) -> tuple[Tensor, Tensor | None]:
    return layer.weight.detach(), None if layer.bias is None else layer.bias.detach()


def _gradients(layer: nn.Linear | nn.Conv2d) -> tuple[Tensor, Tensor | None]:
    assert layer.weight.grad is not None
    return layer.weight.grad, None if layer.bias is None else layer.bias.grad
