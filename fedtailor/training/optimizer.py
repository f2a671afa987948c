"""Steps along gradients: SGD, Adam or AdamW at the clients, SGD with momentum or Adam at the server; and steps of the
server along the clients' mean change."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import torch
from torch import Tensor

from fedtailor.messages import State
from fedtailor.training.schedule import factor_at

Optimizer = Literal["sgd", "adam", "adamw"]
GradientOptimizer = Literal["sgd", "momentum", "adam"]
ServerOptimizer = Literal["sgd", "momentum", "nesterov", "adagrad", "yogi", "adam"]

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # of Adam, as in torch.optim
SERVER_BETA1, SERVER_BETA2, TAU = 0.9, 0.99, 1e-3  # of the steps along a mean change, β₁, β₂, τ (Reddi et al.)
# The server's rate η unless it is given. The adaptive ones move an entry by about η a round.
SERVER_LR: dict[ServerOptimizer, float] = {
    "sgd": 1.0, "momentum": 1.0, "nesterov": 1.0, "adagrad": 0.03, "yogi": 0.03, "adam": 0.03,
}  # fmt: skip


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings of a local descent: those of PyTorch's optimisers, and how the samples are batched.

    A step's learning rate is lr · factor · (the factor of `step_schedule`). `factor` is the round's, by the
    experiment's `schedule`.
    """

    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    epochs: int = 1
    steps: int | None = None  # in place of epochs: exactly so many batches
    batch: int | None = 32  # None: the whole training set is one batch
    drop_last: bool = False  # leave out an epoch's incomplete batch, unless it is the only one
    join_last: bool = False  # for BatchNorm: an epoch's last batch joins the one before if it has one sample
    kind: Optimizer = "sgd"
    clip: float | None = None  # largest norm of a step's gradient
    step_schedule: str = "constant"
    factor: float = 1.0
    share: float = 1.0  # of a descent's steps: all, or what a slow client has time for

    def factors(self, n_steps: int) -> Iterator[float]:
        """Yield the factor of the learning rate in each step of a descent."""
        if self.step_schedule == "constant":
            return repeat(self.factor, n_steps)
        return (self.factor * factor_at(self.step_schedule, n_steps, t) for t in range(1, n_steps + 1))

    @property
    def moments(self) -> tuple[str, ...]:
        """The names of the tensors that the optimiser remembers from step to step."""
        if self.kind == "sgd":
            return ("momentum",) if self.momentum else ()
        return ("mean", "square", "steps")


def optimizer_step(
    theta: Tensor,
    gradient: Tensor,
    moments: State,
    settings: OptimizerSettings,
    factor: float | Tensor = 1.0,
    scale: Tensor | None = None,
    fixed: Sequence[slice] = (),
) -> None:
    """Take one step of `torch.optim.SGD`, `Adam` or `AdamW` in place, with the learning rate lr · factor.

    SGD: v ← momentum · v + scale · (gradient + weight_decay · θ);  θ ← θ − lr · v. `scale` is a learning rate of its
    own for every entry: Adam multiplies the step by it. `moments` has what the optimiser remembers, updated in place
    (begin with an empty dictionary). `gradient` is overwritten. `fixed` slices of `theta` do not move.

    The rows of a matrix are vectors that take their steps at once; `factor` may then be a column, one for each.
    """
    if settings.clip is not None:
        for place in fixed:
            gradient[..., place].zero_()
        norm = gradient.norm() if gradient.dim() == 1 else gradient.norm(dim=1, keepdim=True)
        gradient.mul_((settings.clip / (norm + 1e-6)).clamp(max=1.0))  # as clip_grad_norm_ does
    lr = settings.lr * factor
    if settings.kind != "sgd":
        _adam_step(theta, gradient, moments, settings, lr if scale is None else lr * scale, fixed)
        return
    if settings.weight_decay:
        gradient.add_(theta, alpha=settings.weight_decay)
    if scale is not None:
        gradient.mul_(scale)
    for place in fixed:
        gradient[..., place].zero_()
    if settings.momentum:
        if "momentum" in moments:
            gradient = moments["momentum"].mul_(settings.momentum).add_(gradient)
        else:
            gradient = moments["momentum"] = gradient.clone()
    if isinstance(lr, Tensor):
        theta.sub_(gradient * lr)
    else:
        theta.add_(gradient, alpha=-lr)


