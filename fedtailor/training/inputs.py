"""Samples as networks take them: one tensor, several tensors, or samples that are read when a batch needs them.

`Several` and `Lazy` have the operations of a tensor that the rest of the library uses: the length, slices and
selections, `split`, `to` and `device`. What is read of them has the bits of a tensor that holds all samples.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Any, Union, overload

import torch
from torch import Tensor, nn

Inputs = Union[Tensor, "Several", "Lazy"]
Held = Union[Tensor, "Several"]  # in memory
CPU = torch.device("cpu")
ALIGNMENT = 64  # bytes: of what PyTorch allocates
Shape = tuple[Any, ...]  # of one sample: its sizes; the shapes of its inputs, where there are several


@dataclass(frozen=True, eq=False)
class Several:
    """Several inputs of each sample: the network is called with all of them."""

    parts: tuple[Any, ...]  # each a tensor, or lazy

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, key: slice | Tensor) -> "Several":
        return Several(tuple(part[key] for part in self.parts))

    def split(self, size: int) -> Iterator["Several"]:
        """Yield pieces of so many samples, in memory."""
        return map(Several, zip(*(part.split(size) for part in self.parts), strict=True))

    def to(self, device: torch.device | str) -> "Several":
        return Several(tuple(part.to(device) for part in self.parts))

    @property
    def device(self) -> torch.device:
        device: torch.device = self.parts[0].device
        return device


@dataclass(frozen=True, eq=False)
class Lazy:
    """Samples that are read when they are needed, and not kept."""

    read: Callable[[Tensor], Held]  # the samples of these numbers
    numbers: Tensor  # int64, on the CPU: those of the samples here
    like: Held  # no sample, of the shape and type that all have
    first: int = 0  # the place of the first sample in the tensor that would hold all of them
    device: torch.device = CPU

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, key: slice | Tensor) -> "Lazy":
        if isinstance(key, Tensor):  # a tensor would be copied
            return replace(self, numbers=self.numbers[key.cpu()], first=0)
        return replace(self, numbers=self.numbers[key], first=self.first + key.indices(len(self))[0])

    def split(self, size: int) -> Iterator[Held]:
        """Yield pieces of so many samples, in memory: one after the other, as they are asked for."""
        return (held(self[start : start + size]) for start in range(0, len(self), size))

    def to(self, device: torch.device | str) -> "Lazy":
        return replace(self, like=self.like.to(device), device=torch.device(device))

    def map(self, function: Callable[[Held], Held]) -> "Lazy":
        """Apply a function to what is read."""
        return replace(self, read=lambda numbers: function(self.read(numbers)), like=function(self.like))


def _placed(x: Held, first: int) -> Held:
    """Put samples where a slice of all samples would have them, up to multiples of 64 bytes: matrix products have other
    last bits at other addresses."""
    if isinstance(x, Several):
        return Several(tuple(_placed(part, first) for part in x.parts))
    size = x.element_size()
    shift = first * x.shape[1:].numel() * size % ALIGNMENT
    if x.data_ptr() % ALIGNMENT == shift:
        return x
    flat = torch.empty(x.numel() + shift // size, dtype=x.dtype)[shift // size :]
    if x.dim() == 4:
        n, channels, height, width = x.shape
        return flat.view(n, height, width, channels).permute(0, 3, 1, 2).copy_(x)
    return flat.view(x.shape).copy_(x)


def samples_per_line(x: Inputs) -> int:
    """Count the samples from one that begins at a 64-byte address to the next one that does. Whole numbers count as
    the single-precision numbers that they become for a network without an embedding."""
    if isinstance(x, Lazy):
        return samples_per_line(x.like)
    if isinstance(x, Several):
        return lcm(*map(samples_per_line, x.parts))
    size = x.element_size() if x.is_floating_point() else torch.float32.itemsize
    return ALIGNMENT // gcd(ALIGNMENT, x.shape[1:].numel() * size)


def is_aligned(x: Inputs) -> bool:
    """Find out whether the first sample is at a 64-byte address: PyTorch allocates so, NumPy may not."""
    if isinstance(x, Several):
        return all(map(is_aligned, x.parts))
    return (x.first if isinstance(x, Lazy) else x.data_ptr() % ALIGNMENT) == 0


def tensors(x: Held) -> tuple[Tensor, ...]:
    """List the tensors of samples in memory: one, or one for each input."""
    return x.parts if isinstance(x, Several) else (x,)


def held(x: Inputs) -> Held:
    """Read all samples, if they are not in memory yet."""
    if isinstance(x, Lazy) and len(x) == 0:
        return x.like
    if isinstance(x, Lazy):
        return _placed(x.read(x.numbers), x.first).to(x.device)
    return Several(tuple(map(held, x.parts))) if isinstance(x, Several) else x


@overload
def select(x: Tensor, indices: Tensor | None) -> Tensor: ...
@overload
def select(x: Inputs, indices: Tensor | None) -> Inputs: ...
def select(x: Inputs, indices: Tensor | None) -> Inputs:
    """Select samples, and read none. Images keep their channels last, which is also the order that copies fastest."""
    if indices is None:
        return x
    if isinstance(x, Several):
        return Several(tuple(select(part, indices) for part in x.parts))
    if isinstance(x, Lazy):
        return x[indices]
    if x.dim() == 4:
        return x.permute(0, 2, 3, 1).index_select(0, indices).permute(0, 3, 1, 2)
    return x.index_select(0, indices)


@overload
def take(x: Tensor, indices: Tensor | None) -> Tensor: ...
@overload
def take(x: Inputs, indices: Tensor | None) -> Held: ...
def take(x: Inputs, indices: Tensor | None) -> Held:
    """Select samples, and read them."""
    return select(x, indices) if isinstance(x, Tensor) else held(select(x, indices))


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Send a tensor from the host to a device without waiting for it."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def join(pieces: Sequence[Inputs]) -> Inputs:
    """Put samples one after the other. Those that are not in memory stay where they are."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, Several):
        parts = [piece.parts for piece in pieces if isinstance(piece, Several)]
        return Several(tuple(map(join, zip(*parts, strict=True))))
    if isinstance(first, Tensor):
        return torch.cat([piece for piece in pieces if isinstance(piece, Tensor)])
    lazy = [piece for piece in pieces if isinstance(piece, Lazy)]
    if all(piece.read is first.read for piece in lazy):
        return replace(first, numbers=torch.cat([piece.numbers for piece in lazy]), first=0)
    ends = torch.tensor([len(piece) for piece in lazy]).cumsum(0)

    def read(numbers: Tensor) -> Held:
        owner = torch.bucketize(numbers, ends, right=True)
        found = [take(lazy[k], numbers[owner == k] - (ends[k] - len(lazy[k]))) for k in owner.unique().tolist()]
        return take(held(join(found)), owner.argsort(stable=True).argsort()) if found else first.like

    return Lazy(read, torch.arange(int(ends[-1])), first.like)


