"""A small network, samples for it, and a client that has both."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fedtailor.training.client import Client
from fedtailor.training.network import Network
from fedtailor.training.optimizer import OptimizerSettings

Make = Callable[[], nn.Module]
SHAPE = (1, 12, 12)
X = torch.rand(37, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(4, (37,), generator=torch.Generator().manual_seed(1))

# Layers that begin a chain, by what is special about them.
LAYERS: dict[str, Make] = {
    "one channel, few maps": lambda: nn.Conv2d(1, 3, 5),
    "one channel, many maps": lambda: nn.Conv2d(1, 20, 5),
    "one channel, a kernel that is no square": lambda: nn.Conv2d(1, 4, (3, 5)),
    "one channel, padded": lambda: nn.Conv2d(1, 3, 3, padding=1),
    "one channel, stride": lambda: nn.Conv2d(1, 3, 3, 2),
    "one channel, dilation": lambda: nn.Conv2d(1, 3, 3, dilation=2),
    "no bias": lambda: nn.Conv2d(1, 3, 3, bias=False),
    "valid": lambda: nn.Conv2d(1, 3, 3, padding="valid"),
    "same": lambda: nn.Conv2d(1, 3, (3, 5), padding="same", dilation=(1, 2)),
    "groups": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=2)),
    "overlapping pools": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)),
    "dilated pools": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d((2, 3), dilation=2)),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.ReLU(), nn.Conv2d(1, 4, 3)), nn.Sequential(nn.ReLU(inplace=True))),
}


def small(batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norm = [nn.BatchNorm2d(3)] if batch_norm else []
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        *norm,
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(75, 8),
        nn.ReLU(),
        nn.Linear(8, 4),
    ).double()


def client(batch_norm: bool = False, keep_momentum: bool = False, **settings: Any) -> Client:
    """Client 1 in round 3 under seed 5."""
    network = Network(small(batch_norm))
    optimizer = OptimizerSettings(**{"lr": 0.1, "batch": 8, "epochs": 2, **settings})
    data, nothing = (X, Y), (X[:0], Y[:0])
    initial = network.vector.clone()
    return Client(1, 3, 5, {}, data, nothing, network, initial, functional.cross_entropy, optimizer, keep_momentum)
