"""A federation's data: the samples of all clients, and each client's view of its own.

All clients' samples are in one tensor, client by client, and within a client train, validation, test. So a client's
data is a slice without copies, and can be shared between processes.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from zlib import crc32

import torch
from torch import Tensor

from fedtailor.data.dataset import kind_of_targets
from fedtailor.errors import unknown
from fedtailor.metric import Targets

SPLITS = {"train": (0, 1), "validation": (1, 2), "test": (2, 3), "all": (0, 3)}  # columns of `bounds`


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
    classes: tuple[str, ...]  # or labels; () for regression
    names: tuple[str, ...]  # of the clients
    new: frozenset[int] = frozenset()  # clients held out from training
    own_classes: tuple[int, ...] = ()  # number of classes of each client, where labels are each client's own
    own_names: tuple[tuple[str, ...], ...] = ()  # and their names

    @property
    def n_clients(self) -> int:
        return len(self.names)

    @property
    def targets(self) -> Targets:
        """The kind of the targets."""
        return kind_of_targets(self.y, self.classes)

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
        """Count the samples, clients × classes (one column for regression), in one split or in all.

        A sample with several labels counts for each of them.
        """
        split = split or "all"
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        first, last = SPLITS[split]
        table = torch.zeros(self.n_clients, max(len(self.classes), 1), dtype=torch.int64)
        for row, place in zip(table, self.places, strict=True):
            labels = self.y[place[first] : place[last]]
            match self.targets:
                case "classes":
                    row += torch.bincount(labels, minlength=len(row))
                case "labels":
                    row += labels.sum(0, dtype=torch.int64)
                case "numbers":
                    row += len(labels)
        return table
