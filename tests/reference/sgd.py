"""Plain gradient descent, written a second time: the steps that `torch.optim.SGD` documents."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Slope = Callable[[Tensor, Tensor | None], Tensor]  # the gradient at a point on some samples; None: on all of them


def descend(
    slope: Slope,
    theta: Tensor,
    batches: Sequence[Tensor | None],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    velocity: Tensor | None = None,
    part: slice = slice(None),
) -> tuple[Tensor, Tensor]:
    """Take a step for each batch on the entries `part` alone. Return the new vector and velocity."""
    theta = theta.clone()
    velocity = torch.zeros_like(theta) if velocity is None else velocity.clone()
    for batch in batches:
        gradient = slope(theta, batch) + weight_decay * theta
        velocity[part] = momentum * velocity[part] + gradient[part]
        theta[part] = theta[part] - lr * velocity[part]
    return theta, velocity


def mean(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ w_i x_i / Σ w_i."""
    total = torch.zeros_like(vectors[0])
    for vector, weight in zip(vectors, weights, strict=True):
        total = total + weight * vector
    return total / sum(weights)
