"""Networks and runs for tests of pretrained weights, frozen parts and adapters."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers import digits

SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "lr": 0.1, "seed": 5, "engine": "in-process"}


def three_clients() -> list[tuple[Tensor, Tensor]]:
    return digits([24, 17, 30])


class Backbone(nn.Module):
    """An encoder with BatchNorm and dropout, and a classifier."""

    def __init__(self, input_shape: Any = (64,), num_classes: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.4)), *(nn.Linear(20, 12), nn.ReLU())
        )
        self.classifier = nn.Linear(12, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.encoder(x))
        return out


class Attention(nn.Module):
    """One head of self-attention over the eight rows of a digit, made of plain linear layers."""

    def __init__(self, input_shape: Any = (64,), num_classes: int = 10) -> None:
        super().__init__()
        self.classifier = nn.Linear(8, num_classes)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 8, 8)
        weights = (self.query(x) @ self.key(x).transpose(1, 2) / 8**0.5).softmax(2)
        x = self.norm(x + weights @ self.value(x))
        x = x + self.down(torch.relu(self.up(x)))
        out: Tensor = self.classifier(x.mean(1))
        return out
