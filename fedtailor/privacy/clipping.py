"""The norm of a client's change, and its clipping: the same at server and client."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def norm(change: Mapping[str, Tensor]) -> float:
    """Compute the norm of the whole change, in double precision."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in change.values()))


def clipped(change: Mapping[str, Tensor], bound: float) -> dict[str, Tensor]:
    """Scale a change down to this norm, if it is longer. One of infinite length is none: finite numbers can differ by
    more than there are numbers."""
    length = norm(change)
    if not math.isfinite(length):
        return {name: torch.zeros_like(tensor) for name, tensor in change.items()}
    return {name: tensor * (bound / length) if length > bound else tensor for name, tensor in change.items()}
