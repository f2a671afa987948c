"""A federation's data: a data set partitioned among clients, and each client's samples split into parts.

All clients' samples are in one tensor, client by client, and within a client train, validation, test. So a client's
data is a slice without copies, and can be shared between processes.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.dataset import TEST, TRAIN, VALIDATION, Dataset
from fedtailor.data.partitions import NATURAL, WITHIN, Ints, draw, parse
from fedtailor.errors import FedtailorError, unknown
from fedtailor.local.streams import numpy_stream

SPLITS = {"train": (0, 1), "validation": (1, 2), "test": (2, 3), "all": (0, 3)}  # columns of `bounds`
MOST_COUNTS = 20_000_000  # clients × classes


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's inputs and targets, in the order train, validation, test."""

    name: str
    x: Tensor
    y: Tensor
    ends: tuple[int, int]  # of the training and of the validation samples
    n_classes: int | None = None  # where labels are the client's own

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        return self.x[: self.ends[0]], self.y[: self.ends[0]]

    @property
    def validation(self) -> tuple[Tensor, Tensor]:
        first, last = self.ends
        return self.x[first:last], self.y[first:last]

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        return self.x[self.ends[1] :], self.y[self.ends[1] :]

    @property
    def held_out(self) -> Tensor:
        """The inputs of the validation and test samples."""
        return self.x[self.ends[0] :]


