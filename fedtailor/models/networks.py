"""The papers' networks, as plain Sequentials for any input shape and number of classes.

Pooling comes before ReLU: max-pooling and ReLU commute, and this order does a quarter of the ReLU's work.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

Shape = Sequence[int]


def logistic(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))


def mlp(shape: Shape, classes: int, *widths: int) -> nn.Module:
    """Dense layers with ReLU between them; one of 200 units, as PFLEGO's for the MNIST family, if none are given."""
    sizes = [prod(shape), *(widths or (200,))]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def cnn(shape: Shape, classes: int) -> nn.Module:
    """The FedAvg CNN, as PGFed uses it: 878,538 parameters on CIFAR-10."""
    convolutions = nn.Sequential(
        *(nn.Conv2d(shape[0], 32, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU()),
        nn.Flatten(),
    )
    return _then_dense(convolutions, shape, 512, classes)


def lenet(shape: Shape, classes: int) -> nn.Module:
    """The LeNet-like network of pFedMB: convolutions of 6 and 16 maps, dense layers of 120 and 84."""
    convolutions = nn.Sequential(
        *(nn.Conv2d(shape[0], 6, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU()),
        nn.Flatten(),
    )
    return _then_dense(convolutions, shape, 120, 84, classes)


def pflego_cnn(shape: Shape, classes: int) -> nn.Module:
    """PFLEGO's network for CIFAR-10: two convolutions of 64 maps, dense layers of 384 and 192.

    Its pools halve an image, 32 to 16 to 8, as those of the release do: the last window of a row reaches over the edge
    by one ("SAME" in TensorFlow, for an even size), where nothing counts. That is PyTorch's ceil_mode.
    """
    convolutions = nn.Sequential(
        *(nn.Conv2d(shape[0], 64, 5, padding="same"), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU()),
        *(nn.Conv2d(64, 64, 5, padding="same"), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU()),
        nn.Flatten(),
    )
    return _then_dense(convolutions, shape, 384, 192, classes)


def omniglot_cnn(shape: Shape, classes: int) -> nn.Module:
    """PFLEGO's network for Omniglot: four convolutions of 64 maps, each halved by pooling, and the head."""
    layers: list[nn.Module] = []
    for channels in (shape[0], 64, 64, 64):
        layers += [nn.Conv2d(channels, 64, 3, padding="same"), nn.MaxPool2d(2), nn.ReLU()]
    return _then_dense(nn.Sequential(*layers, nn.Flatten()), shape, classes)


def resnet(shape: Shape, classes: int) -> nn.Module:
    """A small residual network with BatchNorm: a stem and three blocks of 16, 32 and 64 maps (ResNet-8)."""
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)),
    )


class Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if before != after or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolutions(x) + self.shortcut(x))


def _then_dense(convolutions: nn.Sequential, shape: Shape, *widths: int) -> nn.Sequential:
    """Append dense layers to convolutions; their input size is what these give for an image of this shape."""
    with torch.no_grad():
        device = next(convolutions.parameters()).device
        features = convolutions(torch.zeros(1, *shape, device=device)).shape[1]
    sizes = [features, *widths]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*convolutions, *layers[:-1])
