"""A network as a vector: the parameters of any `nn.Module` are views into one flat tensor, its gradients into another.

The vector holds everything that training changes: parameters and, beside the parameters of their layer, the floating
buffers (BatchNorm's running mean and variance). Layers follow each other in the order in which they are registered,
those of the head last, so that the body, the head and every layer are slices.
"""

from collections.abc import Callable
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedtailor.errors import FedtailorError
from fedtailor.local.inputs import Held, apply
from fedtailor.local.layout import Layout

Loss = Callable[[Tensor, Tensor], Tensor]  # of a network's outputs and the targets

NORMALISATION = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
BATCH_NORM = nn.modules.batchnorm._BatchNorm  # of one, two or three dimensions


class Network:
    """The vector view of a module.

    `vector` and `gradient` share the memory of the module's parameters and their gradients: writing one writes the
    other. `layout` has their slices.
    """

    def __init__(
        self,
        module: nn.Module,
        head: int | str = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.module = module.to(device=device, dtype=dtype)
        layers = _layers(self.module)
        kinds = {t.dtype for tensors in layers.values() for _, _, t in tensors if isinstance(t, nn.Parameter)}
        if len(kinds) != 1:
            raise FedtailorError(
                "The network needs trainable parameters of one floating type; "
                f"this one has {', '.join(sorted(map(str, kinds))) or 'none'}."
            )
        trained = [name for name, tensors in layers.items() if isinstance(tensors[0][2], nn.Parameter)]
        self.head_names = _head_names(trained, head)
        order = [name for name in layers if name not in self.head_names] + self.head_names
        sizes = {name: sum(t.numel() for _, _, t in layers[name]) for name in order}
        self.vector = torch.zeros(sum(sizes.values()), device=device, dtype=kinds.pop())
        self.gradient = torch.zeros_like(self.vector)
        self.chains: dict[tuple[bool, int, str], Any] = {}  # see `chain_of`
        self.hooks_seen = -1
        self.differentiated = 0  # samples of which the network's gradient was computed since the last reset
        places: dict[str, slice] = {}
        self._buffers: list[slice] = []
        self._integer_buffers: dict[str, torch.dtype] = {}
        self._placed: set[tuple[int, str]] = set()
        start = 0
        for name in order:
            places[name] = slice(start, start + sizes[name])
            for owner, attribute, tensor in layers[name]:
                self._place(name, owner, attribute, tensor, slice(start, start + tensor.numel()))
                start += tensor.numel()
        head_size = sum(sizes[name] for name in self.head_names)
        norm_layers = [p for n, p in places.items() if isinstance(self.module.get_submodule(n), NORMALISATION)]
        self.layout = Layout(
            size=start,
            body=slice(0, start - head_size),
            head=slice(start - head_size, start),
            layers=places,
            norm_layers=tuple(norm_layers),
            buffers=tuple(self._buffers),
        )
        self._constants = [
            (owner, key, buffer.clone())
            for owner in self.module.modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None and (id(owner), key) not in self._placed
        ]

    def _place(self, layer: str, owner: nn.Module, attribute: str, tensor: Tensor, where: slice) -> None:
        """Make a parameter or buffer a view of its place in the vector."""
        view = _view(self.vector[where], tensor.shape)
        view.copy_(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            tensor.data = view
            tensor.grad = _view(self.gradient[where], tensor.shape)
        else:
            if not tensor.is_floating_point():
                self._integer_buffers[f"{layer}.{attribute}" if layer else attribute] = tensor.dtype
            # `.data` has a version counter of its own: autograd must not take one layer's buffers for another's.
            owner._buffers[attribute] = view.data
            self._placed.add((id(owner), attribute))
            self._buffers.append(where)

    @property
    def has_batch_norm(self) -> bool:
        """True if a layer normalises by the other samples of its batch."""
        return any(isinstance(layer, BATCH_NORM) for layer in self.module.modules())

    @property
    def n_parameters(self) -> int:
        """The number of trainable parameters: the length of the vector without the buffers."""
        return self.layout.size - sum(len(self.vector[place]) for place in self.layout.buffers)

    def state_dict(self, theta: Tensor | None = None) -> dict[str, Tensor]:
        """Return the module's own state dict with the values of `theta`, as plain PyTorch loads it."""
        if theta is not None:
            self.vector.copy_(theta)
        return {
            name: _as(self._integer_buffers.get(name, tensor.dtype), tensor.detach()).contiguous()
            for name, tensor in self.module.state_dict().items()
        }

    def reset(self, vector: Tensor) -> None:
        """Forget all work: set the vector to this one and the gradient to 0, and give the buffers outside the vector
        their initial values again."""
        with torch.no_grad():
            self.vector.copy_(vector)
            self.gradient.zero_()
        self.differentiated = 0
        self.reset_constants()

    def reset_constants(self) -> None:
        """Give the buffers outside the vector their initial values again, after a pass that may have changed them."""
        for owner, key, first in self._constants:
            if (present := owner._buffers[key]) is not None and present.shape == first.shape:
                present.copy_(first)
            else:
                owner._buffers[key] = first.clone()

    def initialised(self, seed: int) -> Tensor:
        """Return the network's initial vector under another seed: every layer that can is initialised anew."""
        before = self.vector.clone()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            for layer in self.module.modules():
                if callable(reset := getattr(layer, "reset_parameters", None)):
                    reset()
        other = self.vector.clone()
        self.vector.copy_(before)
        return other

    def __call__(self, x: Held) -> Tensor:
        return apply(self.module, x)

    # --- the frozen body: features once, then only the head ---

    def features(self, x: Held) -> Tensor | None:
        """Compute the features, the outputs of the body; None if this network cannot be cut there.

        A Sequential is cut before the first layer of its head; any other network where its head is one submodule
        and the last thing it applies (which is checked with these samples).
        """
        head = self.head_module()
        if head is None:
            return None
        if (cut := self._cut()) is not None:
            return cast(Tensor, cast(nn.Sequential, self.module)[:cut](x))
        caught: list[Tensor] = []
        hook = head.register_forward_pre_hook(lambda _, inputs: caught.extend(inputs))
        try:
            output = self(x)
        finally:
            hook.remove()
        return caught[0] if len(caught) == 1 and torch.equal(head(caught[0]), output) else None

    def head_module(self) -> nn.Module | None:
        """Return the head as a module that takes the features; None if no submodule is the head and nothing else."""
        if (cut := self._cut()) is not None:
            return cast(nn.Sequential, self.module)[cut:]
        pieces = zip(*(name.split(".") for name in self.head_names), strict=False)
        shared = [piece[0] for piece in takewhile(lambda piece: len(set(piece)) == 1, pieces)]
        within = [name for name in self.layout.layers if name.split(".")[: len(shared)] == shared]
        return self.module.get_submodule(".".join(shared)) if shared and set(within) == set(self.head_names) else None

    def _cut(self) -> int | None:
        """Find the cut of a Sequential: the index of its first child with a layer of the head."""
        if not isinstance(self.module, nn.Sequential) or not self.head_names:
            return None
        children = [name for name, _ in self.module.named_children()]
        cut = min(children.index(name.split(".")[0]) for name in self.head_names)
        body = [name for name in self.layout.layers if name not in self.head_names]
        return cut if all(children.index(name.split(".")[0]) < cut for name in body) else None


def _as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Copy a tensor with this type; a counter that was averaged is rounded."""
    return (tensor.round() if tensor.is_floating_point() and not dtype.is_floating_point else tensor).to(
        dtype, copy=True
    )


def _layers(module: nn.Module) -> dict[str, list[tuple[nn.Module, str, Tensor]]]:
    """List the tensors of each layer (a submodule with parameters or buffers of its own): parameters, then buffers.

    Shared tensors count once. Frozen parameters and constants (indices, masks) are left out.
    """
    layers: dict[str, list[tuple[nn.Module, str, Tensor]]] = {}
    seen: set[int] = set()
    for name, owner in module.named_modules():
        parameters = [(owner, key, p) for key, p in owner._parameters.items() if p is not None and p.requires_grad]
        buffers = [
            (owner, key, b)
            for key, b in owner._buffers.items()
            if b is not None
            and key not in owner._non_persistent_buffers_set
            and ((b.is_floating_point() and bool(b.isfinite().all())) or key == "num_batches_tracked")
        ]
        tensors = [entry for entry in [*parameters, *buffers] if id(entry[2]) not in seen]
        seen.update(id(tensor) for _, _, tensor in tensors)
        if tensors:
            layers[name] = tensors
    return layers


def _head_names(names: list[str], head: int | str) -> list[str]:
    """List the layers of the head: the last `head` layers, or those of the named submodules (comma-separated)."""
    if isinstance(head, int):
        if not 0 <= head <= len(names):
            raise FedtailorError(f"The head cannot have {head} layers: the network has {len(names)}.")
        return names[len(names) - head :]
    wanted = [part.strip() for part in head.split(",")]
    for part in wanted:
        if not any(name == part or name.startswith(part + ".") for name in names):
            raise FedtailorError(f"The network has no layer {part!r} for the head; its layers are {', '.join(names)}.")
    return [name for name in names if any(name == part or name.startswith(part + ".") for part in wanted)]


def _view(flat: Tensor, shape: torch.Size) -> Tensor:
    """View a piece of the vector in a tensor's shape.

    Weights of a convolution are in (out, height, width, in) order, which PyTorch calls channels_last and computes
    faster on a CPU.
    """
    if len(shape) == 4:
        out, channels, height, width = shape
        return flat.view(out, height, width, channels).permute(0, 3, 1, 2)
    return flat.view(shape)
