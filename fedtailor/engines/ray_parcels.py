"""Tensors and sites on their way to an actor and back, as bytes that Ray keeps once per node.

Ray's workers see the same memory of a node, and nothing keeps one from writing there. So what arrives is copied, or
mapped anew in such a way that each process has its own copy of a page from the moment it writes there.
"""

import io
import mmap
import os
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.cloudpickle import CloudPickler
from torch import Tensor

from fedtailor.messages import Message, State
from fedtailor.messages.transport import Place

LARGE = 1 << 20  # bytes from which on samples are mapped and not copied

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Label = tuple[str, str, tuple[int, ...]]  # a tensor's name, type and shape


# --- messages and states ---


def label(name: str, tensor: Tensor) -> Label:
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def as_bytes(tensor: Tensor) -> Bytes:
    """The bytes of a tensor; nothing is copied if they lie in order."""
    content: Bytes = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return content


def pack(tensors: Message) -> list[tuple[Label, Bytes]]:
    return [(label(name, tensor), as_bytes(tensor)) for name, tensor in tensors.items()]


def unpack(packed: Iterable[tuple[Label, Bytes]]) -> State:
    """Copy tensors that arrived, to memory that is aligned as PyTorch's own."""
    return {name: _copied(content).view(getattr(torch, kind)).view(shape) for (name, kind, shape), content in packed}


def _copied(content: Bytes) -> Tensor:
    copy = torch.empty(len(content), dtype=torch.uint8)
    copy.numpy()[:] = content
    return copy


# --- sites ---

Parcel = tuple[bytes, list[Bytes]]  # a pickle, and the memory of its tensors


@dataclass(frozen=True)
class _Memory:
    """A piece of memory, by its number in the parcel."""

    number: int


class _Pickler(CloudPickler):  # type: ignore[misc]
    """Leaves out the memory of tensors, which `contents` then has, each piece once: views stay views of the same."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.contents: list[Bytes] = []
        self._known: dict[int, _Memory] = {}

    def persistent_id(self, value: Any) -> int | None:
        return value.number if type(value) is _Memory else None

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return super().reducer_override(value)
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known[storage.data_ptr()] = _Memory(len(self.contents))
            self.contents.append(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        memory = self._known[storage.data_ptr()]
        return _tensor, (
            memory,
            value.dtype,
            value.storage_offset(),
            value.shape,
            value.stride(),
            value.requires_grad,
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, memories: list[Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self._memories = memories

    def persistent_load(self, number: int) -> Tensor:
        return self._memories[number]


def _tensor(
    memory: Tensor, dtype: torch.dtype, offset: int, shape: torch.Size, stride: tuple[int, ...], requires_grad: bool
) -> Tensor:
    first = memory.storage_offset() // dtype.itemsize + offset  # memory begins at a multiple of 64
    tensor: Tensor = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), first, shape, stride)
    return tensor.requires_grad_(requires_grad)


def pack_sites(sites: Place) -> Parcel:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(sites)
    return file.getvalue(), pickler.contents


def unpack_sites(parcel: Parcel) -> Place:
    """Make the sites of a parcel, which must be kept as long as these: they read its memory."""
    content, memories = parcel
    sites: Place = _Unpickler(content, list(map(_private, memories))).load()
    return sites


def _private(content: Bytes) -> Tensor:
    """Return these bytes so that no other process sees it if they are written; mapped, or else copied."""
    mapped = _mapped(content) if len(content) >= LARGE else None
    return _copied(content) if mapped is None else mapped


def _mapped(content: Bytes) -> Tensor | None:
    """Map memory of the object store once more, privately: a page is copied when it is first written, as after a fork.

    The store's file has no name. But the raylet, which is the parent of this process, has it open. None if it is not
    found there, or is something else.
    """
    address = content.ctypes.data
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, begin, _, inode, *_ = line.split()
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= address < last:
                break
        else:
            return None
        place = address - first + int(begin, 16)
        page = place - place % mmap.ALLOCATIONGRANULARITY
        for file in Path(f"/proc/{os.getppid()}/fd").iterdir():
            if file.stat().st_ino == int(inode):
                with file.open("rb") as opened:
                    memory = mmap.mmap(opened.fileno(), place - page + len(content), mmap.MAP_PRIVATE, offset=page)
                found = torch.frombuffer(memory, dtype=torch.uint8)[place - page :]
                return found if np.array_equal(found.numpy(), content) else None
    except (OSError, ValueError):
        pass
    return None