def _adam_step(
    theta: Tensor,
    gradient: Tensor,
    moments: State,
    settings: OptimizerSettings,
    lr: float | Tensor,
    fixed: Sequence[slice],
) -> None:
    """Take a step of Adam or AdamW, with one learning rate or one for every entry."""
    if settings.weight_decay and settings.kind == "adam":
        gradient.add_(theta, alpha=settings.weight_decay)
    elif settings.weight_decay:
        before = [theta[..., place].clone() for place in fixed]
        theta.mul_(1 - lr * settings.weight_decay)
        for place, values in zip(fixed, before, strict=True):
            theta[..., place] = values
    for place in fixed:
        gradient[..., place].zero_()
    for name in settings.moments:
        if name not in moments:
            count = gradient.new_zeros(() if gradient.dim() == 1 else (len(gradient), 1))  # one for each vector
            moments[name] = count if name == "steps" else torch.zeros_like(gradient)
    mean = moments["mean"].lerp_(gradient, 1 - BETA1)
    square = moments["square"].mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
    steps = moments["steps"].add_(1)
    exact = steps.double() if steps.device.type != "mps" else steps  # which has no double precision
    if theta.dim() > 1 or theta.device.type != "cpu":  # nothing is read on the host
        t: float | Tensor = exact
    else:
        first, last = (float(bound) for bound in steps.aminmax())
        # Entries that were trained apart (a head alone) have taken different numbers of steps.
        t = first if first == last else exact
    size, spread = lr / (1 - BETA1**t), square.sqrt().div_((1 - BETA2**t) ** 0.5).add_(EPS)
    if isinstance(size, Tensor):
        theta.sub_(size * mean / spread)
    else:
        theta.addcdiv_(mean, spread, value=-size)


def server_step(
    state: dict[str, Tensor],
    name: str,
    gradient: Tensor,
    lr: float,
    optimizer: GradientOptimizer = "sgd",
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> None:
    """Move the server's tensor `name` along a gradient, by the steps of `torch.optim`.

    So Adam corrects its bias and has an ε of 1e-8, as in PFLEGO's release: it is not FedAdam (see `server_change`).
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


def server_moments(change: Tensor, optimizer: ServerOptimizer) -> State:
    """Make the moments with which an optimiser of mean changes begins: v_{−1} = τ², as Reddi et al. ask for."""
    mean, square = torch.zeros_like(change), torch.full_like(change, TAU**2)
    kept = {"sgd": {}, "momentum": {"mean": mean}, "nesterov": {"mean": mean}, "adagrad": {"square": square}}
    return kept.get(optimizer, {"mean": mean, "square": square})


def server_change(change: Tensor, moments: State, optimizer: ServerOptimizer, lr: float) -> tuple[Tensor, State]:
    """Compute the server's step for the clients' mean change Δ, and its new moments m and v (`mean`, `square`).

    FedAvgM: m ← β₁ m + Δ, and the step is η m (Hsu et al. 2019), or η (Δ + β₁ m) by Nesterov. The others are Algorithm
    2 of Reddi et al., Adaptive Federated Optimization, 2021: η m / (√v + τ), and nothing corrects a bias. Adagrad has
    no β₁.
    """
    if optimizer == "sgd":
        return lr * change, {}
    if optimizer in ("momentum", "nesterov"):
        m = SERVER_BETA1 * moments["mean"] + change
        return lr * (m if optimizer == "momentum" else change + SERVER_BETA1 * m), {"mean": m}
    v, squared = moments["square"], change**2
    if optimizer == "adagrad":
        v = v + squared
        return lr * change / (v.sqrt() + TAU), {"square": v}
    m = SERVER_BETA1 * moments["mean"] + (1 - SERVER_BETA1) * change
    if optimizer == "yogi":
        v = v - (1 - SERVER_BETA2) * squared * (v - squared).sign()
    else:
        v = SERVER_BETA2 * v + (1 - SERVER_BETA2) * squared
    return lr * m / (v.sqrt() + TAU), {"mean": m, "square": v}
