"""The forward and backward pass of any module for several clients at once, by `torch.func`: its parameters and buffers
are those of its vectors' rows, and each client sees its own batch alone."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedtailor.training.inputs import sent
from fedtailor.training.layout import rows_as
from fedtailor.training.network import Loss, Network
from fedtailor.training.stacked_chain import loss_and_gradient


class StackedModule:
    """The passes of a module for several clients. `vectors` and `gradients` have a row for each client."""

    def __init__(self, network: Network, function: nn.Module, vectors: Tensor, gradients: Tensor) -> None:
        self.network, self.function = network, function
        self.vectors, self.gradients = vectors, gradients
        self.names = {id(owner): f"{name}." if name else "" for name, owner in function.named_modules()}
        self.placed = [entry for entry in network.placed if id(entry[0]) in self.names]

    def differentiate(
        self,
        rows: slice,
        x: Tensor,
        y: Tensor,
        sizes: Sequence[int],
        shares: float | Tensor,
        losses: Sequence[Loss],
        beta: float = 0.0,
    ) -> Tensor | None:
        """Write each client's gradient, times its share, into its row of the gradients, or with `beta` 1 add it there.
        Return the clients' losses, times their shares; none where all have the same.

        Batches of different `sizes` are passed apart, as what fills them up would be seen by BatchNorm.
        """
        if min(sizes) == max(sizes):
            return self._differentiate(self.vectors[rows], self.gradients[rows], x, y, shares, losses, beta)
        values = y.new_zeros(len(sizes), dtype=self.vectors.dtype)
        for size in sorted(set(sizes)):
            those = [place for place, other in enumerate(sizes) if other == size]
            chosen = sent(torch.tensor(those, device="cpu"), x.device)
            of_rows = chosen + rows.start
            vectors, gradients = self.vectors.index_select(0, of_rows), self.gradients.index_select(0, of_rows)
            share = shares.index_select(0, chosen) if isinstance(shares, Tensor) else shares
            xs, ys = (tensor.index_select(0, chosen)[:, :size] for tensor in (x, y))
            of_those = [losses[place] for place in those]
            value = self._differentiate(vectors, gradients, xs, ys, share, of_those, beta)
            self.vectors.index_copy_(0, of_rows, vectors)  # its buffers have changed
            self.gradients.index_copy_(0, of_rows, gradients)
            if value is not None:
                values.index_copy_(0, chosen, value)
        return values if isinstance(shares, Tensor) else None

    def outputs(self, rows: slice, x: Tensor) -> Tensor:
        """Compute each client's outputs."""
        tensors = {
            self.names[id(owner)] + attribute: rows_as(self.vectors[rows, where], getattr(owner, attribute).shape)
            for owner, attribute, where in self.placed
        }
        return self._outputs(tensors, x)

    def _outputs(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        def outputs_of_one(tensors: dict[str, Tensor], batch: Tensor) -> Tensor:
            outputs: Tensor = functional_call(self.function, tensors, (batch,))
            return outputs

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # of operators that take one by one
            found: Tensor = vmap(outputs_of_one)(tensors, x)
            return found

    def _differentiate(
        self,
        vectors: Tensor,
        gradients: Tensor,
        x: Tensor,
        y: Tensor,
        shares: float | Tensor,
        losses: Sequence[Loss],
        beta: float,
    ) -> Tensor | None:
        parameters, buffers = dict[str, Tensor](), dict[str, Tensor]()
        targets, places = list[Tensor](), list[Tensor]()
        for owner, attribute, where in self.placed:
            name, like = self.names[id(owner)] + attribute, getattr(owner, attribute)
            values = rows_as(vectors[:, where], like.shape)
            if isinstance(like, nn.Parameter):
                # `.data` has a version counter of its own: the pass may write into buffers of the same memory.
                parameters[name] = values.data.requires_grad_()
                targets.append(rows_as(gradients[:, where], like.shape))
            else:
                # PyTorch's rules for BatchNorm write into contiguous memory alone, and it must be nobody else's.
                buffers[name] = values.clone(memory_format=torch.contiguous_format)
                places.append(values)

        with torch.enable_grad():
            outputs = self._outputs({**parameters, **buffers}, x)
            value, d = loss_and_gradient(outputs.detach(), y, [y.shape[1]] * len(y), shares, losses)
            wanted = list(parameters.values())
            found = torch.autograd.grad(outputs, wanted, d, allow_unused=True, materialize_grads=True)
        for target, gradient in zip(targets, found, strict=True):
            if beta:
                target.add_(gradient)
            else:
                target.copy_(gradient)
        for place, buffer in zip(places, buffers.values(), strict=True):
            place.copy_(buffer)
        return value
