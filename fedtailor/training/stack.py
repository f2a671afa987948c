"""Several clients train as one computation: their vectors are the rows of one matrix, and what they compute at the same
time is computed once, for all of them.

Each client has a network of its own, whose vector is a row. What it asks of its network (`descend`, `batch_gradient`,
`mean_gradient`, `outputs`) becomes a call that waits until the others have made theirs, and so does what it copies to
the host. Calls that fit each other are then done together, in rows that follow each other; a call that fits no other is
left to the client itself. Every client's samples, batches and random streams are those that it has alone, so the
numbers are the same up to rounding.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedtailor.messages import State, fetched
from fedtailor.training.chain import has_hooks, is_chain, leaves
from fedtailor.training.descent import (
    EVALUATION_BATCH,
    Batch,
    Correction,
    batch_gradient,
    batches,
    head_on_features,
    step_count,
)
from fedtailor.training.inputs import CPU, Inputs, select, sent
from fedtailor.training.network import Loss, Network
from fedtailor.training.optimizer import OptimizerSettings, optimizer_step
from fedtailor.training.stacked_chain import StackedChain
from fedtailor.training.stacked_module import StackedModule

PLANNED = 1 << 20  # samples of which the order is drawn ahead
CLOSE = 1e-3  # how far a stacked gradient may be from the client's own, as a share of its length: far above rounding

Answer = Any  # a call's result; an exception of the client's own; None: it is left to the client


@dataclass(eq=False)
class Call:
    """A question of a client to its network."""

    network: Network

    @property
    def key(self) -> tuple[Any, ...]:
        """Whatever calls share that are done together."""
        return (type(self),)


@dataclass(eq=False)
class Fetch(Call):
    """Copies of tensors on the host (see `fetched`)."""

    tensors: Sequence[Tensor]


@dataclass(eq=False)
class Outputs(Call):
    """The outputs for samples at `theta`, in evaluation mode (see `outputs`)."""

    theta: Tensor
    x: Tensor

    @property
    def key(self) -> tuple[Any, ...]:
        return *super().key, self.x.shape[1:], self.x.dtype

    @property
    def n_steps(self) -> int:
        return -(-len(self.x) // EVALUATION_BATCH)


@dataclass(eq=False)
class MeanGradient(Outputs):
    """The mean loss over all samples, and its gradient (see `mean_gradient`)."""

    y: Tensor
    loss: Loss

    @property
    def key(self) -> tuple[Any, ...]:
        return *super().key, self.y.shape[1:], self.y.dtype


@dataclass(eq=False)
class Gradient(MeanGradient):
    """The gradient of one batch (see `batch_gradient`)."""

    @property
    def n_steps(self) -> int:
        return 1


@dataclass(eq=False)
class Descent(MeanGradient):
    """A local descent (see `descend`). `function` is the network's module, or its head, on features."""

    function: nn.Module
    settings: OptimizerSettings
    stream: torch.Generator
    correction: Correction | None
    scale: Tensor | None
    part: slice
    moments: State
    each_step: Callable[[Tensor], None] | None
    augment: Callable[[Tensor], Tensor] | None
    error: Exception | None = field(default=None, init=False)  # of the client's own functions

    @property
    def key(self) -> tuple[Any, ...]:
        part, whole = (self.part.start, self.part.stop), self.function is self.network.module
        return *super().key, whole, part, self.settings, self.scale is None, tuple(self.moments)

    @property
    def n_steps(self) -> int:
        return step_count(len(self.x), self.settings)

    def correct(self, vector: Tensor, gradient: Tensor) -> None:
        """Add the correction to the gradient."""
        if self.correction is None or self.error is not None:
            return
        try:
            gradient.add_(self.correction(vector) if callable(self.correction) else self.correction)
        except Exception as error:  # of the method's function: the client's own failure
            self.error = error

    def follow(self, vector: Tensor) -> None:
        """Call `each_step`."""
        if self.each_step is None or self.error is not None:
            return
        try:
            self.each_step(vector)
        except Exception as error:
            self.error = error


def alone(_: Call) -> Answer:
    """Wait for nobody: the client computes by itself."""
    return None


