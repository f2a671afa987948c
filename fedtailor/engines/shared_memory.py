"""Named tensors in memory that a process shares with the workers it forks.

A sheet of shared memory is reserved before a worker is forked and inherited by it: no files, no names, nothing that
could be left behind. Pages take memory only once they are written, so a sheet can be generous.
"""

import mmap
import sys

import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.messages import Message, State

ALIGNMENT = 64  # bytes: what PyTorch's own allocator gives, so that kernels compute alike on either side

Places = list[tuple[str, str, tuple[int, ...], int]]  # name, type, shape and offset of each tensor


class Sheet:
    """A piece of shared memory that holds one set of named tensors at a time."""

    def __init__(self, size: int) -> None:
        flags = (
            mmap.MAP_SHARED
            | mmap.MAP_ANONYMOUS
            | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
        )
        self.memory = mmap.mmap(-1, size, flags=flags)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    def write(self, tensors: Message, offset: int = 0) -> tuple[Places, int]:
        """Put the tensors here, from this offset on; return where each is, and where the free room begins."""
        places: Places = []
        for name, tensor in tensors.items():
            if offset + tensor.nbytes > len(self.bytes):
                raise FedtailorError(
                    f"Messages and states of more than {len(self.bytes) / 1e9:.3g} GB do not fit what a worker shares: "
                    "use --engine in-process."
                )
            places.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
            self._view(places[-1]).copy_(tensor.detach())
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return places, offset

    def read(self, places: Places) -> State:
        """The tensors as views of this memory: good until it is written again."""
        return {entry[0]: self._view(entry) for entry in places}

    def _view(self, entry: tuple[str, str, tuple[int, ...], int]) -> Tensor:
        _, kind, shape, offset = entry
        dtype = getattr(torch, kind)
        count = torch.Size(shape).numel()
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype).view(shape)
