"""The layers of a network: which are trained, which are frozen, and which are the head.

A layer is a submodule with parameters or buffers of its own. The head is found by the flow of data: it is the last
layers that a forward pass uses, in whatever order they are registered.
"""

import copy
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedtailor._common.errors import FedtailorError, listed, warn
from fedtailor.training.flow import Flow, trace
from fedtailor.training.inputs import Held

Say = Callable[[str], None]
Layers = dict[str, list[tuple[nn.Module, str, Tensor]]]  # of each layer: owner, attribute and tensor


def copied(module: nn.Module) -> nn.Module:
    """Copy a network. Frozen parameters, which nobody changes, are not copied."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters() if not p.requires_grad})


def frozen_modules(module: nn.Module) -> list[nn.Module]:
    """List the submodules whose parameters are all frozen, and all that is inside of these."""
    tops = [m for m in module.modules() if _count(m) and not _count(m, trained=True)]
    return list(dict.fromkeys(inner for top in tops for inner in top.modules()))


def _count(module: nn.Module, trained: bool = False) -> int:
    return sum(1 for parameter in module.parameters() if parameter.requires_grad or not trained)


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
        tensors = [entry for entry in [*parameters, *buffers] if id(entry[2]) not in seen]
        seen.update(id(tensor) for _, _, tensor in tensors)
        if tensors:
            layers[name] = tensors
    return layers


def trained_layers(layers: Layers) -> list[str]:
    """List the layers that have parameters."""
    return [name for name, tensors in layers.items() if isinstance(tensors[0][2], nn.Parameter)]


def within(name: str, parts: Sequence[str]) -> bool:
    """Find out whether a layer is one of these submodules, or inside one."""
    return any(name == part or name.startswith(part + ".") for part in parts)


def owner(name: str) -> str:
    """Return the layer of a tensor of the state dict."""
    return name.rpartition(".")[0]


def freeze(module: nn.Module, parts: Sequence[str]) -> None:
    """Freeze all parameters of these submodules."""
    names = [name for name, _ in module.named_modules() if name]
    for part in parts:
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
    layers = layers_of(module)
    names = trained_layers(layers)
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
    flow = _flow(module, example, say)
    if flow is None:
        return names[len(names) - head :]
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


def _flow(module: nn.Module, example: Held, say: Say) -> Flow | None:
    """Trace a copy of the network. One that fails on the samples is refused by whoever calls it next."""
    traced = copied(module)
    owners = {id(t): name for name, tensors in layers_of(traced).items() for _, _, t in tensors}
    try:
        flow = trace(traced, owners, example)
    except Exception:  # whatever a foreign network raises
        return None
    if not flow.last:
        say("The flow of data cannot be traced in this network: the head is its last registered layers; name it.")
        return None
    return flow
