"""Aggregation of a round's uploads as they arrive, as the experiment asks for it: here the mean, beside it the robust
rules and the private mean.

A mean is one running sum: a round needs memory for a few vectors, not for all participants'. Uploads are added in the
order of the clients' numbers, whatever the order of their arrival, so that the sum has the same bits on any engine.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedtailor.experiment.aggregation_rule import Rule
from fedtailor.experiment.fairness import Fairness
from fedtailor.experiment.privacy import Privacy
from fedtailor.messages import Message, Reply, Request
from fedtailor.method import Each, Mean, Method, Server, Total, Uploads
from fedtailor.privacy.noise import Noise
from fedtailor.training.layout import Layout
from fedtailor.training.streams import torch_stream

if TYPE_CHECKING:
    from fedtailor.server.aggregation.fairness import FairFactors


@dataclass
class _Sum:
    """Σ w_i x_i so far and, where the clients upload their weights, Σ w_i."""

    value: Tensor
    weight: Tensor


@dataclass
class Aggregator:
    """Adds up one round's uploads. `n_samples` are the training samples of all clients."""

    uploads: Uploads
    participants: list[int]
    n_samples: Tensor
    layout: Layout
    clients: list[int] = field(default_factory=list)  # that replied, in the order of their numbers
    together: int = 1  # uploads that wait for each other before the first of them is added
    needs: int = 0  # so many clients have to reply, or the round counts for nobody
    always: bool = False  # the method receives a total even if nobody replied
    fair: "FairFactors | None" = None  # of the clients' weights

    def __post_init__(self) -> None:
        self._waiting: dict[int, Message | None] = {}
        self._held: list[tuple[int, Message]] = []
        self._begun = False
        self._turn = iter(self.participants)
        self._next = next(self._turn, None)
        self._all_samples = self.n_samples[self.participants].sum()
        self._means = {name: how for name, how in self.uploads.items() if isinstance(how, Mean)}
        self._sums: dict[str, _Sum] = {}
        self._known: dict[tuple[Mean, torch.dtype], dict[int, float]] = {}
        self._single: dict[str, dict[int, Tensor]] = {n: {} for n, how in self.uploads.items() if isinstance(how, Each)}

    def put(self, client: int, upload: Message | None) -> dict[int, str]:
        """Take a client's upload, or None if it failed; it is added when all clients before it are there.

        Return the clients that were left out now, and why: their uploads do not fit the others'.
        """
        refused: dict[int, str] = {}
        self._waiting[client] = upload
        while self._next in self._waiting:
            if (next_upload := self._waiting.pop(self._next)) is not None:
                self._held.append((self._next, next_upload))
            self._next = next(self._turn, None)
            self._begun |= self._next is None or len(self._held) >= self.together
            for held, its in self._held if self._begun else ():
                try:
                    self._add(held, its)
                except ValueError as error:
                    refused[held] = str(error)
            if self._begun:
                self._held = []
        return refused

    def _add(self, client: int, upload: Message) -> None:
        """Add an upload as a whole, or refuse it as a whole."""
        xs = self._numbers(upload)
        own = {name: how.weights for name, how in self._means.items() if how.weights not in ("samples", "equal")}
        weights = {name: upload[weight].to(xs[name]) for name, weight in own.items()}
        sums = {name: self._sum(name, x, weights.get(name)) for name, x in xs.items()}
        self._sums |= sums
        self.clients.append(client)
        factor, earlier = (1.0, 1.0) if self.fair is None else self.fair.add(client, upload)
        if earlier != 1:
            for running in sums.values():
                running.value *= earlier
                running.weight *= earlier
        for name, tensors in self._single.items():
            if name in upload:
                tensors[client] = upload[name]
        for name, x in xs.items():
            if name in weights:
                self._add_weighted(sums[name], x, weights[name] * factor)
            else:
                sums[name].value.add_(x, alpha=self._shares(self._means[name], x.dtype)[client] * factor)

    def _numbers(self, upload: Message) -> Message:
        """Return the tensors of which there is a mean, as floating-point numbers."""
        return {name: x if (x := upload[name]).is_floating_point() else x.double() for name in self._means}

    def _sum(self, name: str, x: Tensor, weight: Tensor | None) -> _Sum:
        """The running sum of an upload; refuse one of another shape or type than the others'."""
        try:
            shape = tuple(x.shape) if weight is None else self._shape(weight, x)
        except ValueError as error:
            raise ValueError(f"its upload {name!r} cannot be averaged: {error}") from None
        running = self._sums.get(name)
        if running is None:
            return _Sum(x.new_zeros(shape), x.new_zeros(()) if weight is None else torch.zeros_like(weight))
        sizes = [(tuple(running.value.shape), shape)]
        sizes += [] if weight is None else [(tuple(running.weight.shape), tuple(weight.shape))]
        for known, given in sizes:
            if known != given:
                raise ValueError(f"its upload {name!r} has the shape {given}, and others' {known}")
        if running.value.dtype != x.dtype:
            raise ValueError(f"its upload {name!r} is of type {x.dtype}, and others' of {running.value.dtype}")
        return running

    def _shares(self, how: Mean, dtype: torch.dtype) -> dict[int, float]:
        """Every participant's share of all participants' samples, or an equal one."""
        if (how, dtype) not in self._known:
            n = self.n_samples[self.participants]
            weights = torch.ones_like(n) if how.weights == "equal" else n
            shares = (weights.to(dtype) / weights.sum().to(dtype)).tolist()
            self._known[how, dtype] = dict(zip(self.participants, shares, strict=True))
        return self._known[how, dtype]

    def _shape(self, weight: Tensor, x: Tensor) -> tuple[int, ...]:
        """The shape of w · x. (PyTorch's own function for it imports 30 MB of symbolic mathematics.)"""
        if weight.dim() and weight.shape[-1] not in (1, len(self.layout.layers)):
            layers = len(self.layout.layers)
            raise ValueError(f"its weights end in {weight.shape[-1]} numbers, neither 1 nor {layers}, a number a layer")
        return (*np.broadcast_shapes(weight.shape[:-1], x.shape[:-1]), *x.shape[-1:])

    def _add_weighted(self, running: _Sum, x: Tensor, weight: Tensor) -> None:
        """Add w · x with weights that the client uploaded, a row and a layer at a time where w has numbers of its own
        for them. Weights count as shares of the participants' samples: where they are the numbers of samples, the mean
        has the bits of a mean by samples."""
        running.weight += weight
        value, share = running.value, weight / self._all_samples.to(x)
        if not share.dim():
            value.add_(x, alpha=float(share))
            return
        width = x.shape[-1]
        rows, added = value.view(-1, width), x.expand_as(value).reshape(-1, width)
        places = [slice(None)] if share.shape[-1] == 1 else list(self.layout.layers.values())
        shares = share.expand(*value.shape[:-1], len(places)).reshape(-1, len(places)).tolist()
        for row, addition, of_row in zip(rows, added, shares, strict=True):
            for place, part in zip(places, of_row, strict=True):
                if part:
                    row[place].add_(addition[place], alpha=part)

    def close(self, ask: Callable[[Sequence[Request]], Iterable[Reply]], replies: Mapping[int, Reply]) -> None:
        """Do what is left when all have answered: `ask` goes on with the clients, whose replies get what goes wrong."""
        if self.fair is not None:
            self.fair.close()

    @property
    def lacking(self) -> str:
        """Say why the round counts for nobody; nothing if it counts."""
        return "" if self.fair is None else self.fair.lacking

    def total(self) -> Total:
        """Close the round: divide the sums by their weights."""
        means, weights = {}, {}
        for name, running in self._sums.items():
            how = self._means[name]
            if self.fair is not None:
                factor = self.fair.mean(self._shares(how, torch.float64))
                running = _Sum(running.value / factor, running.weight / factor)
            if how.weights in ("samples", "equal"):
                means[name] = running.value
                if len(self.clients) < len(self.participants):  # the shares were those of all participants
                    shares = self._shares(how, torch.float64)
                    means[name] = running.value / sum(shares[client] for client in self.clients)
            else:
                weights[name] = running.weight
                share = running.weight / self._all_samples.to(running.weight)
                share = self.layout.spread(share) if share.dim() else share
                means[name] = torch.where(share > 0, running.value / share, torch.zeros_like(running.value))
        return Total(self.clients, self.n_samples[self.clients], means, weights, self._single)