def apply(module: nn.Module, x: Held) -> Tensor:
    """Call a module with one input, or with several."""
    outputs: Tensor = module(*x.parts) if isinstance(x, Several) else module(x)
    return outputs


def sample_shape(x: Inputs) -> Shape:
    """Return the shape of one sample, or those of its inputs where there are several."""
    if isinstance(x, Lazy):
        return sample_shape(x.like)
    return tuple(map(sample_shape, x.parts)) if isinstance(x, Several) else tuple(x.shape[1:])


def shape_words(shape: Shape) -> str:
    """Write a sample's shape: 3×32×32; 20 and 1 for two inputs."""
    parts = [part for part in shape if isinstance(part, tuple)]
    return " and ".join(map(shape_words, parts)) if parts else "×".join(map(str, shape)) or "1"


@overload
def as_floats(x: Held, dtype: torch.dtype) -> Held: ...
@overload
def as_floats(x: Inputs, dtype: torch.dtype) -> Inputs: ...
def as_floats(x: Inputs, dtype: torch.dtype) -> Inputs:
    """Convert integers, for a network that has no embedding to take them. Of several inputs they stay as they are."""
    if isinstance(x, Several):
        return x
    if isinstance(x, Lazy):
        return x.map(lambda samples: as_floats(samples, dtype))
    return x if x.is_floating_point() else x.to(dtype)


def changes(*inputs: Inputs) -> list[int | None]:
    """Count the changes of tensors in place, by any view of their memory. (PyTorch does not count those through NumPy
    or `.data`, nor any of an inference tensor: None.) What is read anew each time cannot be changed."""
    counts: list[int | None] = []
    for x in inputs:
        if isinstance(x, Several):
            counts.append(sum(count or 0 for count in changes(*x.parts)))
        else:
            counts.append(None if isinstance(x, Lazy) or x.is_inference() else x._version)
    return counts
