"""The forward and backward pass of any module for several clients at once, by `torch.func`: its parameters and buffers
are those of its vectors' rows, and each client sees its own batch alone."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtailor.training.descent import Batch, Objective
from fedtailor.training.joined import Joined, for_all
from fedtailor.training.layout import rows_as
from fedtailor.training.network import Loss, Network
from fedtailor.training.stacked_batches import Step, on_device
from fedtailor.training.stacked_chain import loss_and_gradient


class StackedModule:
    """The passes of a module for several clients. `vectors` and `gradients` have a row for each client."""

    def __init__(self, network: Network, function: nn.Module, vectors: Tensor, gradients: Tensor) -> None:
        self.network, self.function = network, function
        self.vectors, self.gradients = vectors, gradients
        self.names = {id(owner): f"{name}." if name else "" for name, owner in function.named_modules()}
        self.placed = [entry for entry in network.placed if id(entry[0]) in self.names]

    def differentiate(
        self, rows: slice, step: Step, losses: Sequence[Loss], beta: float = 0.0, valued: bool = False
    ) -> Tensor | None:
        """Write the gradient of each client's loss, by the samples' weights, into its row of the gradients, or with
        `beta` 1 add it there. Return these losses if they are `valued`.

        Batches of different sizes are passed apart, as what fills them up would be seen by BatchNorm.
        """
        sizes = np.array(step.sizes)
        if (sizes == sizes[0]).all():
            return self._differentiate(self.vectors[rows], self.gradients[rows], step, losses, beta, valued)
        values = step.weights.new_zeros(len(sizes))
        for size in np.unique(sizes).tolist():
            those = np.flatnonzero(sizes == size)
            chosen = on_device(those, step.x.device)
            of_rows = chosen + rows.start
            vectors, gradients = self.vectors.index_select(0, of_rows), self.gradients.index_select(0, of_rows)
            indices = None if step.indices is None else step.indices.index_select(0, chosen)[:, :size]
            x, y, weights = (t.index_select(0, chosen)[:, :size] for t in (step.x, step.y, step.weights))
            part = Step(sizes[those].tolist(), x, y, weights, indices, chosen)
            value = self._differentiate(
                vectors, gradients, part, [losses[place] for place in those.tolist()], beta, valued
            )
            self.vectors.index_copy_(0, of_rows, vectors)  # its buffers have changed
            self.gradients.index_copy_(0, of_rows, gradients)
            if value is not None:
                values.index_copy_(0, chosen, value)
        return values

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

        found: Tensor = for_all(outputs_of_one, tensors, x)
        return found

    def _loss(
        self, tensors: dict[str, Tensor], step: Step, losses: Sequence[Loss], valued: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return outputs of the module, the gradient of the losses by them, and the losses if they are `valued`."""
        outputs = self._outputs(tensors, step.x)
        value, d = loss_and_gradient(outputs.detach(), step, losses, valued)
        return outputs, d, value

    def _differentiate(
        self,
        vectors: Tensor,
        gradients: Tensor,
        step: Step,
        losses: Sequence[Loss],
        beta: float,
        valued: bool,
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
            outputs, d, value = self._loss({**parameters, **buffers}, step, losses, valued)
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


class Whole(nn.Module):
    """A method's objective as a module, with the parameters of the network and of the method's extra tensors."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.module, self.extra, self.network = network.module, network.extra, network

    def forward(self, objective: Objective, loss: Loss, x: Tensor, y: Tensor, indices: Tensor) -> Tensor:
        return objective(Batch(self.network, loss, x, y, indices))


class StackedObjective(StackedModule):
    """The passes of a method's own objective, joined of those of the clients."""

    def __init__(self, network: Network, vectors: Tensor, gradients: Tensor, joined: Joined, which: int) -> None:
        super().__init__(network, Whole(network), vectors, gradients)
        self.joined, self.which = joined, which

    def works(self, rows: slice, step: Step, losses: Sequence[Loss]) -> bool:
        """Find out whether the objective can be differentiated for all at once, by trying it on copies."""
        try:
            self._differentiate(self.vectors[rows].clone(), self.gradients[rows].clone(), step, losses, 0.0, False)
        except Exception:  # the objective's own or PyTorch's, of any kind: each client's is called by itself
            return False
        return not self.joined.written

    def _loss(
        self, tensors: dict[str, Tensor], step: Step, losses: Sequence[Loss], valued: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        def of_client(tensors: dict[str, Tensor], own: list[Tensor], *batch: Tensor) -> Tensor:
            objective = self.joined.function(self.which, own)
            found: Tensor = functional_call(self.function, tensors, (objective, losses[0], *batch))
            return found

        own = self.joined.tensors(slice(len(step.sizes)) if step.clients is None else step.clients)
        values = for_all(of_client, tensors, own, step.x, step.y, step.indices)
        return values, step.weights.sum((1, 2)), None