@dataclass(frozen=True, eq=False)
class FederatedData:
    """The data of all clients; made by `federate`."""

    name: str
    x: Tensor
    y: Tensor
    bounds: Tensor  # int64 (clients, 4): start, end of train, end of validation, end of test
    classes: tuple[str, ...]  # () for regression
    names: tuple[str, ...]  # of the clients
    new: frozenset[int] = frozenset()  # clients held out from training
    own_classes: tuple[int, ...] = ()  # number of classes of each client, where labels are each client's own
    own_names: tuple[tuple[str, ...], ...] = ()  # and their names

    @property
    def n_clients(self) -> int:
        return len(self.names)

    @property
    def n_outputs(self) -> int:
        """The number of outputs of a network for these data: one a class, or one a target."""
        return len(self.classes) or (self.y.shape[1] if self.y.dim() > 1 else 1)

    @cached_property
    def places(self) -> list[list[int]]:
        """`bounds` as plain numbers: looking one up in a tensor takes longer than cutting out a client's samples."""
        return self.bounds.tolist()

    @property
    def n_samples(self) -> Tensor:
        """The number of training samples of each client."""
        return self.bounds[:, 1] - self.bounds[:, 0]

    def train(self, client: int) -> tuple[Tensor, Tensor]:
        return self._slice(client, "train")

    def validation(self, client: int) -> tuple[Tensor, Tensor]:
        return self._slice(client, "validation")

    def test(self, client: int) -> tuple[Tensor, Tensor]:
        return self._slice(client, "test")

    def classes_of(self, client: int) -> tuple[str, ...]:
        """Return the names of a client's classes in the order of the outputs.

        Where labels are its own, the outputs after these stand for nothing, and are named by their number.
        """
        if not self.own_names:
            return self.classes
        own = self.own_names[client]
        return (*own, *(f"output {number}" for number in range(len(own), len(self.classes))))

    def client(self, number: int) -> ClientData:
        """Cut out one client's data; nothing is copied."""
        start, trained, validated, end = self.places[number]
        own_classes = self.own_classes[number] if self.own_classes else None
        ends = (trained - start, validated - start)
        return ClientData(self.names[number], self.x[start:end], self.y[start:end], ends, own_classes)

    def to(self, device: torch.device | str) -> "FederatedData":
        """Move all samples to a device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def fingerprint(self) -> str:
        """Compute a checksum of all samples and of their partition."""
        x = self.x.permute(0, 2, 3, 1) if self.x.ndim == 4 else self.x
        checksum = 0
        for tensor in (self.bounds, self.y, x):
            checksum = crc32(tensor.cpu().contiguous().numpy().data, checksum)
        return f"{checksum:08x}"

    def _slice(self, client: int, split: str) -> tuple[Tensor, Tensor]:
        first, last = SPLITS[split]
        start, end = self.places[client][first], self.places[client][last]
        return self.x[start:end], self.y[start:end]

    def counts(self, split: str | None = None) -> Tensor:
        """Count the samples, clients × classes (one column for regression), in one split or in all."""
        split = split or "all"
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        first, last = SPLITS[split]
        table = torch.zeros(self.n_clients, max(len(self.classes), 1), dtype=torch.int64)
        for row, place in zip(table, self.places, strict=True):
            labels = self.y[place[first] : place[last]]
            row += torch.bincount(labels, minlength=len(row)) if self.classes else len(labels)
        return table


def federate(
    dataset: Dataset,
    *,
    partition: str = "dirichlet:0.3",
    clients: int | None = None,
    seed: int = 0,
    test: float = 0.2,
    validation: float = 0.1,
    split: Literal["merge", "official"] = "merge",
    min_samples: int = 10,
    max_train: int | None = None,
    new_clients: int = 0,
    pixels: Literal["unit", "signed"] = "unit",
    labels: Literal["shared", "own"] = "shared",
    dtype: torch.dtype = torch.float32,
) -> FederatedData:
    """Partition a data set among clients (20, or the natural ones, unless said) and split each client's samples.

    `labels="own"` numbers each client's classes 0, 1, … anew: client 3's class 0 is then another than client 4's.

    `split="merge"` ignores the authors' split; `test` and `validation` are fractions of a client's samples.
    `split="official"` keeps it, and takes `validation` off the training part where the authors have none.
    """
    _check_options(test, validation, split, min_samples, max_train, pixels, seed)
    units, first = _units(dataset)
    official = split == "official"
    parts = _official_parts(dataset, first, validation, seed) if official else np.zeros_like(first)
    _check_table(dataset, partition, clients, labels)
    client, names = _clients(dataset, first, parts, partition, clients, min_samples, seed)
    if not 0 <= new_clients < len(names):
        raise FedtailorError(
            f"{new_clients} of {len(names)} clients cannot be new: hold out from 0 to {len(names) - 1}."
        )
    client, names = _new_last(client, names, new_clients, seed, renumbered=partition != NATURAL)
    side = parts if official else _random_sides(client, len(names), test, validation, seed)
    client, side = client[units], side[units]
    if max_train is not None:
        client = _thin(client, side, len(names), max_train, seed)
    bounds, order = _layout(client, side, names, dataset.name)
    federated = FederatedData(
        name=dataset.name,
        x=as_inputs(dataset.x[order], pixels, dtype),
        y=dataset.y[order] if dataset.classes else dataset.y[order].to(dtype),
        bounds=bounds,
        classes=dataset.classes,
        names=names,
        new=frozenset(range(len(names) - new_clients, len(names))),
    )
    return _own_labels(federated) if labels == "own" else federated


def _new_last(
    client: Ints, names: tuple[str, ...], new_clients: int, seed: int, renumbered: bool
) -> tuple[Ints, tuple[str, ...]]:
    """Choose the new clients at random and put them behind the others, so that the training clients are 0, 1, …"""
    new = set(numpy_stream(seed, "partition", "new").permutation(len(names))[:new_clients].tolist())
    order = [c for c in range(len(names)) if c not in new] + sorted(new)
    position = np.full(len(names) + 1, -1, dtype=np.int64)  # the last entry serves -1: no client
    position[order] = np.arange(len(names))
    return position[client], names if renumbered else tuple(names[c] for c in order)


def _own_labels(data: FederatedData) -> FederatedData:
    """Number each client's classes from 0, in their order."""
    if not data.classes:
        raise FedtailorError("Labels of the clients' own need classes: these targets are numbers.")
    y, own = data.y.clone(), []
    for start, _, _, end in data.bounds.tolist():
        present, y[start:end] = torch.unique(data.y[start:end], return_inverse=True)
        own.append(tuple(data.classes[number] for number in present.tolist()))
    counts = tuple(map(len, own))
    return replace(data, y=y, classes=tuple(map(str, range(max(counts)))), own_classes=counts, own_names=tuple(own))


