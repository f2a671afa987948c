"""The first layer of networks on images of one channel: PyTorch's convolution beside a product with unfolded images.

    python -m benchmarks.first_layer

Forward, bias and the gradient of weights and bias, as a step of the chain takes them; the input needs no gradient. One
thread, by the processor, measured in turn, the best of several. Images lie as fedtailor's own do. Alone, and 8 clients
at once (a grouped convolution beside a batched product). Of two ways to unfold, the faster one counts.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measuring import best_of, table, timed
from fedtailor.training.chain import convolution_backward
from fedtailor.training.isolation import isolated

SHAPES = (("LeNet", 6, 5, 2), ("CNN", 32, 5, 0), ("CNN, same padding", 32, 5, 2), ("ResNet", 16, 3, 1))
BATCHES, CLIENTS, SIDE = (10, 32, 64), (1, 8), 28


def convolved(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> None:
    """One pass by PyTorch's convolution: (batch, clients, height, width), a filter bank for each client."""
    clients = x.shape[1]
    y = torch.conv2d(x, weight.flatten(0, 1), bias.flatten(), 1, padding, 1, clients)
    d = y  # of the right shape and strides
    wanted = (False, True, False)
    convolution_backward(
        d, x, weight.flatten(0, 1), None, (1, 1), (padding,) * 2, (1, 1), False, (0, 0), clients, wanted
    )
    d.sum((0, 2, 3))


def unfolded(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> None:
    """The same by products with unfolded images: (clients, batch · positions, taps)."""
    size = weight.shape[-1]
    wide = functional.pad(x, (padding,) * 4) if padding else x
    taps = wide.unfold(2, size, 1).unfold(3, size, 1).permute(1, 0, 2, 3, 4, 5).reshape(x.shape[1], -1, size * size)
    matrix = weight.flatten(2)
    d = torch.baddbmm(bias[:, None], taps, matrix.mT)
    torch.bmm(d.mT, taps)
    d.sum(1)


def columns(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> None:
    """The same with PyTorch's own unfolding: (batch, clients, taps, positions)."""
    size, clients = weight.shape[-1], x.shape[1]
    taps = functional.unfold(x, size, padding=padding).unflatten(1, (clients, -1))
    matrix = weight.flatten(2)
    d = torch.matmul(matrix, taps).add_(bias[:, :, None])
    torch.matmul(d, taps.mT).sum(0)
    d.sum((0, 3))


def run(repeat: int = 7, passes: int = 10) -> None:
    """Measure, and print the ratios: above 1, unfolded is faster."""
    rows = []
    with isolated():
        for name, channels, size, padding in SHAPES:
            for clients in CLIENTS:
                row = [f"{name}: 1→{channels}, {size}×{size}, {clients} at once"]
                for batch in BATCHES:
                    x = torch.rand(batch, SIDE, SIDE, clients).permute(0, 3, 1, 2)  # channels last, as federations have
                    weight, bias = torch.rand(clients, channels, 1, size, size), torch.rand(clients, channels)
                    ways: dict[str, Callable[[], None]] = {
                        way.__name__: partial(way, x, weight, bias, padding) for way in (convolved, unfolded, columns)
                    }
                    found = best_of(
                        {way: partial(timed, partial(_often, act, passes)) for way, act in ways.items()}, repeat
                    )
                    best = min(found["unfolded"].cpu, found["columns"].cpu)
                    row.append(f"{found['convolved'].cpu / best:.2f} ×")
                rows.append(row)
    print(table(["layer", *(f"batch {batch}" for batch in BATCHES)], rows))


def _often(act: Callable[[], None], times: int) -> None:
    for _ in range(times):
        act()


if __name__ == "__main__":
    run()
