"""The layout of a network's vector: the slice of each part, and the sizes of its head."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError


@dataclass(frozen=True)
class Layout:
    """The slices of a network's vector: body and head, every layer, normalisation layers and buffers.

    `norm_layers` are the normalisation layers. `buffers` are the entries that are no parameters (BatchNorm's running
    mean and variance): no gradient step may touch them, and they count in no length or angle.

    `n_features` is the number of inputs of the head for one sample, `n_outputs` that of the network's outputs (of the
    classes, in a classification); None where they are not a row of numbers a sample. `head_shapes` has the shapes of
    the head's tensors, by name. `linear` says that the head is one linear layer, after which nothing comes.

    `extra` has the place of each tensor that the method trains beside the network (`Method.extra_tensors`), behind the
    head, and `extra_shapes` its shape.
    """

    size: int
    body: slice
    head: slice
    layers: dict[str, slice] = field(default_factory=dict)
    norm_layers: tuple[slice, ...] = ()
    buffers: tuple[slice, ...] = ()
    n_features: int | None = None
    n_outputs: int | None = None
    head_shapes: dict[str, torch.Size] = field(default_factory=dict)
    linear: bool = False
    extra: dict[str, slice] = field(default_factory=dict)
    extra_shapes: dict[str, torch.Size] = field(default_factory=dict)

    @property
    def network(self) -> slice:
        """The slice of the vector that is the network: all but the method's extra tensors."""
        return slice(0, self.head.stop)

    def linear_head(self, method: str, bias: bool = False) -> torch.Size:
        """Return the shape of a linear head's weights, outputs × features, for a method that can do with no other.

        `bias` says that it must have one: in the head's slice, it comes after the weights.
        """
        shapes = [*self.head_shapes.values()]
        if not self.linear or (bias and len(shapes) == 1):
            wanted = "one linear layer" + " with a bias" * bias
            raise FedtailorError(f"{method} needs a head that is {wanted}, the last of the network: set head=1.")
        return shapes[0]

    def head_weights(self, head: Tensor) -> tuple[Tensor, Tensor | None]:
        """View the weights and, if there are any, the biases in the vector of a head that is one linear layer."""
        shape = next(iter(self.head_shapes.values()))
        W, b = head.tensor_split([shape.numel()])
        return W.view(shape), b if len(b) else None

    def extras(self, vector: Tensor) -> dict[str, Tensor]:
        """View the method's extra tensors in a vector, by name."""
        return {name: view_as(vector[place], self.extra_shapes[name]) for name, place in self.extra.items()}

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

    def buffers_of(self, length: int) -> list[slice]:
        """List the places of the buffers in a vector of this length: a whole one, a body or a head."""
        for part in (slice(0, self.size), self.body, self.head):
            if part.stop - part.start == length:
                return [slice(b.start - part.start, b.stop - part.start) for b in self.buffers_in(part)]
        return []

    def spread(self, values: Tensor) -> Tensor:
        """Repeat one value a layer (the last dimension) for each of the layer's entries; a single value stays one."""
        if values.shape[-1] == 1:
            return values
        sizes = [place.stop - place.start for place in self.layers.values()]
        return torch.repeat_interleave(values, torch.tensor(sizes, device=values.device), dim=-1)


def bounded(x: Tensor, sent: Tensor | None, bound: float, layout: Layout) -> Tensor:
    """Scale the change from `sent` to x down to this norm, if it is longer. Buffers of whole models stay as they are,
    and count in no norm: they are no steps of a descent."""
    change, start = x.cpu().double(), torch.zeros((), dtype=torch.float64) if sent is None else sent.cpu().double()
    change = change - start
    length = float((layout.without_buffers(change) if is_model(x, layout) else change).norm())
    if length <= bound:
        return x
    # Finite numbers may have a length that is not: nothing is left of such a change.
    moved = (start + (change * (bound / length) if math.isfinite(length) else torch.zeros_like(change))).to(x)
    return layout.copy_buffers(moved, x) if is_model(x, layout) else moved


def is_model(x: Tensor, layout: Layout) -> bool:
    """Find out whether a tensor is a model's vector, or several as the rows of a matrix."""
    return x.shape[-1:] == (layout.size,)


def view_as(flat: Tensor, shape: torch.Size) -> Tensor:
    """View a piece of the vector in a tensor's shape.

    Weights of a convolution are in (out, height, width, in) order, which PyTorch calls channels_last and computes
    faster on a CPU.
    """
    if len(shape) == 4:
        out, channels, height, width = shape
        return flat.view(out, height, width, channels).permute(0, 3, 1, 2)
    return flat.view(shape)


def rows_as(flat: Tensor, shape: torch.Size) -> Tensor:
    """View pieces of several vectors, the rows of a matrix, in a tensor's shape."""
    if len(shape) == 4:
        out, channels, height, width = shape
        return flat.view(-1, out, height, width, channels).permute(0, 1, 4, 2, 3)
    return flat.view(-1, *shape)