def _check_options(
    test: float,
    validation: float,
    split: str,
    min_samples: int,
    max_train: int | None,
    pixels: str,
    seed: int,
) -> None:
    if split not in ("merge", "official"):
        raise unknown("split", split, ("merge", "official"))
    if pixels not in ("unit", "signed"):
        raise unknown("pixel range", pixels, ("unit", "signed"))
    if not (test >= 0 and validation >= 0 and test + validation < 1):
        raise FedtailorError(
            f"A test fraction of {test} and a validation fraction of {validation} leave nothing to train on: "
            "give fractions from 0 that sum to less than 1."
        )
    if min_samples < 0 or seed < 0:
        raise FedtailorError(f"min_samples ({min_samples}) and seed ({seed}) must not be negative: give 0 or more.")
    if max_train is not None and max_train < 1:
        raise FedtailorError(f"max_train is {max_train}, but each client needs a training sample: give 1 or more.")


def _check_table(dataset: Dataset, partition: str, clients: int | None, labels: str) -> None:
    """Refuse so many clients and classes that a table of their samples does not fit in memory."""
    n_clients = len(dataset.client_names) if partition == NATURAL else clients or 20
    n_classes = 1 if partition == NATURAL and labels == "own" else len(dataset.classes)
    if n_clients * n_classes > MOST_COUNTS:
        raise FedtailorError(
            f"The data set {dataset.name!r} has {n_classes} classes for {n_clients} clients, more than can be counted: "
            "check which columns hold the labels and the clients."
        )


def _units(dataset: Dataset) -> tuple[Ints, Ints]:
    """Find the units of a partition, groups or single samples: each sample's unit, each unit's first sample."""
    if dataset.group is None:
        each = np.arange(len(dataset))
        return each, each
    _, first, units = np.unique(dataset.group.numpy(), return_index=True, return_inverse=True)
    return units, first


def _official_parts(dataset: Dataset, first: Ints, validation: float, seed: int) -> Ints:
    if dataset.part is None:
        raise FedtailorError(f"The data set {dataset.name!r} has no official split: leave out --split official.")
    parts: Ints = dataset.part.numpy()[first].astype(np.int64)
    train = np.flatnonzero(parts == TRAIN)
    if validation > 0 and not (parts == VALIDATION).any():
        taken = round(validation * len(train))
        parts[numpy_stream(seed, "partition", "validation").permutation(train)[:taken]] = VALIDATION
    return parts


def _clients(
    dataset: Dataset,
    first: Ints,
    parts: Ints,
    partition: str,
    clients: int | None,
    min_samples: int,
    seed: int,
) -> tuple[Ints, tuple[str, ...]]:
    """Assign each unit to a client; return the clients, and their names."""
    if partition == NATURAL:
        if dataset.client is None:
            raise FedtailorError(f"The data set {dataset.name!r} names no clients: choose another partition.")
        known = len(dataset.client_names)
        if clients not in (None, known):
            raise FedtailorError(
                f"The data set {dataset.name!r} has {known} natural clients, not {clients}: leave --clients out, or "
                "choose another --partition."
            )
        return dataset.client.numpy()[first], dataset.client_names
    clients = 20 if clients is None else clients
    parse(partition.removeprefix(WITHIN))
    if clients < 1:
        raise FedtailorError(f"{clients} clients were asked for: a federation needs at least 1.")
    if max(min_samples, 1) * clients > len(first):
        raise FedtailorError(
            f"The data set {dataset.name!r} has {len(first)} samples, too few for {clients} clients "
            f"with at least {max(min_samples, 1)} each: ask for fewer clients or a smaller --min-samples."
        )
    labels = dataset.y.numpy()[first]
    if partition.startswith(WITHIN):
        return _within(dataset, first, labels, parts, partition, clients, min_samples, seed)
    drawn = draw(labels, len(dataset.classes), parts, partition, clients, min_samples, seed)
    return drawn, tuple(map(str, range(clients)))