def make_aggregator(
    rule: Rule,
    method: Method,
    server: Server,
    messages: Mapping[int, Message],
    privacy: Privacy | None = None,
    seed: int | None = None,
    secure: bool = False,
    fairness: Fairness = Fairness(),  # noqa: B008
) -> Aggregator:
    """Make the aggregator of a round whose participants were sent these messages. The noise of privacy comes from a
    stream of the seed in a simulation; without one, from the operating system."""
    from fedtailor.server.aggregation.fairness import FairFactors
    from fedtailor.server.aggregation.private import PrivateAggregator  # which both build on the mean
    from fedtailor.server.aggregation.robust import GuardedAggregator, NormBoundAggregator, RobustAggregator
    from fedtailor.server.aggregation.secure import SecureAggregator

    if secure:
        return SecureAggregator(method, server, messages, privacy)

    if privacy is not None and privacy.level == "client":
        noise = Noise(None if seed is None else torch_stream(seed, "privacy", server.round))
        return PrivateAggregator(method, server, messages, privacy, noise)
    round = (method.uploads, list(messages), server.n_samples, server.layout)
    if rule.kind == "mean":
        fair = FairFactors(fairness, server) if fairness else None
        if rule.amount == math.inf or len(messages) < 3:  # with two, nobody can tell which of them is absurd
            return Aggregator(*round, fair=fair)
        start = server.initial
        return GuardedAggregator(*round, times=rule.amount, method=method, messages=messages, initial=start, fair=fair)
    if rule.kind == "norm-bound":
        return NormBoundAggregator(*round, bound=rule.amount, method=method, messages=messages)
    return RobustAggregator(*round, rule=rule)
