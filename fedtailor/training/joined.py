"""Functions of several clients as one: a method makes the same function for each of them, and what these have captured
differs in tensors alone. So it is called once, by `torch.func.vmap`, with the tensors of all.

Joined are functions of the same code that have captured nothing but tensors, numbers, what cannot be changed, and
dictionaries, tuples and functions of these. They must not assign to what they have captured; what they write into
captured tensors is written into the clients' own when `give_back` is called.
"""

import dis
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from fedtailor.training.layout import Layout

VALUES = (bool, int, float, str, slice, type(None), Layout)
FIXED = (type, ModuleType, BuiltinFunctionType, torch.dtype, torch.device, BaseModel)  # a method is the latter

PRODUCTS = (torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul, torch.Tensor.dot, torch.dot)

Make = Callable[[Sequence[Tensor]], Any]


class Faster(TorchFunctionMode):
    """Other operators where PyTorch's rules for several clients are slow: a product of two vectors would be ten
    operators and six times the time, and the gradient of a linear layer's weights would be copied by columns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and not kwargs and args[0].dim() == args[1].dim() == 1:
            return (args[0] * args[1]).sum()
        if func is linear and not kwargs and args[0].dim() == args[1].dim() == 2:
            x, weight, *bias = args
            found = torch.matmul(weight, x.mT).mT
            return found if bias in ([], [None]) else found + bias[0]
        return func(*args, **(kwargs or {}))


def for_all(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of one client's tensors once for those of several, by `torch.func.vmap`."""
    with warnings.catch_warnings(), Faster():
        warnings.filterwarnings("ignore", "There is a performance drop")  # of operators that take one by one
        return vmap(function)(*arguments)


class NotAlike(Exception):
    """The functions cannot be joined."""


class Joined:
    """Functions of clients, several for each; `memory` is that of tensors that change while they are in use."""

    def __init__(self, functions: Sequence[tuple[Any, ...]], memory: Sequence[Tensor]) -> None:
        self._places: dict[int, int] = {}
        self._own: list[Sequence[Tensor]] = []
        self._make = self._joined(functions)
        stores = [{tensor.untyped_storage().data_ptr() for tensor in of} for of in zip(*self._own, strict=True)]
        taken = {tensor.untyped_storage().data_ptr() for tensor in memory}
        if any(len(of) < len(self._own) or of & taken for of in stores):
            raise NotAlike  # one tensor would be several copies, or a copy would not change with what it is of
        self._stacked = [torch.stack(list(of)) for of in self._own]
        self._versions = [tensor._version for tensor in self._stacked]

    def call(self, which: int, vectors: Tensor) -> Any:
        """Call one of each client's functions with the client's vector, for the first clients; a tensor instead of a
        function is what comes of it."""

        def of_client(vector: Tensor, tensors: Sequence[Tensor]) -> Any:
            function = self.function(which, tensors)
            found = function(vector) if callable(function) else function
            return () if found is None else found.clone() if found is vector else found  # which is about to change

        return for_all(of_client, vectors, self.tensors(slice(len(vectors))))

    def function(self, which: int, tensors: Sequence[Tensor]) -> Any:
        """Make one of the functions with these tensors in place of those that it has captured."""
        return self._make(tensors)[which]

    def tensors(self, clients: slice | Tensor) -> list[Tensor]:
        """Return the captured tensors of some clients, for `function`: views of them, if they are a slice."""
        if isinstance(clients, slice):
            return [tensor if clients.stop == len(tensor) else tensor[clients] for tensor in self._stacked]
        return [tensor.index_select(0, clients) for tensor in self._stacked]

    @classmethod
    def that_works(
        cls, functions: Sequence[tuple[Any, ...]], vectors: Tensor, memory: Sequence[Tensor]
    ) -> "Joined | None":
        """Join functions, of which the first two are of a vector; None if a call of these with copies of all that they
        have captured fails."""
        joined = cls(functions, memory)
        stacked, joined._stacked = joined._stacked, [tensor.clone() for tensor in joined._stacked]
        try:
            for which, function in enumerate(functions[0][:2]):
                if function is not None:
                    joined.call(which, vectors.clone())
        except Exception:  # a function's own or PyTorch's, of any kind: each client's is called by itself
            return None
        joined._stacked = stacked
        return joined

    @property
    def written(self) -> bool:
        """Find out whether the functions have written into what they have captured."""
        return [tensor._version for tensor in self._stacked] != self._versions

    def give_back(self) -> None:
        """Write what the functions have written into tensors into those of the clients."""
        for own, stacked, version in zip(self._own, self._stacked, self._versions, strict=True):
            if stacked._version != version:
                torch._foreach_copy_(list(own), list(stacked.unbind()))

    def _joined(self, values: Sequence[Any]) -> Make:
        """Find out how the clients' values become one, given tensors in place of those that they have."""
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            raise NotAlike
        if isinstance(first, Tensor):
            return self._tensor(values)
        if isinstance(first, VALUES) and all(value == first for value in values):
            return lambda _: first
        if isinstance(first, dict) and all(value.keys() == first.keys() for value in values):
            parts = {name: self._joined([value[name] for value in values]) for name in first}
            return lambda tensors: MappingProxyType({name: part(tensors) for name, part in parts.items()})
        if isinstance(first, tuple):
            entries = [self._joined(of) for of in zip(*values, strict=True)]
            return lambda tensors: tuple(entry(tensors) for entry in entries)
        if isinstance(first, MethodType) and all(value.__func__ is first.__func__ for value in values):
            owner = self._joined([value.__self__ for value in values])
            return lambda tensors: MethodType(first.__func__, owner(tensors))
        if isinstance(first, FunctionType) and all(value.__code__ is first.__code__ for value in values):
            return self._function(values)
        if isinstance(first, FIXED) and all(value is first for value in values):
            return lambda _: first
        raise NotAlike

    def _tensor(self, values: Sequence[Tensor]) -> Make:
        first = values[0]
        if any((value.shape, value.dtype) != (first.shape, first.dtype) or value.requires_grad for value in values):
            raise NotAlike
        place = self._places.setdefault(id(first), len(self._own))
        if place == len(self._own):
            self._own.append(values)
        elif any(value is not known for value, known in zip(values, self._own[place], strict=True)):
            raise NotAlike
        return lambda tensors: tensors[place]

    def _function(self, values: Sequence[FunctionType]) -> Make:
        first = values[0]
        known = [first.__globals__.get(name) for name in first.__code__.co_names]
        if writes(first.__code__) or any(isinstance(found, list | dict | set) for found in known):
            raise NotAlike
        captured = self._joined([tuple(cell.cell_contents for cell in value.__closure__ or ()) for value in values])
        defaults = self._joined([value.__defaults__ for value in values])
        named = self._joined([value.__kwdefaults__ for value in values])

        def make(tensors: Sequence[Tensor]) -> FunctionType:
            cells = tuple(map(CellType, captured(tensors)))
            made = FunctionType(first.__code__, first.__globals__, first.__name__, defaults(tensors), cells)
            made.__kwdefaults__ = dict(named(tensors) or {})
            return made

        return make


@cache
def writes(code: CodeType) -> bool:
    """Find out whether a function, or one in it, assigns to global names, or to those of a function around it."""
    free = {"STORE_GLOBAL", "DELETE_GLOBAL"}
    own = any(
        step.opname in free or (step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars)
        for step in dis.get_instructions(code)
    )
    return own or any(writes(constant) for constant in code.co_consts if isinstance(constant, CodeType))
