"""The layout of a network's vector: the slice of each part."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The slices of a network's vector: body and head, every layer, normalisation layers and buffers.

    `norm_layers` are the normalisation layers. `buffers` are the entries that are no parameters (BatchNorm's running
    mean and variance): no gradient step may touch them, and they count in no length or angle. `head_shapes` has the
    shapes of the head's tensors, by name.
    """

    size: int
    body: slice
    head: slice
    layers: dict[str, slice] = field(default_factory=dict)
    norm_layers: tuple[slice, ...] = ()
    buffers: tuple[slice, ...] = ()
    head_shapes: dict[str, torch.Size] = field(default_factory=dict)

    def without_buffers(self, vectors: Tensor) -> Tensor:
        """Return the vectors with zeros for the buffers, for lengths and angles between models."""
        if self.buffers:
            vectors = vectors.clone()
            for place in self.buffers:
                vectors[..., place] = 0
        return vectors

    def copy_buffers(self, to: Tensor, source: Tensor) -> Tensor:
        """Copy the buffers of one vector into others, in place, and return these."""
        for place in self.buffers:
            to[..., place] = source[..., place]
        return to

    def buffers_in(self, part: slice) -> list[slice]:
        """List the buffers inside a slice of the vector."""
        return [place for place in self.buffers if place.start < part.stop and place.stop > part.start]

    def spread(self, values: Tensor) -> Tensor:
        """Repeat one value a layer (the last dimension) for each of the layer's entries; a single value stays one."""
        if values.shape[-1] == 1:
            return values
        sizes = [place.stop - place.start for place in self.layers.values()]
        return torch.repeat_interleave(values, torch.tensor(sizes, device=values.device), dim=-1)
