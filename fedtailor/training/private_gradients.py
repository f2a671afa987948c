"""Private gradients of single samples (DP-SGD, Abadi et al. 2016): each example's is clipped, their sum gets noise.

A query is (Σ_i min(1, C / ‖g_i‖) g_i + N(0, σ² C² I)) / (q n) over a Poisson batch: each of the n samples is in it with
probability q, independently of all others and of all other batches. So no sample moves the sum by more than C, however
large its gradient is, and what n says is known anyway. A sample whose gradient is not finite counts as 0.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedtailor.privacy.noise import Noise
from fedtailor.training.ghost import clip_factors, ghost_of, place_of
from fedtailor.training.inputs import Held, Inputs, apply, take, tensors
from fedtailor.training.network import Loss, Network
from fedtailor.training.streams import seed_network

MOST_EXAMPLES = 128  # in one pass
MOST_NUMBERS = 1 << 24  # of examples' gradients in one pass: 64 MiB in single precision


def sampling_rate(n_samples: int, batch: int | None) -> float:
    """Compute q, the probability of each sample to be in a batch of this expected size; None stands for all samples."""
    return 1.0 if batch is None or batch >= n_samples else batch / n_samples


@dataclass
class Private:
    """The private gradients of one client in one round.

    `clip` is the largest norm of an example's gradient, C, and `noise` the standard deviation of the noise as a
    multiple of it, σ. `queries` counts the gradients so far by their sampling rate q.
    """

    clip: float
    noise: float
    source: Noise
    queries: Counter[float] = field(default_factory=Counter)

    def draw(self, n_samples: int, rate: float, device: torch.device) -> Tensor | None:
        """Draw a Poisson batch: the indices of its samples, perhaps none; None stands for all of them."""
        return None if rate == 1 else (self.source.uniform(n_samples) < rate).nonzero().flatten().to(device)

    @torch.no_grad()
    def write_gradient(
        self,
        network: Network,
        function: nn.Module,
        x: Inputs,
        y: Tensor,
        loss: Loss,
        part: slice,
        rate: float,
        n_samples: int,
    ) -> None:
        """Write the private gradient by a batch of this sampling rate into a part of the network's gradient.

        `n_samples` are those of which it was drawn: q n are expected in it. The network is at its present vector, in
        its present mode, and what it draws itself (dropout) is as secret as the noise.
        """
        self.queries[rate] += 1
        if function is network.module:
            network.differentiated += round(rate * n_samples)  # the true number would tell of the draw
        seed_network(self.source.seed(), network.vector.device)
        gradient, size = network.gradient[part], part.stop - part.start
        total = torch.zeros_like(gradient)
        pieces = min(MOST_EXAMPLES, max(1, MOST_NUMBERS // size))
        for start in range(0, len(x), pieces):
            chosen = slice(start, start + pieces)
            total += clipped_sum(network, function, take(x[chosen], None), y[chosen], loss, part, self.clip)
        gradient.copy_(total.add_(self.source.normal(total, self.noise * self.clip)).div_(rate * n_samples))


def clipped_sum(
    network: Network, function: nn.Module, x: Held, y: Tensor, loss: Loss, part: slice, clip: float
) -> Tensor:
    """Compute Σ_i min(1, C / ‖g_i‖) g_i, g_i the gradient of example i by a part of the vector.

    Autograd must be off meanwhile.
    """
    ghost = ghost_of(network, function, x, part)
    if ghost is not None and isinstance(x, Tensor):
        norms = ghost.write_clipped_sum(x, y, loss, clip)
        if norms.isfinite().all():
            return network.gradient[part].clone()
    else:
        rows = example_gradients(network, function, x, y, loss, part)
        norms = torch.linalg.vector_norm(rows, dim=1)
        if norms.isfinite().all():
            return clip_factors(norms, clip) @ rows
    finite = norms.isfinite().nonzero().flatten()
    if not len(finite):
        return torch.zeros_like(network.gradient[part])
    return clipped_sum(network, function, take(x, finite), y[finite], loss, part, clip)


@torch.no_grad()
def squared_norms(network: Network, x: Inputs, y: Tensor, loss: Loss) -> Tensor:
    """Compute ‖g_i‖² for every example i, at the network's present vector and in its present mode. Nothing is private
    about it."""
    network.differentiated += len(y)
    whole, found = slice(0, network.layout.size), list[Tensor]()
    pieces = min(MOST_EXAMPLES, max(1, MOST_NUMBERS // network.layout.size))
    for start in range(0, len(y), pieces):
        xs, ys = take(x[start : start + pieces], None), y[start : start + pieces]
        ghost = ghost_of(network, network.module, xs, whole)
        if ghost is not None and isinstance(xs, Tensor):
            found.append(ghost.write_clipped_sum(xs, ys, loss, 1.0).square())
        else:
            found.append(example_gradients(network, network.module, xs, ys, loss, whole).square().sum(1))
    return torch.cat(found)


def example_gradients(network: Network, function: nn.Module, x: Held, y: Tensor, loss: Loss, part: slice) -> Tensor:
    """Compute the gradients of all examples by a part of the vector, a row each.

    Networks and losses that PyTorch cannot vectorise (a GRU) see one example after the other.
    """
    whole = function is network.module
    if whole not in network.one_by_one:
        try:
            return _vectorised(network, function, x, y, loss, part)
        except RuntimeError:
            network.one_by_one.add(whole)
    return _one_by_one(network, function, x, y, loss, part)


def _vectorised(network: Network, function: nn.Module, x: Held, y: Tensor, loss: Loss, part: slice) -> Tensor:
    parameters = {name: p for name, p in function.named_parameters() if p.requires_grad}
    places = {name: place_of(network, parameter) for name, parameter in parameters.items()}
    wanted = {
        name: parameter.detach()
        for name, parameter in parameters.items()
        if places[name].start < part.stop and places[name].stop > part.start
    }

    def loss_of_one(wanted: dict[str, Tensor], inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        outputs = functional_call(function, wanted, tuple(tensor[None] for tensor in inputs))
        return loss(outputs, target[None])

    found = vmap(grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")(wanted, tensors(x), y)
    rows = network.vector.new_zeros(len(y), part.stop - part.start)
    for name, gradients in found.items():
        if gradients.dim() == 5:  # a convolution's, which lies with its channels last
            gradients = gradients.permute(0, 1, 3, 4, 2)
        place = places[name]
        start, stop = max(place.start, part.start), min(place.stop, part.stop)
        columns = gradients.flatten(1)[:, start - place.start : stop - place.start]
        rows[:, start - part.start : stop - part.start] = columns
    return rows


@torch.enable_grad()
def _one_by_one(network: Network, function: nn.Module, x: Held, y: Tensor, loss: Loss, part: slice) -> Tensor:
    rows = []
    for number in range(len(y)):
        one = slice(number, number + 1)
        network.gradient.zero_()
        loss(apply(function, x[one]), y[one]).backward()
        rows.append(network.gradient[part].clone())
    return torch.stack(rows)
