"""MOON on plain PyTorch modules, the contrast sample by sample (Li et al. 2021)."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


def moon(
    module: nn.Module,
    body_of: Callable[[nn.Module], Callable[[Tensor], Tensor]],
    data: list[tuple[Tensor, Tensor]],
    rounds: list[list[int]],
    order: Callable[[int, int], list[Tensor | None]],
    *,
    mu: float,
    temperature: float,
    lr: float,
) -> tuple[nn.Module, dict[int, nn.Module]]:
    """Run the rounds with these participants from the model `module`, whose last child is its head. Return the global
    model and each participant's last one."""
    shared, last = copy.deepcopy(module), {}
    for number, participants in enumerate(rounds, 1):
        ends, weights = [], []
        for i in participants:
            x, y = data[i]
            local, old = copy.deepcopy(shared).train(), last.get(i, shared).eval()
            shared.eval()
            for chosen in order(number, i):
                xs, ys = (x, y) if chosen is None else (x[chosen], y[chosen])
                with torch.no_grad():
                    z_glob, z_prev = body_of(shared)(xs), body_of(old)(xs)
                z = body_of(local)(xs)
                loss = functional.cross_entropy(list(local.children())[-1](z), ys)
                loss = loss + mu * contrast(z, z_glob, z_prev, temperature)
                local.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for parameter in local.parameters():
                        parameter -= lr * parameter.grad
            last[i] = local
            ends.append(local.state_dict())
            weights.append(len(y))
        shared = copy.deepcopy(shared)
        shared.load_state_dict(
            {name: sum(n * end[name] for n, end in zip(weights, ends, strict=True)) / sum(weights) for name in ends[0]}
        )
    return shared, last


def contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, temperature: float) -> Tensor:
    """ℓ_con as the paper writes it, sample by sample."""
    total = torch.zeros((), dtype=z.dtype)
    for a, b, c in zip(z, z_glob, z_prev, strict=True):
        positive = torch.exp((a @ b) / (a @ a).sqrt() / (b @ b).sqrt() / temperature)
        negative = torch.exp((a @ c) / (a @ a).sqrt() / (c @ c).sqrt() / temperature)
        total = total - torch.log(positive / (positive + negative))
    return total / len(z)
