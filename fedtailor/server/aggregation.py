"""Aggregation of a round's uploads as they arrive.

A mean is one running sum: a round needs memory for a few vectors, not for all participants'. Uploads are added in the
order of the clients' numbers, whatever the order of their arrival, so that the sum has the same bits on any engine.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedtailor.local.layout import Layout
from fedtailor.messages import Message
from fedtailor.method import Each, Mean, Total, Uploads


@dataclass
class _Sum:
    """Σ w_i x_i and Σ w_i so far."""

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

    def __post_init__(self) -> None:
        self._waiting: dict[int, Message | None] = {}
        self._turn = iter(self.participants)
        self._next = next(self._turn, None)
        self._all_samples = self.n_samples[self.participants].sum()
        self._means = {name: how for name, how in self.uploads.items() if isinstance(how, Mean)}
        self._sums: dict[str, _Sum] = {}
        self._single: dict[str, dict[int, Tensor]] = {n: {} for n, how in self.uploads.items() if isinstance(how, Each)}

    def put(self, client: int, upload: Message | None) -> None:
        """Take a client's upload, or None if it failed; it is added when all clients before it are there."""
        self._waiting[client] = upload
        while self._next in self._waiting:
            upload = self._waiting.pop(self._next)
            if upload is not None:
                self._add(self._next, upload)
            self._next = next(self._turn, None)

    def _add(self, client: int, upload: Message) -> None:
        self.clients.append(client)
        for name, tensors in self._single.items():
            tensors[client] = upload[name]
        for name, how in self._means.items():
            x = upload[name] if upload[name].is_floating_point() else upload[name].double()
            weight = self._weight(client, how, upload).to(x)
            try:
                shape = self._shape(weight, x)
                if name not in self._sums:
                    self._sums[name] = _Sum(x.new_zeros(shape), torch.zeros_like(weight))
                running = self._sums[name]
                if (known := tuple(running.value.shape)) != shape:
                    raise ValueError(f"its shape is {shape} at client {client} and {known} at others")
                running.weight += weight
            except (ValueError, RuntimeError) as error:  # the latter from weights of different shapes
                raise ValueError(f"the upload {name!r} cannot be averaged: {error}") from error
            self._add_weighted(running.value, weight / self._scale(how).to(x), x)

    def _shape(self, weight: Tensor, x: Tensor) -> tuple[int, ...]:
        """The shape of w · x. (PyTorch's own function for it imports 30 MB of symbolic mathematics.)"""
        if weight.dim() and weight.shape[-1] not in (1, len(self.layout.layers)):
            layers = len(self.layout.layers)
            raise ValueError(f"its weights end in {weight.shape[-1]} numbers, neither 1 nor {layers}, a number a layer")
        return (*np.broadcast_shapes(weight.shape[:-1], x.shape[:-1]), *x.shape[-1:])

    def _weight(self, client: int, how: Mean, upload: Message) -> Tensor:
        """A client's weight w_i."""
        by = {"samples": self.n_samples[client], "equal": torch.ones_like(self._all_samples)}
        return by[how.weights] if how.weights in by else upload[how.weights]

    def _scale(self, how: Mean) -> Tensor:
        """The divisor of the weights: their sum over all participants, as far as it is known
        before all have replied. For weights that clients upload it is the participants' samples; so where they are the
        numbers of samples, the mean has the bits of a mean by samples."""
        everybody = torch.ones_like(self._all_samples) * len(self.participants)
        return everybody if how.weights == "equal" else self._all_samples

    def _add_weighted(self, value: Tensor, weight: Tensor, x: Tensor) -> None:
        """Add w · x to a sum in place, a row and a layer at a time where w has numbers of its own for them."""
        if not weight.dim():
            value.add_(x, alpha=float(weight))
            return
        width = x.shape[-1]
        rows, added = value.view(-1, width), x.expand_as(value).reshape(-1, width)
        places = [slice(None)] if weight.shape[-1] == 1 else list(self.layout.layers.values())
        shares = weight.expand(*value.shape[:-1], len(places)).reshape(-1, len(places)).tolist()
        for row, addition, of_row in zip(rows, added, shares, strict=True):
            for place, share in zip(places, of_row, strict=True):
                if share:
                    row[place].add_(addition[place], alpha=share)

    def total(self) -> Total:
        """Close the round: divide the sums by their weights."""
        means, weights = {}, {}
        for name, running in self._sums.items():
            how = self._means[name]
            weight = running.weight / self._scale(how).to(running.weight)  # 1 if all have replied
            weight = self.layout.spread(weight) if weight.dim() else weight
            means[name] = torch.where(weight > 0, running.value / weight, torch.zeros_like(running.value))
            if how.weights not in ("samples", "equal"):
                weights[name] = running.weight
        return Total(self.clients, self.n_samples[self.clients], means, weights, self._single)
