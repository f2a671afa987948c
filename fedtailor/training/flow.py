"""The flow of data through a network, read off the autograd graph of one forward pass.

The graph knows every use of a parameter: by its layer's own forward, by a function that takes the weight, or by another
layer that shares it.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedtailor.training.inputs import Held, tensors

INPUT = "\0input"  # stands for the samples among the layers


@dataclass
class Flow:
    """When each layer is used last, and the layers whose outputs reach it."""

    last: dict[str, int] = field(default_factory=dict)
    before: dict[str, set[str]] = field(default_factory=dict)


def trace(module: nn.Module, owners: Mapping[int, str], example: Held) -> Flow:
    """Trace one forward pass in evaluation mode. `owners` has the layer of each parameter, by the parameter's id."""
    names = dict(owners)

    def tracked(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        leaf = value.detach().clone().requires_grad_()
        names[id(leaf)] = INPUT
        kept.append(leaf)  # an id is that of a living object
        return leaf.clone()  # which a network may change in place

    kept: list[Tensor] = []
    module.eval()
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = module(*map(tracked, tensors(example)))
    return _read([t.grad_fn for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.grad_fn is not None], names)


def _read(ends: list[Any], names: Mapping[int, str]) -> Flow:
    flow = Flow()
    reached: dict[Any, frozenset[str]] = {}  # of each operation, the layers that it depends on
    for operation in _in_order(ends):
        inputs = [given for given, _ in operation.next_functions if given is not None]
        own = names.get(id(getattr(operation, "variable", None)))
        below = frozenset([own] if own is not None else ()).union(*(reached[given] for given in inputs))
        reached[operation] = below
        for given in inputs:
            layer = names.get(id(getattr(given, "variable", None)))
            if layer not in (None, INPUT):
                flow.last[layer] = max(flow.last.get(layer, -1), operation._sequence_nr())
            if len(reached[given]) == 1:  # an operation that joins a layer's own parameters to something else
                (alone,) = reached[given]
                flow.before.setdefault(alone, set()).update(below - {alone})
    return flow


def _in_order(ends: list[Any]) -> Iterator[Any]:
    """Yield all operations behind these, each after its inputs."""
    done: set[Any] = set()
    left = [(end, False) for end in ends]
    while left:
        operation, ready = left.pop()
        if operation in done:
            continue
        if ready:
            done.add(operation)
            yield operation
        else:
            left.append((operation, True))
            left += [(given, False) for given, _ in operation.next_functions if given is not None]