class Stack:
    """The networks of a group of clients, whose vectors are the rows of one matrix.

    `wait` hands a call in and returns its answer; who runs the clients sets it.
    """

    def __init__(self, network: Network, size: int) -> None:
        self.vectors = network.vector.repeat(size, 1)
        self.gradients = torch.zeros_like(self.vectors)
        rows = zip(self.vectors.unbind(), self.gradients.unbind(), strict=True)
        self.networks = [network.placed_at(vector, gradient) for vector, gradient in rows]
        self._rows = {id(network): row for row, network in enumerate(self.networks)}
        self._passes: dict[tuple[Any, ...], StackedChain | StackedModule] = {}
        self.wait: Callable[[Call], Answer] = alone
        for own in self.networks:
            own.stack, own.autocast = self, network.autocast

    # --- what a client's network asks ---

    def descend(
        self,
        network: Network,
        theta: Tensor,
        x: Inputs,
        y: Tensor,
        loss: Loss,
        settings: OptimizerSettings,
        stream: torch.Generator,
        part: slice,
        correction: Correction | None,
        scale: Tensor | None,
        moments: State,
        each_step: Callable[[Tensor], None] | None,
        augment: Callable[[Tensor], Tensor] | None,
    ) -> Tensor | None:
        """Descend together with others; None if it cannot be, and the caller has to do it."""
        if not self._fits(network, x):
            return None
        function, layout = network.module, network.layout
        if part == layout.head != slice(0, layout.size):
            network.vector.copy_(theta)
            function, x = head_on_features(network, x)
        if function is not network.module:
            augment = None
        assert isinstance(x, Tensor)
        found: Tensor | None = self._answer(
            Descent(
                network, theta, x, y, loss, function, settings, stream, correction, scale, part, moments, each_step,
                augment,
            )
        )  # fmt: skip
        return found

    def gradient(self, theta: Tensor, batch: Batch) -> Tensor | None:
        """Compute a batch's gradient together with others; None if it cannot be."""
        if not isinstance(batch.x, Tensor) or not self._fits(batch.network, batch.x):
            return None
        found: Tensor | None = self._answer(Gradient(batch.network, theta, batch.x, batch.y, batch.loss_function))
        return found

    def mean_gradient(
        self, network: Network, theta: Tensor, x: Inputs, y: Tensor, loss: Loss
    ) -> tuple[Tensor, Tensor] | None:
        """Compute the mean loss and its gradient together with others; None if it cannot be."""
        if not isinstance(x, Tensor) or not self._fits(network, x):
            return None
        found: tuple[Tensor, Tensor] | None = self._answer(MeanGradient(network, theta, x, y, loss))
        return found

    def outputs(self, network: Network, theta: Tensor, x: Inputs) -> Tensor | None:
        """Compute outputs together with others; None if it cannot be."""
        if not isinstance(x, Tensor) or not self._fits(network, x):
            return None
        found: Tensor | None = self._answer(Outputs(network, theta, x))
        return found

    def fetched(self, network: Network, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors to the host, with those of others in one transfer."""
        found: list[Tensor] | None = self._answer(Fetch(network, tensors))
        return fetched(tensors) if found is None else found

    def _fits(self, network: Network, x: Inputs) -> bool:
        """Find out whether passes of this network over these samples can be done with others'. BatchNorm's single
        sample, and hooks, are for the client alone."""
        if not isinstance(x, Tensor) or len(x) == 0 or (len(x) == 1 and network.has_batch_norm):
            return False
        if RemovableHandle.next_id != network.hooks_seen:
            if has_hooks(network.module):
                return False
            network.hooks_seen = RemovableHandle.next_id
        return True

    def _answer(self, call: Call) -> Answer:
        found = self.wait(call)
        if isinstance(found, Exception):
            raise found
        return found

    # --- what all of them asked ---

    @torch.no_grad()
    def compute(self, calls: Sequence[Call]) -> list[Answer]:
        """Do the calls that go together, and answer each."""
        alike: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
        for call in calls:
            alike[call.key].append(call)
        answers: dict[Call, Answer] = {}
        for those in alike.values():
            if isinstance(those[0], Fetch):
                answers |= zip(those, _fetched(those), strict=True)
                continue
            for run in self._runs(those):
                if len(run) > 1:
                    answers |= zip(run, self._together(run), strict=True)
        return [answers.get(call) for call in calls]

    def _runs(self, calls: list[Outputs]) -> Iterator[list[Any]]:
        """Cut calls into runs: in rows that follow each other, of which the last ones are finished first."""
        ordered = sorted(calls, key=self._row)
        ends = [
            place
            for place, (one, other) in enumerate(pairwise(ordered), 1)
            if self._row(other) != self._row(one) + 1 or other.n_steps > one.n_steps
        ]
        for start, end in pairwise([0, *ends, len(ordered)]):
            yield ordered[start:end]

    def _row(self, call: Call) -> int:
        return self._rows[id(call.network)]

    def _together(self, run: list[Any]) -> list[Answer]:
        for call in run:
            call.network.vector.copy_(call.theta)
        match run[0]:
            case Descent():
                return self._descend(run)
            case Gradient():
                return self._gradients(run)
            case MeanGradient():
                return self._mean_gradients(run)
        return self._outputs(run)

    def _pass(self, network: Network, function: nn.Module, x: Tensor) -> StackedChain | StackedModule:
        """Find the passes of a network, or of its head, over samples like these: a chain's, or any module's."""
        key = (function is network.module, x.dim())
        if key not in self._passes or self._passes[key].network is not network:
            kind = StackedChain if StackedChain.fits(function, x) else StackedModule
            self._passes[key] = kind(network, function, self.vectors, self.gradients)
        return self._passes[key]

    def _gradients(self, run: list[Gradient]) -> list[Answer]:
        network, rows = run[0].network, self._rows_of(run)
        sizes = [len(call.x) for call in run]
        network.train(min(sizes))
        for call in run:
            call.network.differentiated += len(call.x)
        self.gradients[rows].zero_()
        xs, ys = (_filled_up(tensors) for tensors in ([call.x for call in run], [call.y for call in run]))
        passes = self._pass(network, network.module, run[0].x)
        passes.differentiate(rows, xs, ys, sizes, 1.0, [call.loss for call in run])
        return [call.network.gradient.clone() for call in run]

    def _mean_gradients(self, run: list[MeanGradient]) -> list[Answer]:
        network, rows = run[0].network, self._rows_of(run)
        network.module.eval()
        self.gradients[rows].zero_()
        passes, n = self._pass(network, network.module, run[0].x), [len(call.x) for call in run]
        (x, x_starts), (y, y_starts) = _pooled([call.x for call in run]), _pooled([call.y for call in run])
        totals = self.vectors.new_zeros(len(run))
        for sizes, places in _in_order(n):
            k = len(sizes)
            indices = _sent(np.stack([places + x_starts[:k, None], places + y_starts[:k, None]]), x.device)
            shares = _sent(np.array(sizes) / n[:k], x.device, totals.dtype)
            xs, ys = (_taken(of, chosen) for of, chosen in zip((x, y), indices, strict=True))
            losses = [call.loss for call in run[:k]]
            found = passes.differentiate(slice(rows.start, rows.start + k), xs, ys, sizes, shares, losses, beta=1.0)
            assert found is not None
            totals[:k] += found
        for call in run:
            call.network.differentiated += len(call.x)
        return [(total, call.network.gradient.clone()) for total, call in zip(totals.unbind(), run, strict=True)]

    def _outputs(self, run: list[Outputs]) -> list[Answer]:
        network, rows = run[0].network, self._rows_of(run)
        network.module.eval()
        passes = self._pass(network, network.module, run[0].x)
        x, starts = _pooled([call.x for call in run])
        found: list[list[Tensor]] = [[] for _ in run]
        for sizes, places in _in_order([len(call.x) for call in run]):
            k = len(sizes)
            xs = _taken(x, _sent(places + starts[:k, None], x.device))
            scores = passes.outputs(slice(rows.start, rows.start + k), xs)
            for pieces, of_client, size in zip(found, scores.unbind(), sizes, strict=False):
                pieces.append(of_client[:size])
        return [torch.cat(pieces) for pieces in found]

    def _rows_of(self, run: Sequence[Call]) -> slice:
        first = self._row(run[0])
        return slice(first, first + len(run))

    def _descend(self, run: list[Descent]) -> list[Answer]:
        """Take the steps of all descents at once. Those that are finished drop out, the last rows first."""
        first, rows = run[0], self._rows_of(run)
        network, settings, part = first.network, first.settings, first.part
        if first.function is network.module:
            network.train(len(first.x))
        self.gradients[rows, network.layout.head.stop :] = 0  # of the extra tensors, which no pass writes
        passes = self._pass(network, first.function, first.x)
        inside = [slice(b.start - part.start, b.stop - part.start) for b in network.layout.buffers_in(part)]
        vectors, gradients = self.vectors[rows, part], self.gradients[rows, part]
        scale = None if first.scale is None else torch.stack([call.scale for call in run if call.scale is not None])
        moments = {name: torch.stack([call.moments[name] for call in run]) for name in first.moments}
        own = [(call, call.network.vector[part], call.network.gradient[part]) for call in run]
        constant = [call.correction for call in run if isinstance(call.correction, Tensor)]
        corrections = torch.stack(constant) if len(constant) == len(run) else None
        corrected = [entry for entry in own if entry[0].correction is not None and corrections is None]
        followed = [entry for entry in own if entry[0].each_step is not None]
        # A step of plain SGD adds the gradients to the parameters as they are computed.
        plain = settings.kind == "sgd" and not (settings.momentum or settings.weight_decay or settings.clip)
        whole = first.function is not network.module or part == slice(0, network.layout.size)
        free = scale is None and corrections is None and not corrected
        in_place = plain and whole and free and isinstance(passes, StackedChain)
        factors, losses = [list(settings.factors(call.n_steps)) for call in run], [call.loss for call in run]
        active = len(run)
        now = moments
        for step, (sizes, xs, ys) in enumerate(_batches(run)):
            k = len(sizes)
            if k < active or step == 1:  # the first step has made the moments
                moments = now if step == 1 else moments
                active, now = k, {name: tensor[:k] for name, tensor in moments.items()}
            factor = self._factor([of_client[step] for of_client in factors[:k]])
            there = slice(rows.start, rows.start + k)
            if in_place:
                share = -settings.lr * factor
                passes.differentiate(there, xs, ys, sizes, share, losses[:k], beta=1.0, in_place=True)  # type: ignore[call-arg]
            else:
                passes.differentiate(there, xs, ys, sizes, 1.0, losses[:k])
                if corrections is not None:
                    gradients[:k].add_(corrections[:k])
                for call, vector, gradient in corrected:
                    if step < call.n_steps:
                        call.correct(vector, gradient)
                column = factor[:, None] if isinstance(factor, Tensor) else factor
                of_scale = None if scale is None else scale[:k]
                optimizer_step(vectors[:k], gradients[:k], now, settings, column, of_scale, inside)
            for call, vector, _ in followed:
                if step < call.n_steps:
                    call.follow(vector)
            for call, size in zip(run, sizes, strict=False):
                call.network.differentiated += size if call.function is call.network.module else 0
        for row, call in enumerate(run):
            for name, tensor in call.moments.items():
                tensor.copy_(moments[name][row])
        return [call.error or call.network.vector.clone() for call in run]

    def _factor(self, factors: list[float]) -> float | Tensor:
        """Return the factor of the learning rate: one for all, or one for each client."""
        if len(set(factors)) == 1:
            return factors[0]
        return _sent(np.array(factors), self.vectors.device, self.vectors.dtype)


def _batches(run: list[Descent]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Yield each step's batches of all clients that take it, (clients, batch, …), and how many samples of each count.

    Their order is drawn on the CPU and sent ahead.
    """
    (x, x_starts), (y, y_starts) = _pooled([call.x for call in run]), _pooled([call.y for call in run])
    drawn = [batches(len(call.x), call.settings, call.stream, CPU) for call in run]
    steps, n = [call.n_steps for call in run], [len(call.x) for call in run]
    more = int(run[0].settings.join_last)
    widest = max(min(count, (call.settings.batch or count) + more) for call, count in zip(run, n, strict=True))
    ahead = max(1, PLANNED // (len(run) * widest))
    for begin in range(0, steps[0], ahead):
        places = np.zeros((min(ahead, steps[0] - begin), len(run), widest), np.int64)
        sizes: list[list[int]] = [[] for _ in places]
        for client, indices in enumerate(drawn):
            for step in range(min(len(places), steps[client] - begin)):
                chosen = next(indices)
                count = n[client] if chosen is None else len(chosen)
                places[step, client, :count] = range(count) if chosen is None else chosen.numpy()
                sizes[step].append(count)
        of_steps = [_sent(places + starts[:, None], x.device).unbind() for starts in (x_starts, y_starts)]
        for of_step, of_x, of_y in zip(sizes, *of_steps, strict=True):
            k, width = len(of_step), max(of_step)
            if (k, width) != of_x.shape:
                of_x, of_y = of_x[:k, :width], of_y[:k, :width]
            xs, ys = _taken(x, of_x), _taken(y, of_y)
            for row, (call, size) in enumerate(zip(run, of_step, strict=False)):
                if call.augment is not None and xs.dim() == 5:
                    xs[row, :size] = call.augment(xs[row, :size])
            yield of_step, xs, ys


def _taken(x: Tensor, indices: Tensor) -> Tensor:
    """Select samples by (clients, batch) indices."""
    return select(x, indices.reshape(-1)).view(*indices.shape, *x.shape[1:])


def _pooled(pieces: Sequence[Tensor]) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """View the pieces as one tensor, and tell where each begins. Slices of one tensor are not copied."""
    first, offsets = pieces[0], [piece.storage_offset() for piece in pieces]
    begin, size = min(offsets), first.stride(0)
    if size and all(
        piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and piece.stride() == first.stride()
        and (offset - begin) % size == 0
        for piece, offset in zip(pieces, offsets, strict=True)
    ):
        starts = np.array([(offset - begin) // size for offset in offsets])
        length = int(max(start + len(piece) for start, piece in zip(starts, pieces, strict=True)))
        return first.as_strided((length, *first.shape[1:]), first.stride(), begin), starts
    return torch.cat(list(pieces)), np.cumsum([0, *map(len, pieces[:-1])])


def _filled_up(pieces: Sequence[Tensor]) -> Tensor:
    """Stack pieces; those with fewer samples than others are filled up with zeros."""
    longest = max(map(len, pieces))
    if all(len(piece) == longest for piece in pieces):
        return torch.stack(list(pieces))
    stacked = pieces[0].new_zeros(len(pieces), longest, *pieces[0].shape[1:])
    for row, piece in zip(stacked.unbind(), pieces, strict=True):
        row[: len(piece)] = piece
    return stacked


def _in_order(n: Sequence[int]) -> Iterator[tuple[list[int], np.ndarray[Any, Any]]]:
    """Yield passes over all samples of clients, most samples first: how many each client has in it, and which."""
    for start in range(0, n[0], EVALUATION_BATCH):
        sizes = [min(EVALUATION_BATCH, count - start) for count in n if count > start]
        places = np.zeros((len(sizes), max(sizes)), np.int64)
        for place, size in zip(places, sizes, strict=True):
            place[:size] = range(start, start + size)
        yield sizes, places


def _fetched(calls: Sequence[Any]) -> Iterator[list[Tensor]]:
    found = iter(fetched([tensor for call in calls for tensor in call.tensors]))
    return (list(islice(found, len(call.tensors))) for call in calls)


def _sent(numbers: np.ndarray[Any, Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Send numbers to the device without waiting for it."""
    tensor = torch.from_numpy(numbers)
    return sent(tensor if dtype is None else tensor.to(dtype), device)


def is_dense(network: Network, dimensions: int) -> bool:
    """Find out whether a network is a chain of dense layers, for inputs of so many dimensions."""
    layers = list(leaves(network.module))
    x = torch.empty((0,) * dimensions, device="meta")
    return not any(isinstance(layer, nn.Conv2d) for layer in layers) and is_chain(network.module, layers, x)


def why_not(network: Network, x: Inputs, y: Tensor, loss: Loss) -> str:
    """Say why clients with this network cannot train as one computation, by trying it on two samples; nothing if they
    can."""
    if network.autocast:
        return "it uses autocast"
    if not isinstance(x, Tensor):
        return "its samples are not one tensor in memory"
    if has_hooks(network.module):
        return "it has hooks"
    theta = network.vector.clone()
    try:
        stack = Stack(network, 2)
        batch = [Batch(own, loss, x, y) for own in stack.networks]
        single = [torch.cat([batch_gradient(theta, each), each.network.vector]) for each in batch]
        calls = [Gradient(own, theta, x, y, loss) for own in stack.networks]
        found = [torch.cat([each, own.vector]) for each, own in zip(stack.compute(calls), stack.networks, strict=True)]
    except Exception as error:  # PyTorch's, of any kind
        return f"PyTorch cannot vectorise it ({str(error).partition('. ')[0].strip()})"
    for one, other in zip(single, found, strict=True):
        if not (one - other).norm() <= CLOSE * one.norm():
            return "its gradients differ when clients are computed together"
    return ""
