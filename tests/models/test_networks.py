"""The papers' networks: their sizes, and the places of their pools."""

import torch
from torch import Tensor, nn

from fedtailor.models import networks


def same_pool(x: Tensor) -> Tensor:
    """Max-pooling 3×3 with stride 2 and "SAME" padding by TensorFlow's rule, window by window."""
    height, width = x.shape[2:]

    def windows(size: int) -> list[slice]:
        count = -(-size // 2)
        before = max((count - 1) * 2 + 3 - size, 0) // 2  # the smaller half of the padding comes first
        return [slice(max(start, 0), start + 3) for start in range(-before, 2 * count - before, 2)]

    rows = [torch.stack([x[:, :, r, c].amax((2, 3)) for c in windows(width)], -1) for r in windows(height)]
    return torch.stack(rows, -2)


def test_pflegos_pools_are_where_the_releases_are() -> None:
    """32 to 16 to 8: 4,096 features before the dense layer of 384."""
    torch.manual_seed(0)
    module = networks.pflego_cnn((3, 32, 32), 10)
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linear] == [(4096, 384), (384, 192), (192, 10)]
    first, second = (layer for layer in module.modules() if isinstance(layer, nn.Conv2d))
    assert (first.kernel_size, first.out_channels, second.out_channels) == ((5, 5), 64, 64)
    x = torch.randn(3, 3, 32, 32)
    hidden = same_pool(first(x).relu())
    assert hidden.shape[2:] == (16, 16)
    hidden = same_pool(second(hidden).relu()).flatten(1)
    for layer in linear[:-1]:
        hidden = layer(hidden).relu()
    torch.testing.assert_close(module(x), linear[-1](hidden))
