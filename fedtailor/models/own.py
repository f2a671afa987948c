"""Building a network of the user's own.

An `nn.Module` is copied. A class or function is called in the first of these ways that it takes and that succeeds:

1. with the input shape and the number of classes, `Net((1, 28, 28), 10)`;
2. by the names of its arguments that are in `MEANINGS`, `Net(in_channels=1, num_classes=10)`;
3. with nothing, `Net()`.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fedtailor._common.errors import FedtailorError, brief
from fedtailor.training.inputs import Shape, shape_words
from fedtailor.training.layers import takes_integers

# What the names of arguments mean, for samples of a shape, a number of classes and of tokens.
MEANINGS: dict[str, tuple[str, ...]] = {
    "shape": ("input_shape", "in_shape", "shape"),
    "features": ("in_features", "n_features", "input_dim", "in_dim"),
    "channels": ("in_channels",),  # `channels` alone is often a width
    "classes": ("num_classes", "n_classes", "classes", "out_features", "output_dim", "out_dim", "n_outputs"),
    "tokens": ("vocab_size", "num_embeddings", "tokens", "n_tokens", "num_tokens"),
}


@dataclass(frozen=True)
class Call:
    """One way to call a factory."""

    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"({', '.join([*map(repr, self.arguments), *(f'{name}={v!r}' for name, v in self.named.items())])})"


def build_own(factory: Any, shape: Shape, classes: int, tokens: int | None, seed: int) -> tuple[nn.Module, str]:
    """Build a network of the user's own, and say how its factory was called ("" for a module, which is copied).

    Each call begins with the same random state, so that the initial values do not depend on those that failed.
    """
    if isinstance(factory, nn.Module):
        torch.manual_seed(seed)
        return _materialised(_copied(factory), shape), ""
    name = getattr(factory, "__name__", type(factory).__name__)
    tried: list[str] = []
    cause: Exception | None = None
    seen: list[Any] = []
    for call in _calls(factory, shape, classes, tokens):
        fit, why = _bound(factory, call)
        if fit is None:
            tried.append(f"{name}{call} does not fit ({why})")
            continue
        if fit in seen:  # the same by position and by name
            continue
        seen.append(fit)
        try:
            torch.manual_seed(seed)
            module = factory(*call.arguments, **call.named)
        except Exception as error:  # whatever the user's code does
            tried.append(f"{name}{call} failed ({brief(error)})")
            cause = error
            continue
        if not isinstance(module, nn.Module):
            raise FedtailorError(f"The model {name} made a {type(module).__name__}, not an nn.Module.")
        return _materialised(module, shape), str(call)
    raise FedtailorError(f"The model {name} cannot be built: {'; '.join(tried)}.") from cause


def _calls(factory: Callable[..., Any], shape: Shape, classes: int, tokens: int | None) -> Iterator[Call]:
    yield Call((shape, classes))
    values: dict[str, Any] = {"shape": shape, "classes": classes, "tokens": tokens}
    if not _is_several(shape):
        values |= {"features": torch.Size(shape).numel(), "channels": shape[0] if len(shape) > 1 else None}
    known = {name: values.get(meaning) for meaning, names in MEANINGS.items() for name in names}
    named = {name: known[name] for name in _declared(factory) if known.get(name) is not None}
    if named:
        yield Call(named=named)
    yield Call()


def _declared(factory: Callable[..., Any]) -> list[str]:
    """List the names of a factory's arguments."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _bound(factory: Callable[..., Any], call: Call) -> tuple[dict[str, Any] | None, str]:
    """Find the values that a call gives to the factory's arguments; None if it does not take them, and why."""
    try:
        return dict(inspect.signature(factory).bind(*call.arguments, **call.named).arguments), ""
    except (TypeError, ValueError) as error:
        return None, str(error)


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:  # some modules cannot be copied, as nn.LazyBatchNorm1d
        raise FedtailorError(
            f"The model cannot be copied ({brief(error)}): give a function that makes it, as model=lambda: …."
        ) from error


def _materialised(module: nn.Module, shape: Shape) -> nn.Module:
    """Give lazy layers (`nn.LazyLinear`) the sizes and initial values that they have for samples of this shape."""
    if not any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        return module
    training = module.training
    try:
        with torch.no_grad():
            dtype = torch.int64 if takes_integers(module) else None
            module.eval()(*(torch.zeros(2, *part, dtype=dtype) for part in (shape if _is_several(shape) else (shape,))))
    except Exception as error:  # whatever the user's code does
        raise FedtailorError(
            f"The model's lazy layers do not fit samples of the shape {shape_words(shape)} ({brief(error)})."
        ) from error
    return module.train(training)


def _is_several(shape: Shape) -> bool:
    """Find out whether samples of this shape have several inputs."""
    return any(isinstance(part, tuple) for part in shape)
