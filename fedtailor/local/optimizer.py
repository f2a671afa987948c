"""Steps along gradients: SGD at the clients, SGD with momentum or Adam at the server."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ServerOptimizer = Literal["sgd", "momentum", "adam"]


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings of a local descent: those of `torch.optim.SGD`, and how the samples are batched."""

    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    epochs: int = 1
    steps: int | None = None  # in place of epochs: exactly so many batches
    batch: int | None = 32  # None: the whole training set is one batch
    drop_last: bool = False  # leave out an epoch's incomplete batch, unless it is the only one
    join_last: bool = False  # for BatchNorm: an epoch's last batch joins the one before if it has one sample


def sgd_step(
    theta: Tensor,
    gradient: Tensor,
    velocity: Tensor | None,
    settings: OptimizerSettings,
    scale: Tensor | None = None,
    fixed: list[slice] | None = None,
) -> Tensor | None:
    """Take one step of `torch.optim.SGD` in place, and return the velocity (None without momentum).

    v ← momentum · v + scale · (gradient + weight_decay · θ);  θ ← θ − lr · v. `gradient` is overwritten. `fixed` slices
    of `theta` do not move.
    """
    if settings.weight_decay:
        gradient.add_(theta, alpha=settings.weight_decay)
    if scale is not None:
        gradient.mul_(scale)
    for place in fixed or ():
        gradient[place].zero_()
    if not settings.momentum:
        theta.add_(gradient, alpha=-settings.lr)
        return None
    velocity = gradient.clone() if velocity is None else velocity.mul_(settings.momentum).add_(gradient)
    theta.add_(velocity, alpha=-settings.lr)
    return velocity


def server_step(
    state: dict[str, Tensor],
    name: str,
    gradient: Tensor,
    lr: float,
    optimizer: ServerOptimizer = "sgd",
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> None:
    """Move the server's tensor `name` along a gradient (Reddi et al., Adaptive Federated Optimization, 2021).

    Moments are kept beside it as `name/mean`, `name/square` and `name/step`. Momentum is v ← β₁ v + gradient.
    """
    if optimizer == "sgd":
        direction = gradient
    elif optimizer == "momentum":
        direction = state[f"{name}/mean"] = state.get(f"{name}/mean", torch.zeros_like(gradient)) * beta1 + gradient
    else:
        step = state.get(f"{name}/step", gradient.new_zeros(())) + 1
        mean = state.get(f"{name}/mean", torch.zeros_like(gradient)).lerp(gradient, 1 - beta1)
        square = state.get(f"{name}/square", torch.zeros_like(gradient)).lerp(gradient**2, 1 - beta2)
        state |= {f"{name}/step": step, f"{name}/mean": mean, f"{name}/square": square}
        direction = mean / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + eps)
    state[name] = state[name] - lr * direction
