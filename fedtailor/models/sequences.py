"""Networks for sequences: tokens (length,) as whole numbers, or windows (channels, length) of measured values.

Token 0 is padding, wherever it is in a sequence: it does not change the outputs. Each network is a body and a linear
head, so that methods can cut it between them.
"""

from math import sqrt

import torch
from torch import Tensor, nn

from fedtailor.training.inputs import Shape

EMBEDDING = 64  # numbers for each token
HEADS, BLOCKS = 4, 2  # of the transformer


def gru(shape: Shape, classes: int, width: int = 128, tokens: int | None = None) -> nn.Module:
    """One GRU layer, whose last state is the input of a linear head."""
    return nn.Sequential(Recurrent(shape, width, tokens), nn.Linear(width, classes))


def cnn1d(shape: Shape, classes: int, *widths: int) -> nn.Module:
    """Convolutions along the window, halved by pooling between them, and the mean over time; two of 64 maps, if no
    widths are given."""
    layers: list[nn.Module] = []
    before = shape[0]
    for after in widths or (64, 64):
        layers += [nn.MaxPool1d(2, ceil_mode=True)] if layers else []
        layers += [nn.Conv1d(before, after, 5, padding=2), nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(before, classes))


def transformer(shape: Shape, classes: int, width: int = 64, tokens: int | None = None) -> nn.Module:
    """Two blocks of attention with learned positions, and the mean over the sequence."""
    return nn.Sequential(Attentive(shape, width, tokens), nn.Linear(width, classes))


def packed(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Move padding behind the other tokens; return these, and where they are (samples × length)."""
    there = tokens != 0
    count = there.sum(1, keepdim=True)
    places = torch.where(there, there.cumsum(1), count + there.logical_not().cumsum(1)) - 1
    return torch.zeros_like(tokens).scatter(1, places, tokens), torch.zeros_like(there).scatter(1, places, there)


class Recurrent(nn.Module):
    """A GRU over the embedded tokens or over a window; its last state, not counting padding."""

    def __init__(self, shape: Shape, width: int, tokens: int | None) -> None:
        super().__init__()
        self.embedding = None if tokens is None else nn.Embedding(tokens, EMBEDDING, padding_idx=0)
        self.gru = nn.GRU(shape[0] if tokens is None else EMBEDDING, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is None:
            return self.gru(x.transpose(1, 2))[0][:, -1]  # type: ignore[no-any-return]
        x, there = packed(x)
        states = self.gru(self.embedding(x))[0]
        last = (there.sum(1) - 1).clamp(min=0)
        return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)  # type: ignore[no-any-return]


class Attentive(nn.Module):
    """Blocks of attention over the embedded tokens or over a window; the mean of their outputs, without padding."""

    def __init__(self, shape: Shape, width: int, tokens: int | None) -> None:
        super().__init__()
        self.windows = tokens is None
        self.embedding: nn.Module = (
            nn.Linear(shape[0], width) if tokens is None else nn.Embedding(tokens, width, padding_idx=0)
        )
        self.positions = Positions(shape[-1], width)
        self.blocks = nn.ModuleList(AttentionBlock(width) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        if self.windows:
            x = x.transpose(1, 2)
            there = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        else:
            x, there = packed(x)
        x = self.positions(self.embedding(x))
        for block in self.blocks:
            x = block(x, there)
        weights = there.to(x.dtype).unsqueeze(2)
        summed: Tensor = (self.norm(x) * weights).sum(1)
        return summed / weights.sum(1).clamp(min=1)


class Positions(nn.Module):
    """Learned vectors that are added to those of a sequence, by place."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[1]]


class AttentionBlock(nn.Module):
    """Attention, then two dense layers, each added to its normalised input (pre-norm)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            layer(normed).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(2, 3) / sqrt(q.shape[3])
        # Not −∞, which makes NaN of a sequence that is all padding.
        scores = scores.masked_fill(~there[:, None, None], torch.finfo(scores.dtype).min)
        x = x + self.output((scores.softmax(3) @ v).transpose(1, 2).flatten(2))
        return x + self.dense(x)  # type: ignore[no-any-return]
