"""Noise for privacy: from a stream that is named in a simulation, from the operating system at a real site.

The server knows the experiment's seed. At a real site it could take away whatever noise was drawn from a stream of it.
"""

import os
from dataclasses import dataclass
from math import pi

import numpy as np
import torch
from torch import Tensor

BITS = 53  # of a uniform number: all that a double's fraction has


@dataclass
class Noise:
    """A source of random numbers for privacy; without a stream, the operating system's generator.

    All that one client draws in a round comes from one source, one draw after the other: no two are the same.
    """

    stream: torch.Generator | None = None

    def uniform(self, n: int) -> Tensor:
        """Draw n numbers from the uniform distribution over [0, 1), in double precision on the CPU."""
        if self.stream is not None:
            return torch.rand(n, generator=self.stream, dtype=torch.float64, device="cpu")
        words = np.frombuffer(os.urandom(8 * n), np.uint64)
        return torch.from_numpy((words >> np.uint64(64 - BITS)).astype(np.float64) * 2.0**-BITS)

    def normal(self, like: Tensor, std: float) -> Tensor:
        """Draw from N(0, std²) for every entry of a tensor."""
        if self.stream is not None:
            drawn = torch.randn(like.shape, generator=self.stream, dtype=like.dtype, device="cpu")
        else:
            drawn = self._box_muller(like.numel()).view(like.shape).to(like.dtype)
        return drawn.mul_(std).to(like.device)

    def seed(self) -> int:
        """Draw a seed for a generator of PyTorch's."""
        return int(self.uniform(1).item() * 2**BITS)

    def _box_muller(self, n: int) -> Tensor:
        """Compute √(−2 ln u) cos 2πv and √(−2 ln u) sin 2πv, two independent normal numbers, from uniform u and v."""
        half = (n + 1) // 2
        length = (1 - self.uniform(half)).log_().mul_(-2).sqrt_()  # 1 − u, as u may be 0
        angle = self.uniform(half).mul_(2 * pi)
        return torch.cat([length * angle.cos(), length * angle.sin()])[:n]
