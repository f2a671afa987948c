"""A network as a vector: the parameters of any `nn.Module` are views into one flat tensor, its gradients into another.

The vector holds everything that training changes: parameters and, beside the parameters of their layer, the floating
buffers (BatchNorm's running mean and variance). Layers follow each other in the order in which they are registered,
those of the head last, so that the body, the head and every layer are slices. Frozen layers are not in it. Behind the
head lie the tensors that a method trains beside the network.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedtailor._common.errors import FedtailorError
from fedtailor.messages import fetched
from fedtailor.training.inputs import Held, apply
from fedtailor.training.layers import find_head, frozen_modules, layers_of
from fedtailor.training.layout import Layout, view_as

Loss = Callable[[Tensor, Tensor], Tensor]  # of a network's outputs and the targets

NORMALISATION = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
BATCH_NORM = nn.modules.batchnorm._BatchNorm  # of one, two or three dimensions


class Network:
    """The vector view of a module.

    `vector` and `gradient` share the memory of the module's parameters and their gradients: writing one writes the
    other. `layout` has their slices. `extra` are the method's extra tensors, as parameters. `frozen` are the submodules
    without trained parameters, which always are in evaluation mode. `has_batch_norm` is true if another layer
    normalises by the other samples of its batch. With `autocast`, passes through the module are computed in bfloat16.
    `stack` is there while several clients train as one computation, and this network's vector is a row of it.
    """

    autocast = False
    stack: Any = None

    def __init__(
        self,
        module: nn.Module,
        head: int | str | list[str] = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        example: Any = None,
        pretrained: Collection[str] = (),
        extra: Mapping[str, Tensor] | None = None,
        sizes: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """`head` is a number of layers, the last that a forward pass of the `example` uses, or their names (see
        `find_head`; a list has exact names). `pretrained` names the tensors that keep their values under any seed.
        `extra` has the initial values of the method's extra tensors, `sizes` the numbers of features and of outputs."""
        self.module = module.to(device=device, dtype=dtype)
        self.frozen = frozen_modules(self.module)
        batch_norm = {layer for layer in self.module.modules() if isinstance(layer, BATCH_NORM)}
        self.has_batch_norm = bool(batch_norm.difference(self.frozen))
        layers = layers_of(self.module)
        kinds = {t.dtype for tensors in layers.values() for _, _, t in tensors if isinstance(t, nn.Parameter)}
        if len(kinds) != 1:
            raise FedtailorError(
                "The network needs trainable parameters of one floating type; "
                f"this one has {', '.join(sorted(map(str, kinds))) or 'none'}."
            )
        self.head_names = head if isinstance(head, list) else find_head(self.module, head, example)
        order = [name for name in layers if name not in self.head_names] + self.head_names
        parts = {name: sum(t.numel() for _, _, t in layers[name]) for name in order}
        places: dict[str, slice] = {}
        buffers: list[slice] = []
        self._integer_buffers: dict[str, torch.dtype] = {}
        self.placed: list[tuple[nn.Module, str, slice]] = []  # owner and name of each tensor, and its place
        self._pretrained: list[slice] = []
        head_shapes: dict[str, torch.Size] = {}
        start = 0
        for name in order:
            places[name] = slice(start, start + parts[name])
            for owner, attribute, tensor in layers[name]:
                where, full_name = slice(start, start + tensor.numel()), f"{name}.{attribute}".lstrip(".")
                if name in self.head_names:
                    head_shapes[full_name] = tensor.shape
                if not isinstance(tensor, nn.Parameter):
                    buffers.append(where)
                    if not tensor.is_floating_point():
                        self._integer_buffers[full_name] = tensor.dtype
                if full_name in pretrained:
                    self._pretrained.append(where)
                self.placed.append((owner, attribute, where))
                start += tensor.numel()
        head_size = sum(parts[name] for name in self.head_names)
        norm_layers = [p for n, p in places.items() if isinstance(self.module.get_submodule(n), NORMALISATION)]
        body, head_place, dtype = slice(0, start - head_size), slice(start - head_size, start), kinds.pop()
        initial = {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in (extra or {}).items()}
        self.extra = nn.ParameterDict(initial)
        extra_places: dict[str, slice] = {}
        for name, tensor in initial.items():
            extra_places[name] = slice(start, start := start + tensor.numel())
            self.placed.append((self.extra, name, extra_places[name]))
        self.layout = Layout(
            size=start,
            body=body,
            head=head_place,
            layers=places,
            norm_layers=tuple(norm_layers),
            buffers=tuple(buffers),
            n_features=sizes[0],
            n_outputs=sizes[1],
            head_shapes=head_shapes,
            extra=extra_places,
            extra_shapes={name: tensor.shape for name, tensor in initial.items()},
        )
        self.layout = replace(self.layout, linear=self._linear_head())
        self._place(torch.zeros(start, device=device, dtype=dtype))
        placed = {(id(owner), attribute) for owner, attribute, _ in self.placed}
        self._constants = [
            (owner, key, buffer.clone())
            for owner in self.module.modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None and (id(owner), key) not in placed
        ]

    def _place(self, vector: Tensor, gradient: Tensor | None = None) -> None:
        """Make the parameters and buffers views of their places in this vector."""
        self.vector, self.gradient = vector, torch.zeros_like(vector) if gradient is None else gradient
        self.chains: dict[tuple[bool, int, str], Any] = {}  # see `chain_of`
        self.hooks_seen = -1
        self.one_by_one: set[bool] = set()  # see `example_gradients`
        self.differentiated = 0  # samples of which the network's gradient was computed since the last reset
        for owner, attribute, where in self.placed:
            parameter = owner._parameters.get(attribute)
            tensor = owner._buffers[attribute] if parameter is None else parameter
            assert tensor is not None
            view = view_as(vector[where], tensor.shape)
            view.copy_(tensor.detach())
            if parameter is not None:
                parameter.data = view
                parameter.grad = view_as(self.gradient[where], tensor.shape)
            else:
                # `.data` has a version counter of its own: autograd must not take one layer's buffers for another's.
                owner._buffers[attribute] = view.data

    def __getstate__(self) -> dict[str, Any]:
        """Return the module and the places of its tensors: a pickle would not keep these views of one vector."""
        made_anew = ("vector", "gradient", "chains", "hooks_seen", "one_by_one", "differentiated")
        return {name: value for name, value in vars(self).items() if name not in made_anew}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        first = next(p for owner, attribute, _ in self.placed if (p := owner._parameters.get(attribute)) is not None)
        self._place(torch.zeros(self.layout.size, device=first.device, dtype=first.dtype))

    def placed_at(self, vector: Tensor, gradient: Tensor) -> "Network":
        """Copy the network into this memory. Frozen parameters, which nobody changes, are not copied."""
        frozen = {id(p): p for p in self.module.parameters() if not p.requires_grad}
        other = Network.__new__(Network)
        vars(other).update(copy.deepcopy(self.__getstate__(), frozen))
        other._place(vector, gradient)
        return other

    def on(self, device: torch.device) -> "Network":
        """Copy the network to a device."""
        other = copy.deepcopy(self)
        other.module.to(device)
        other._constants = [(owner, key, buffer.to(device)) for owner, key, buffer in other._constants]
        other._place(self.vector.to(device, copy=True), self.gradient.to(device, copy=True))
        return other

    @property
    def n_parameters(self) -> int:
        """The number of trainable parameters: the length of the vector without the buffers."""
        return self.layout.size - sum(len(self.vector[place]) for place in self.layout.buffers)

    def frozen_tensors(self) -> Iterator[Tensor]:
        """Yield the frozen parameters, and the buffers of frozen layers: equal at all clients, and never sent."""
        yield from (parameter.detach() for parameter in self.module.parameters() if not parameter.requires_grad)
        yield from (b for layer in self.frozen for b in layer._buffers.values() if b is not None)

    def train(self, n_samples: int, module: nn.Module | None = None) -> None:
        """Set the network, or a part of it, to training mode. Frozen layers stay in evaluation mode. One sample has no
        variance: BatchNorm then uses its buffers."""
        module = module or self.module
        module.train()
        for layer in self.frozen:
            layer.training = False
        if n_samples == 1:
            for layer in module.modules():
                if isinstance(layer, BATCH_NORM):
                    layer.eval()

    def state_dict(self, theta: Tensor | None = None) -> dict[str, Tensor]:
        """Return the module's own state dict with the values of `theta`, as plain PyTorch loads it."""
        if theta is not None:
            self.vector.copy_(theta)
        return {
            name: _as(self._integer_buffers.get(name, tensor.dtype), tensor.detach()).contiguous()
            for name, tensor in self.module.state_dict().items()
        }

    def tensors(self, theta: Tensor) -> dict[str, Tensor]:
        """View a vector as the module's parameters, and copy its buffers, by name: for `torch.func.functional_call`,
        through which gradients flow back into `theta`."""
        names = {id(owner): f"{name}." if name else "" for name, owner in self.module.named_modules()}
        found = {}
        for owner, attribute, where in self.placed:
            if owner is self.extra:
                continue
            parameter = owner._parameters.get(attribute)
            like = owner._buffers[attribute] if parameter is None else parameter
            assert like is not None
            view = view_as(theta[where], like.shape)
            found[names[id(owner)] + attribute] = view.detach().clone() if parameter is None else view
        return found

    def reset(self, vector: Tensor) -> None:
        """Forget all work: set the vector to this one and the gradient to 0, and give the buffers outside the vector
        their initial values again."""
        with torch.no_grad():
            self.vector.copy_(vector)
            self.gradient.zero_()
        self.differentiated = 0
        for owner, key, first in self._constants:
            if (present := owner._buffers[key]) is not None and present.shape == first.shape:
                present.copy_(first)
            else:
                owner._buffers[key] = first.clone()

    def initialised(self, seed: int) -> Tensor:
        """Return the network's initial vector under another seed: every layer that can is initialised anew, but for
        frozen ones and pretrained weights."""
        before, frozen = self.vector.clone(), set(self.frozen)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            for layer in self.module.modules():
                if layer not in frozen and callable(reset := getattr(layer, "reset_parameters", None)):
                    inside = [(p, p.detach().clone()) for p in layer.parameters() if not p.requires_grad]
                    reset()
                    for parameter, value in inside:
                        parameter.detach().copy_(value)
        other = self.vector.clone()
        for place in self._pretrained:
            other[place] = before[place]
        self.vector.copy_(before)
        return other

    def fetched(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors to the host in one transfer, with those of the clients that this one computes with."""
        return fetched(tensors) if self.stack is None else cast(list[Tensor], self.stack.fetched(self, tensors))

    def __call__(self, x: Held) -> Tensor:
        return apply(self.module, x)

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context of a pass and its loss: autocast to bfloat16, if the network is to use it."""
        return torch.autocast(self.vector.device.type, torch.bfloat16) if self.autocast else nullcontext()

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
            return cast(Tensor, self._layers(slice(cut))(x))
        caught: list[Tensor] = []
        hook = head.register_forward_pre_hook(lambda _, inputs: caught.extend(inputs))
        try:
            output = self(x)
        finally:
            hook.remove()
        return caught[0] if len(caught) == 1 and torch.equal(head(caught[0]), output) else None

    @torch.no_grad()
    def sizes(self, x: Held, outputs: Tensor) -> tuple[int | None, int | None]:
        """Count the features and the outputs of one of these samples; None where they are not a row of numbers."""
        self.module.eval()
        with self.precision():
            features = self.features(x)
        wide = None if not isinstance(features, Tensor) else features.flatten(1).shape[1]
        return wide, outputs.shape[1] if outputs.dim() == 2 else None

    def head_module(self) -> nn.Module | None:
        """Return the head as a module that takes the features; None if no submodule is the head and nothing else."""
        if (cut := self._cut()) is not None:
            return self._layers(slice(cut, None))
        pieces = zip(*(name.split(".") for name in self.head_names), strict=False)
        shared = [piece[0] for piece in takewhile(lambda piece: len(set(piece)) == 1, pieces)]
        within = [name for name in self.layout.layers if name.split(".")[: len(shared)] == shared]
        return self.module.get_submodule(".".join(shared)) if shared and set(within) == set(self.head_names) else None

    def _linear_head(self) -> bool:
        """Find out whether the outputs are one linear layer of the features, and that layer is the head."""
        head, layout = self.head_module(), self.layout
        leaves = [] if head is None else [layer for layer in head.modules() if not list(layer.children())]
        shapes = [*layout.head_shapes.values()]
        return [type(leaf) for leaf in leaves] == [nn.Linear] and shapes[0] == (layout.n_outputs, layout.n_features)

    def _layers(self, which: slice) -> nn.Sequential:
        """Take some layers of a Sequential. A class of somebody's need not be made of layers, so it is not sliced."""
        return nn.Sequential(OrderedDict(list(self.module._modules.items())[which]))  # type: ignore[arg-type]

    def _cut(self) -> int | None:
        """Find the cut of a Sequential: the index of its first child with a layer of the head. One with a forward of
        its own is any other network."""
        if type(self.module).forward is not nn.Sequential.forward or not self.head_names:
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
