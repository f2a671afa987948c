"""What a slow version may know of a federation."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Problem:
    """Each client's risk on some or all of its samples, and which it sees in each step of a round."""

    risk: Callable[[int, Tensor, Tensor | None], Tensor]
    order: Callable[[int, int], list[Tensor | None]]
    initial: Tensor
    samples: list[int]

    def slope(self, client: int, theta: Tensor, chosen: Tensor | None = None) -> tuple[float, Tensor]:
        """A risk and its gradient by autograd."""
        theta = theta.detach().clone().requires_grad_()
        value = self.risk(client, theta, chosen)
        (gradient,) = torch.autograd.grad(value, theta)
        return value.item(), gradient
