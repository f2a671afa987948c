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
from contextlib import suppress
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
    Objective,
    batch_gradient,
    head_on_features,
    step_count,
)
from fedtailor.training.inputs import Inputs
from fedtailor.training.joined import Joined, NotAlike
from fedtailor.training.network import Loss, Network
from fedtailor.training.optimizer import OptimizerSettings, optimizer_step
from fedtailor.training.stacked_batches import (
    Numbers,
    Step,
    batches_of,
    filled_up,
    in_order,
    on_device,
    pooled,
    taken,
    weights_of,
)
from fedtailor.training.stacked_chain import StackedChain
from fedtailor.training.stacked_module import StackedModule, StackedObjective

OBJECTIVE = 2  # of a client's functions
# So many clients have their own objectives differentiated together on the CPU: for fewer, autograd's copies of the
# gradients take longer than what is saved.
MANY = 16
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
    objective: Objective | None
    augment: Callable[[Tensor], Tensor] | None
    error: Exception | None = field(default=None, init=False)  # of the client's own functions

    @property
    def key(self) -> tuple[Any, ...]:
        part, whole = (self.part.start, self.part.stop), self.function is self.network.module
        common = *super().key, whole, part, self.settings, self.scale is None, tuple(self.moments)
        return common if self.objective is None else (*common, getattr(self.objective, "__code__", None), self.loss)

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
        objective: Objective | None,
        augment: Callable[[Tensor], Tensor] | None,
    ) -> Tensor | None:
        """Descend together with others; None if it cannot be, and the caller has to do it."""
        if not self._fits(network, x):
            return None
        function, layout = network.module, network.layout
        if objective is None and part == layout.head != slice(0, layout.size):
            network.vector.copy_(theta)
            function, x = head_on_features(network, x)
        if function is not network.module:
            augment = None
        assert isinstance(x, Tensor)
        found: Tensor | None = self._answer(
            Descent(
                network, theta, x, y, loss, function, settings, stream, correction, scale, part, moments, each_step,
                objective, augment,
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
        xs, ys = (filled_up(tensors) for tensors in ([call.x for call in run], [call.y for call in run]))
        step = Step(sizes, xs, ys, self._sent(weights_of(np.array(sizes))))
        passes = self._pass(network, network.module, run[0].x)
        passes.differentiate(rows, step, [call.loss for call in run])
        return [call.network.gradient.clone() for call in run]

    def _mean_gradients(self, run: list[MeanGradient]) -> list[Answer]:
        network, rows = run[0].network, self._rows_of(run)
        network.module.eval()
        self.gradients[rows].zero_()
        passes, n = self._pass(network, network.module, run[0].x), [len(call.x) for call in run]
        (x, x_starts), (y, y_starts) = pooled([call.x for call in run]), pooled([call.y for call in run])
        totals = self.vectors.new_zeros(len(run))
        for sizes, places in in_order(n):
            k = len(sizes)
            indices = on_device(np.stack([places + x_starts[:k, None], places + y_starts[:k, None]]), x.device)
            xs, ys = (taken(of, chosen) for of, chosen in zip((x, y), indices, strict=True))
            step = Step(sizes, xs, ys, self._sent(weights_of(np.array(sizes), np.array(sizes) / n[:k])))
            there, losses = slice(rows.start, rows.start + k), [call.loss for call in run[:k]]
            found = passes.differentiate(there, step, losses, beta=1.0, valued=True)
            assert found is not None
            totals[:k] += found
        for call in run:
            call.network.differentiated += len(call.x)
        return [(total, call.network.gradient.clone()) for total, call in zip(totals.unbind(), run, strict=True)]

    def _outputs(self, run: list[Outputs]) -> list[Answer]:
        network, rows = run[0].network, self._rows_of(run)
        network.module.eval()
        passes = self._pass(network, network.module, run[0].x)
        x, starts = pooled([call.x for call in run])
        found: list[list[Tensor]] = [[] for _ in run]
        for sizes, places in in_order([len(call.x) for call in run]):
            k = len(sizes)
            xs = taken(x, on_device(places + starts[:k, None], x.device))
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
        inside = [slice(b.start - part.start, b.stop - part.start) for b in network.layout.buffers_in(part)]
        vectors, gradients = self.vectors[rows, part], self.gradients[rows, part]
        whole = first.function is not network.module or part == slice(0, network.layout.size)
        scales = None if first.scale is None else torch.stack([c.scale for c in run if c.scale is not None])
        moments = {name: torch.stack([call.moments[name] for call in run]) for name in first.moments}
        functions = Functions(run, vectors, [self.vectors, self.gradients])
        passes = (
            self._pass(network, first.function, first.x)
            if first.objective is None
            else functions.objective(run, rows, self.vectors, self.gradients)
        )
        if passes is None:
            return [None] * len(run)
        # A step of plain SGD adds the gradients to the parameters as they are computed.
        plain = settings.kind == "sgd" and not (settings.momentum or settings.weight_decay or settings.clip)
        chain = passes if isinstance(passes, StackedChain) else None
        direct = chain if plain and whole and scales is None and not functions.one_by_one else None
        factors, losses = factors_of(run), [call.loss for call in run]
        now, active, seen = moments, 0, np.zeros(len(run), np.int64)
        shares = None if direct is None else -settings.lr * factors
        for number, step in enumerate(batches_of(run, shares, flat=chain is not None and chain.flattens)):
            k = len(step.sizes)
            if k != active or number == 1:  # the first step has made the moments
                moments = now if number == 1 else moments
                active, now = k, {name: tensor[:k] for name, tensor in moments.items()}
                there, at, slopes = slice(rows.start, rows.start + k), vectors[:k], gradients[:k]
                scale = None if scales is None else scales[:k]
            factor = self._one_or_each(factors[number, :k])
            if direct is not None:
                added = functions.added(at)
                direct.differentiate(there, step, losses[:k], beta=1.0, in_place=True)
                if added is not None:
                    optimizer_step(at, added, {}, settings, factor)
            else:
                passes.differentiate(there, step, losses[:k])
                functions.correct(number, at, slopes)
                optimizer_step(at, slopes, now, settings, factor, scale, inside)
            functions.follow(number, at)
            seen[:k] += step.sizes
        functions.end()
        for row, call in enumerate(run):
            call.network.differentiated += int(seen[row]) if call.function is call.network.module else 0
            for name, tensor in call.moments.items():
                tensor.copy_(moments[name][row])
        return [call.error or call.network.vector.clone() for call in run]

    def _one_or_each(self, numbers: Numbers) -> float | Tensor:
        """Return the number of all, or a column with each client's."""
        return float(numbers[0]) if (numbers == numbers[0]).all() else self._sent(numbers)[:, None]

    def _sent(self, numbers: Numbers) -> Tensor:
        return on_device(numbers, self.vectors.device, self.vectors.dtype)


class Functions:
    """The corrections and `each_step` of several descents: called once for all clients if they can be joined, and else
    for each by itself, whose failure is its own."""

    def __init__(self, run: Sequence[Descent], vectors: Tensor, memory: Sequence[Tensor]) -> None:
        own = [(call, call.network.vector[call.part], call.network.gradient[call.part]) for call in run]
        self.corrected = [entry for entry in own if entry[0].correction is not None]
        self.followed = [entry for entry in own if entry[0].each_step is not None]
        self.joined: Joined | None = None
        asked = [(call.correction, call.each_step, call.objective) for call in run]
        if any(function is not None for function in asked[0]):  # found out anew: groups do not depend on earlier ones
            with suppress(NotAlike):
                self.joined = Joined.that_works(asked, vectors, memory)
        self.one_by_one = bool(self.corrected) and self.joined is None  # corrections, written into gradients

    def objective(
        self, run: Sequence[Descent], rows: slice, vectors: Tensor, gradients: Tensor
    ) -> StackedObjective | None:
        """Make the passes of the clients' objectives; None if these cannot be joined."""
        if self.joined is None or (vectors.device.type == "cpu" and len(run) < MANY):
            return None
        passes = StackedObjective(run[0].network, vectors, gradients, self.joined, OBJECTIVE)
        n = min(2, *(len(call.x) for call in run))
        x, y = (torch.stack(list(tensors)) for tensors in zip(*((call.x[:n], call.y[:n]) for call in run), strict=True))
        indices = torch.arange(n, device=x.device).expand(len(run), n)
        trial = Step([n] * len(run), x, y, vectors.new_ones(len(run), n, 1), indices)
        if not passes.works(rows, trial, [call.loss for call in run]):
            return None
        return passes

    def added(self, vectors: Tensor) -> Tensor | None:
        """Compute what joined corrections add to the gradients."""
        return None if self.joined is None or not self.corrected else self.joined.call(0, vectors)

    def correct(self, step: int, vectors: Tensor, gradients: Tensor) -> None:
        """Add corrections to the gradients."""
        if not self.one_by_one:
            added = self.added(vectors)
            if added is not None:
                gradients.add_(added)
            return
        for call, vector, gradient in self.corrected:
            if step < call.n_steps:
                call.correct(vector, gradient)

    def follow(self, step: int, vectors: Tensor) -> None:
        """Call `each_step`."""
        if self.joined is not None:
            if self.followed:
                self.joined.call(1, vectors)
            return
        for call, vector, _ in self.followed:
            if step < call.n_steps:
                call.follow(vector)

    def end(self) -> None:
        """Write what joined functions have written into their clients' tensors."""
        if self.joined is not None:
            self.joined.give_back()


def factors_of(run: Sequence[Descent]) -> Numbers:
    """Compute the factor of the learning rate in each step (rows) for each client; 0 after its last one."""
    factors = np.zeros((run[0].n_steps, len(run)))
    for client, call in enumerate(run):
        factors[: call.n_steps, client] = [*call.settings.factors(call.n_steps)]
    return factors


def _fetched(calls: Sequence[Any]) -> Iterator[list[Tensor]]:
    found = iter(fetched([tensor for call in calls for tensor in call.tensors]))
    return (list(islice(found, len(call.tensors))) for call in calls)


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
