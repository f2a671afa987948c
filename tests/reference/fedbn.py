"""FedBN on state dicts with `torch.optim.SGD` (Li et al. 2021)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

State = dict[str, Tensor]


def fedbn(
    module: nn.Module,
    kept: tuple[str, ...],
    data: list[tuple[Tensor, Tensor]],
    rounds: list[list[int]],
    order: Callable[[int, int], list[Tensor | None]],
    *,
    lr: float,
    weight_decay: float,
) -> tuple[State, dict[int, State]]:
    """Run the rounds with these participants on copies of `module`, whose values are overwritten.

    Tensors whose names begin as `kept` stay at their clients. Return those that are shared, and each client's own.
    """
    shared = copied(module)
    own: dict[int, State] = {}
    for number, participants in enumerate(rounds, 1):
        ends = []
        for i in participants:
            module.load_state_dict({**shared, **own.get(i, {})})
            module.train()
            optimizer = torch.optim.SGD(module.parameters(), lr=lr, weight_decay=weight_decay)
            x, y = data[i]
            for chosen in order(number, i):
                optimizer.zero_grad()
                functional.cross_entropy(module(x[chosen]), y[chosen]).backward()
                optimizer.step()
            ends.append(copied(module))
            own[i] = {name: tensor for name, tensor in ends[-1].items() if name.startswith(kept)}
        weights = [len(data[i][1]) for i in participants]
        for name in shared:
            if not name.startswith(kept):
                shared[name] = sum(n * end[name] for n, end in zip(weights, ends, strict=True)) / sum(weights)
    return shared, own


def copied(module: nn.Module) -> State:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
