"""A search for secrets in all that can be reached from an object."""

import gc
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 28  # bytes: no storage that a server may see is so large; one that is would be a transport's


def reachable(*roots: object) -> Iterator[tuple[object, str]]:
    """Everything that an object holds, and what that holds, and how it was found.

    Attributes, slots, containers, closures, defaults, bound methods, partials. Not entered are modules, types, code,
    frames and the globals of functions: they lead to everything that the process has.
    """
    closed = {id(vars(module)) for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    closed.add(id(sys.modules))
    seen: set[int] = set()
    left: list[tuple[object, str]] = [(root, type(root).__name__) for root in roots]
    keep: list[object] = []  # what was looked at stays alive, so that no number in `seen` is given away again
    while left:
        thing, way = left.pop()
        if id(thing) in seen or id(thing) in closed or isinstance(thing, ModuleType | type | CodeType | FrameType):
            continue
        seen.add(id(thing))
        keep.append(thing)
        yield thing, way
        held: list[Any] = gc.get_referents(thing)
        if hasattr(thing, "__globals__"):
            held = [other for other in held if other is not thing.__globals__]
        if isinstance(thing, Tensor):
            held += [other for other in (thing._base, thing.grad if thing.is_leaf else None) if other is not None]
        left += [(other, f"{way} > {type(other).__name__}") for other in held]


def content(thing: object) -> bytes | None:
    """The bytes that a thing consists of, those of the memory behind a view included."""
    if isinstance(thing, Tensor):
        storage = thing.detach().cpu().untyped_storage()
        assert storage.nbytes() < LARGE, "this memory is shared with workers"
        return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()  # type: ignore[call-overload]
    if isinstance(thing, np.ndarray):
        return thing.tobytes()
    if isinstance(thing, bytes | bytearray | memoryview):
        return bytes(thing)
    return thing.encode(errors="ignore") if isinstance(thing, str) else None


def find(secrets: list[Tensor], *roots: object) -> list[str]:
    """The ways from these objects to any of the secrets."""
    wanted = [secret.numpy().tobytes() for secret in secrets]
    found = []
    for thing, way in reachable(*roots):
        held = content(thing)
        if held is not None and any(secret in held for secret in wanted):
            found.append(way)
    return found
