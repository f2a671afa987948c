"""A network as one line of plain PyTorch, and back: `nn.Sequential(nn.Flatten(), nn.Linear(64, 10))`.

A line that is read is not run: only layers of `torch.nn` with plain values can be built from it.
"""

import ast
import inspect
from typing import Any

import torch
from torch import nn

from fedtailor.errors import FedtailorError


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
        with torch.device("meta"):
            return _built(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RuntimeError, RecursionError):
        raise FedtailorError(f"This is not a network of torch.nn's layers: {text[:80]!r}.") from None


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


def _built(node: ast.AST) -> nn.Module:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        raise ValueError("not a layer")
    kind = getattr(nn, node.func.attr, None)
    if ast.unparse(node.func.value) != "nn" or not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError("not a layer of torch.nn")
    layers_and_values = [_built(part) if isinstance(part, ast.Call) else ast.literal_eval(part) for part in node.args]
    module: nn.Module = kind(*layers_and_values, **{str(k.arg): ast.literal_eval(k.value) for k in node.keywords})
    return module


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}
