"""A transformer of 10.7 million parameters over the rows of an image, to be federated by its adapters.

    fedtailor run fedavg --model examples.backbone:Backbone --clients 4 --max-train 20 --epochs 1 --rounds 1 --lora 8

All of its projections are `nn.Linear`, so LoRA reaches every one of them.
"""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Self-attention and a dense layer, each behind a LayerNorm and around a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        projected = (layer(y) for layer in (self.query, self.key, self.value))
        q, k, v = (z.unflatten(2, (self.heads, -1)).transpose(1, 2) for z in projected)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        y = torch.relu(self.up(self.norm2(x)))
        out: Tensor = x + self.down(y)
        return out


class Backbone(nn.Module):
    """Six blocks of width 384 between an embedding of each row and a classifier."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 384, depth: int = 6) -> None:
        super().__init__()
        channels, height, columns = input_shape
        self.classifier = nn.Linear(width, num_classes)
        self.embedding = nn.Linear(columns, width)
        self.positions = nn.Parameter(0.02 * torch.randn(channels * height, width))
        self.blocks = nn.Sequential(*(Block(width, heads=6) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x.flatten(1, 2)) + self.positions  # a token is a row of the image
        out: Tensor = self.classifier(self.norm(self.blocks(x)).mean(1))
        return out
