"""The layers of a network: which are trained, which are frozen, and which are the head.

A layer is a submodule with parameters or buffers of its own. The head is found by the flow of data: it is the last
layers that a forward pass uses, in whatever order they are registered.

The flow is read off the autograd graph of the pass, which knows every use of a parameter: by its layer's own forward,
by a function that takes the weight, or by another layer that shares it.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedtailor._common.errors import FedtailorError, listed, warn
from fedtailor.training.inputs import Held, tensors

INPUT = "\0input"  # stands for the samples among the layers
Say = Callable[[str], None]
Layers = dict[str, list[tuple[nn.Module, str, Tensor]]]  # of each layer: owner, attribute and tensor


def copied(module: nn.Module) -> nn.Module:
    """Copy a network. Frozen parameters, which nobody changes, are not copied."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters() if not p.requires_grad})


def frozen_modules(module: nn.Module) -> list[nn.Module]:
    """List the submodules whose parameters are all frozen, and all that is inside of these."""
    tops = [m for m in module.modules() if {p.requires_grad for p in m.parameters()} == {False}]
    return list(dict.fromkeys(inner for top in tops for inner in top.modules()))


def takes_integers(module: nn.Module) -> bool:
    """Find out whether a network has an embedding, which takes whole numbers."""
    return any(isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) for layer in module.modules())


def layers_of(module: nn.Module) -> Layers:
    """List the tensors of each layer that training changes: parameters, then buffers, in the order of registration.

    Shared tensors count once. Frozen parameters, the buffers of frozen layers and constants (indices, masks) are left
    out.
    """
    layers: Layers = {}
    seen: set[int] = set()
    frozen = set(frozen_modules(module))
    for name, owner in module.named_modules():
        parameters = [(owner, key, p) for key, p in owner._parameters.items() if p is not None and p.requires_grad]
        buffers = [
            (owner, key, b)
            for key, b in owner._buffers.items()
            if b is not None
            and owner not in frozen
            and key not in owner._non_persistent_buffers_set
            and ((b.is_floating_point() and bool(b.isfinite().all())) or key == "num_batches_tracked")
        ]
        entries = [entry for entry in [*parameters, *buffers] if id(entry[2]) not in seen]
        seen.update(id(tensor) for _, _, tensor in entries)
        if entries:
            layers[name] = entries
    return layers


def trained_layers(module: nn.Module) -> list[str]:
    """List the layers with trained parameters; there must be some."""
    layers = layers_of(module).items()
    if not (trained := [name for name, entries in layers if isinstance(entries[0][2], nn.Parameter)]):
        raise FedtailorError("The network has no trained parameters: freeze less of it, or set a head.")
    return trained


def within(name: str, parts: Sequence[str]) -> bool:
    """Find out whether a layer is one of these submodules, or inside one."""
    return any(name == part or name.startswith(part + ".") for part in parts)


def owner(name: str) -> str:
    """Return the layer of a tensor of the state dict."""
    return name.rpartition(".")[0]


def freeze(module: nn.Module, part: str) -> None:
    """Freeze all parameters of a submodule."""
    names = [name for name, _ in module.named_modules() if name]
    if part not in names:
        raise FedtailorError(f"The network has no part {part!r} to freeze; its parts are {listed(names)}.")
    module.get_submodule(part).requires_grad_(False)


def freeze_body(module: nn.Module, head: Sequence[str]) -> None:
    """Freeze all parameters outside of these layers."""
    for name, parameter in module.named_parameters():
        if owner(name) not in head:
            parameter.requires_grad_(False)


def find_head(module: nn.Module, head: int | str, example: Held | None = None, say: Say = warn) -> list[str]:
    """List the layers of the head, in the order of registration, and `say` if they are in doubt.

    `head` is a number, of the last layers with trained parameters that a forward pass of the `example` uses (without
    one, of the last that are registered), or the names of submodules (comma-separated).
    """
    names = trained_layers(module)
    if isinstance(head, str):
        return _named(names, [part.strip() for part in head.split(",")])
    if not 0 <= head <= len(names):
        raise FedtailorError(f"The head cannot have {head} layers: the network has {len(names)}.")
    if example is None or head in (0, len(names)):
        return names[len(names) - head :]
    last = set(_last(module, names, head, example, say))
    return [name for name in names if name in last]


def _named(names: list[str], wanted: list[str]) -> list[str]:
    for part in wanted:
        if not any(within(name, [part]) for name in names):
            raise FedtailorError(f"The network has no layer {part!r} for the head; its layers are {listed(names)}.")
    return [name for name in names if within(name, wanted)]


def _last(module: nn.Module, names: list[str], head: int, example: Held, say: Say) -> list[str]:
    """Choose the last layers by the flow of data. The network's own parameters, outside of any layer, come first, and
    so do layers of which the outputs do not depend."""
    registered, traced = names[len(names) - head :], copied(module)
    try:
        flow = trace(traced, example)
    except Exception:  # of a foreign network: one that fails on the samples is refused by whoever calls it next
        return registered
    if not flow.last:
        say("The flow of data cannot be traced in this network: the head is its last registered layers; name it.")
        return registered
    used = sorted((name for name in names if name and name in flow.last), key=lambda name: flow.last[name])
    order = [name for name in names if name not in used] + used
    chosen = order[len(order) - head :]
    behind = set(chosen).union(*(flow.before.get(name, ()) for name in chosen))
    if beside := [name for name in used if name not in behind]:
        say(
            f"The outputs come from layers side by side: {listed(chosen)} is taken for the head, and {listed(beside)} "
            "does not lead there; name another with --head."
        )
    return chosen


# --- the flow of data ---


@dataclass
class Flow:
    """When each layer is used last, and the layers whose outputs reach it."""

    last: dict[str, int] = field(default_factory=dict)
    before: dict[str, set[str]] = field(default_factory=dict)


def trace(module: nn.Module, example: Held) -> Flow:
    """Trace one forward pass of a network, which is in evaluation mode from then on."""
    owners = {id(t): name for name, entries in layers_of(module).items() for _, _, t in entries}
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in tensors(example)]
    owners |= {id(leaf): INPUT for leaf in leaves}
    module.eval()
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = module(*(leaf.clone() for leaf in leaves))  # which a network may change in place
    ends = [t.grad_fn for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.grad_fn is not None]
    return _read(ends, owners)


def _read(ends: list[Any], owners: dict[int, str]) -> Flow:
    """Read all operations behind these, each after its inputs. `owners` has the layer of each parameter, by its id."""
    flow, left = Flow(), ends
    reached: dict[Any, frozenset[str]] = {}  # of each operation, the layers that it depends on
    while left:
        operation = left[-1]
        inputs = [given for given, _ in operation.next_functions if given is not None]
        if unread := [given for given in inputs if given not in reached]:
            left += unread
            continue
        left.pop()
        own = owners.get(id(getattr(operation, "variable", None)))
        below = frozenset([own] if own is not None else ()).union(*(reached[given] for given in inputs))
        reached[operation] = below
        for given in inputs:
            layer = owners.get(id(getattr(given, "variable", None)))
            if layer not in (None, INPUT):
                flow.last[layer] = max(flow.last.get(layer, -1), operation._sequence_nr())
            if len(reached[given]) == 1:  # an operation that joins a layer's own parameters to something else
                (alone,) = reached[given]
                flow.before.setdefault(alone, set()).update(below - {alone})
    return flow
