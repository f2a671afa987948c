"""A network as one line of plain PyTorch, and back: `nn.Sequential(nn.Flatten(), nn.Linear(64, 10))`.

A line that is read is not run: only simple layers of `torch.nn` with plain values can be built from it. What they would
compute is measured before they compute it.
"""

import ast
import inspect
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor._common.errors import FedtailorError

# The modules of torch.nn whose layers may stand in a line: they take one tensor, and are built at once.
KINDS = {
    "activation", "batchnorm", "channelshuffle", "conv", "dropout", "flatten", "fold", "instancenorm", "linear",
    "normalization", "padding", "pixelshuffle", "pooling", "upsampling",
}  # fmt: skip
LONGEST, DEEPEST = 100_000, 20  # characters of a line; layers inside layers
GREATEST, MOST_NUMBERS = 10**9, 10  # number in a line; numbers of one argument
MOST_VALUES, MOST_WORK = 10**8, 5 * 10**10  # of one sample: values of a layer's output; multiplications


def expression(module: nn.Module) -> str | None:
    """Write the line that builds this network; None if it is more than a sequence of `torch.nn`'s own layers."""
    try:
        text = _written(module)
        again = build_expression(text)
    except (AttributeError, ValueError, FedtailorError):
        return None
    return text if (repr(again), _shapes(again)) == (repr(module), _shapes(module)) else None


def build_expression(text: str) -> nn.Module:
    """Build the network of such a line on the meta device: without memory or values, until a state dict is assigned."""
    try:
        if len(text) > LONGEST:
            raise ValueError("too long")
        with torch.device("meta"):
            return _built(ast.parse(text, mode="eval").body)
    except Exception:  # Python's parser and the layers raise all kinds
        raise FedtailorError(f"This is not a network of torch.nn's layers: {text[:80]!r}.") from None


@torch.no_grad()
def check_work(module: nn.Module, sample: Tensor, outputs: int) -> None:
    """Refuse a network on the meta device that does not fit such a sample, or would take too much memory or time."""
    work = 0

    def measure(layer: nn.Module, given: tuple[Tensor, ...], result: Any) -> None:
        nonlocal work
        result = result[0] if isinstance(result, tuple) else result  # of a GRU: its states at all times
        work += given[0].numel() + result.numel() * _cost(layer, result)
        if result.numel() > MOST_VALUES or work > MOST_WORK:
            raise ValueError("too much")

    layers = [layer for layer in module.modules() if next(layer.children(), None) is None]
    hooks = [layer.register_forward_hook(measure) for layer in layers]
    try:
        result = module.eval()(sample)
    except Exception:
        size = "×".join(map(str, sample.shape[1:]))
        raise FedtailorError(
            f"The network and samples of {size} values do not fit together, or one needs too much "
            "memory or time: choose another model file."
        ) from None
    finally:
        for hook in hooks:
            hook.remove()
    if result.numel() != outputs:
        raise FedtailorError(
            f"The network has {result.numel()} outputs, but its description says {outputs}: choose another model file."
        )


def _cost(layer: nn.Module, result: Tensor) -> int:
    """Estimate the multiplications for one value of a layer's output, rather too many than too few."""
    if isinstance(layer, nn.RNNBase):
        return sum(tensor.numel() for tensor in layer.parameters()) // layer.hidden_size
    weight = getattr(layer, "weight", None)
    if isinstance(weight, Tensor) and weight.ndim > 1:
        return weight.numel() // max(1, min(weight.shape[:2]))
    window = layer.size if isinstance(layer, nn.LocalResponseNorm) else getattr(layer, "kernel_size", 1)
    dimensions = max(1, result.ndim - 2)
    return prod(window) if isinstance(window, tuple) else int(window) ** dimensions


def _written(module: nn.Module) -> str:
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind:
        raise ValueError(f"{kind.__name__} is not a layer of torch.nn")
    if isinstance(module, nn.Sequential):
        return f"nn.Sequential({', '.join(map(_written, module))})"
    arguments = []
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in ("device", "dtype"):
            continue
        value, default = _plain(getattr(module, name), parameter.default), parameter.default
        if default is parameter.empty:
            arguments.append(repr(value))
        elif value != default and value != (default,) * (len(value) if isinstance(value, tuple) else 1):
            arguments.append(f"{name}={value!r}")
    return f"nn.{kind.__name__}({', '.join(arguments)})"


def _plain(value: Any, default: Any) -> Any:
    """Convert a layer's attribute to the argument that made it: `bias` is a tensor there, and was True."""
    if isinstance(default, bool):
        return value is not None and value is not False
    plain = value if isinstance(value, tuple) else (value,)
    if not all(item is None or isinstance(item, (bool, int, float, str)) for item in plain):
        raise ValueError(f"{value!r} is not a plain value")
    return value


def _built(node: ast.AST, depth: int = 1) -> nn.Module:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="nn"), attr=name)) if depth <= DEEPEST:
            kind = getattr(nn, name)
        case _:
            raise ValueError("not a layer")
    if kind is nn.Sequential and not node.keywords:
        return nn.Sequential(*(_built(part, depth + 1) for part in node.args))
    family = kind.__module__.rpartition(".")[2] if issubclass(kind, nn.Module) else ""
    if family not in KINDS or name.startswith("Lazy") or {"device", "dtype"} & {k.arg for k in node.keywords}:
        raise ValueError("not a layer for a line")
    module: nn.Module = kind(*map(_value, node.args), **{str(k.arg): _value(k.value) for k in node.keywords})
    return module


def _value(node: ast.expr) -> Any:
    """Read a layer's argument: a plain value, or a few numbers."""
    value = ast.literal_eval(node)
    several = list(value) if isinstance(value, (tuple, list)) else [value]
    for one in several:
        if not (one is None or isinstance(one, (bool, str)) or (isfinite(one) and abs(one) <= GREATEST)):
            raise ValueError("not a plain value")
    if len(several) > MOST_NUMBERS:
        raise ValueError("too many values")
    return value


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}