def _within(
    dataset: Dataset,
    first: Ints,
    labels: Ints,
    parts: Ints,
    partition: str,
    clients: int,
    min_samples: int,
    seed: int,
) -> tuple[Ints, tuple[str, ...]]:
    """Partition the samples of each natural client (a domain, say) among equally many clients."""
    if dataset.client is None:
        raise FedtailorError(f"The data set {dataset.name!r} names no clients: leave {WITHIN!r} out of the partition.")
    domains = dataset.client_names
    if clients % len(domains):
        raise FedtailorError(
            f"The partition {partition!r} needs a multiple of the {len(domains)} clients that the data set "
            f"{dataset.name!r} names, not {clients}."
        )
    each = clients // len(domains)
    client = np.full(len(first), -1, dtype=np.int64)
    of_domain = dataset.client.numpy()[first]
    for domain in range(len(domains)):
        mine = np.flatnonzero(of_domain == domain)
        spec = partition.removeprefix(WITHIN)
        drawn = draw(labels[mine], len(dataset.classes), parts[mine], spec, each, min_samples, seed, domain)
        client[mine] = np.where(drawn < 0, -1, drawn + domain * each)
    return client, tuple(f"{name}-{number}" for name in domains for number in range(each))


def _random_sides(client: Ints, clients: int, test: float, validation: float, seed: int) -> Ints:
    """Split each client's units at random into train, validation and test.

    Train gets one first; then test and validation, where asked for, get at least one while there are any.
    """
    side = np.full(len(client), TRAIN, dtype=np.int64)
    for c, units in enumerate(_of_each(client, clients)):
        mine = numpy_stream(seed, "partition", "split", c).permutation(units)
        n_test = min(max(round(test * len(mine)), 1), len(mine) - 1) if test else 0
        n_validation = min(max(round(validation * len(mine)), 1), len(mine) - 1 - n_test) if validation else 0
        side[mine[:n_test]] = TEST
        side[mine[n_test : n_test + n_validation]] = VALIDATION
    return side


def _thin(client: Ints, side: Ints, clients: int, max_train: int, seed: int) -> Ints:
    """Drop training samples at random until each client has at most `max_train`, and as large a share of its validation
    samples: a method that uses these has no more data than the others."""
    thinned = client.copy()
    for c, samples in enumerate(_of_each(np.where(side != TEST, client, -1), clients)):
        train, validation = samples[side[samples] == TRAIN], samples[side[samples] == VALIDATION]
        thinned[numpy_stream(seed, "partition", "max_train", c).permutation(train)[max_train:]] = -1
        kept = max(1, round(len(validation) * min(1.0, max_train / max(len(train), 1))))
        thinned[numpy_stream(seed, "partition", "max_validation", c).permutation(validation)[kept:]] = -1
    return thinned


def _of_each(client: Ints, clients: int) -> list[Ints]:
    """List the positions of each client's number, in their order. Samples of no client have -1."""
    order = np.argsort(client, kind="stable")
    return np.split(order, np.searchsorted(client[order], np.arange(clients + 1)))[1:-1]


def _layout(client: Ints, side: Ints, names: tuple[str, ...], name: str) -> tuple[Tensor, Tensor]:
    """Compute the bounds of all clients, and the order of the samples that makes them slices."""
    order = np.lexsort((side, client))
    order = order[client[order] >= 0]
    counts = np.zeros((len(names), 3), dtype=np.int64)
    np.add.at(counts, (client[order], side[order]), 1)
    if not counts[:, TRAIN].all():
        empty = names[int(np.argmin(counts[:, TRAIN]))]
        raise FedtailorError(
            f"Client {empty!r} of {name!r} has no training sample: leave it out, or choose another split or partition."
        )
    ends = np.cumsum(counts).reshape(counts.shape)
    starts = ends[:, :1] - counts[:, :1]
    return torch.from_numpy(np.hstack([starts, ends])), torch.from_numpy(order)


def as_inputs(x: Tensor, pixels: str, dtype: torch.dtype) -> Tensor:
    """Convert samples to a network's inputs: pixels scaled, images with the channels last in memory (faster on a CPU).

    Images are copied in any case: so the strides are those of channels_last with one channel too, or convolutions
    would take a slower way.
    """
    if x.ndim == 4:
        x = x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)
    if x.dtype != torch.uint8:
        inputs = x.to(dtype)
        if dtype.itemsize < x.dtype.itemsize and not torch.isfinite(inputs).all():
            raise FedtailorError("Some features are too large for float32: scale them, or compute in float64.")
        return inputs
    x = x.to(dtype).div_(255)
    return x.mul_(2).sub_(1) if pixels == "signed" else x
