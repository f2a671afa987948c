"""A federation's data: the samples of all clients, and each client's view of its own.

All clients' samples are in one tensor, client by client, and within a client train, validation, test. So a client's
data is a slice without copies, and can be shared between processes. Each client's samples begin at a 64-byte address,
as they do where they are alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import functional

from fedtailor._common.errors import unknown
from fedtailor._common.files import Count
from fedtailor.data.dataset import Ints, kind_of_targets
from fedtailor.data.preprocessing import Facts, Preprocessing
from fedtailor.data.shifts import Shift
from fedtailor.training.inputs import Inputs, Lazy, Several, is_aligned, join, samples_per_line, select, take, tensors
from fedtailor.training.metrics import Targets

PIECE = 4096  # samples that are looked at together
CHECKED = 256  # samples in the checksum of those that are not in memory
SPLITS = {"train": (0, 1), "validation": (1, 2), "test": (2, 3), "all": (0, 3)}  # columns of `bounds`


@dataclass(eq=False)
class ClientData:
    """One client's inputs and targets, in the order train, validation, test."""

    name: str
    x: Inputs
    y: Tensor
    ends: tuple[int, int]  # of the training and of the validation samples
    n_classes: int | None = None  # where labels are the client's own

    train: tuple[Inputs, Tensor] = field(init=False)
    validation: tuple[Inputs, Tensor] = field(init=False)
    test: tuple[Inputs, Tensor] = field(init=False)
    held_out: Inputs = field(init=False)  # the inputs of the validation and test samples

    def __post_init__(self) -> None:
        (trained, validated), x, y = self.ends, self.x, self.y
        self.train = x[:trained], y[:trained]
        self.validation = x[trained:validated], y[trained:validated]
        self.test = x[validated:], y[validated:]
        self.held_out = x[trained:]


@dataclass(frozen=True)
class Join:
    """Clients that joined a run that had begun, together."""

    after: Count  # the last round without them
    clients: tuple[str, ...]
    source: str | None  # a path or a name of data, `object:…` for Python objects; None: the run had held them out
    name: str | None  # that the client was given, in place of the name that its data have
    fingerprint: str  # of their samples; "" if they are the run's own


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """Samples that are at their sites: their checksum and, where sites declare them, the training samples by class."""

    checksum: str
    counts: Tensor | None


@dataclass(frozen=True, eq=False)
class FederatedData:
    """The data of all clients; made by `federate`."""

    name: str
    x: Inputs
    y: Tensor
    bounds: Tensor  # int64 (clients, 4): start, end of train, end of validation, end of test
    classes: tuple[str, ...]  # or labels; () for regression
    names: tuple[str, ...]  # of the clients
    new: frozenset[int] = frozenset()  # clients held out from training
    partition: str | None = None  # how they share the samples; None where that is not known here
    assignment: str | None = None  # checksum of a partition of the user's own
    own_classes: tuple[int, ...] = ()  # number of classes of each client, where labels are each client's own
    own_names: tuple[tuple[str, ...], ...] = ()  # and their names
    tokens: int | None = None  # number of token values, where the data set says it
    joined: tuple[Join, ...] = ()  # training clients that came later: the last of them
    preprocessing: Preprocessing | None = None  # of a table: how its columns became features
    facts: Sequence[Facts] = ()  # of a table: what each client declares of its training samples
    shifts: tuple[Shift, ...] = ()  # what each client's own camera or laboratory does to its samples
    notes: tuple[str, ...] = ()  # what the user should know of the data
    elsewhere: Elsewhere | None = None  # the samples are: x and y are made up, the numbers in `bounds` declared

    n_clients: int = field(init=False)
    n_samples: Tensor = field(init=False)  # of each client, for training
    n_outputs: int = field(init=False)  # of a network for these data: one a class, or one a target
    targets: Targets = field(init=False)  # their kind

    def __post_init__(self) -> None:
        known = {
            "n_clients": len(self.names),
            "n_samples": self.bounds[:, 1] - self.bounds[:, 0],
            "n_outputs": len(self.classes) or (self.y.shape[1] if self.y.dim() > 1 else 1),
            "targets": kind_of_targets(self.y, self.classes),
        }
        vars(self).update(known)  # as the class is frozen

    @cached_property
    def vocabulary(self) -> int | None:
        """The number of token values, if the samples are whole numbers from 0: as the data set says it, or counted."""
        kind = self.x.like if isinstance(self.x, Lazy) else self.x
        if self.tokens is not None or isinstance(kind, Several) or kind.dtype != torch.int64:
            return self.tokens
        ends = [piece.aminmax() for piece in self.x.split(PIECE) if isinstance(piece, Tensor)]
        return int(max(high for _, high in ends)) + 1 if min(low for low, _ in ends) >= 0 else None

    @cached_property
    def places(self) -> Ints:
        """`bounds` in NumPy: looking one up in a tensor takes longer than cutting out a client's samples."""
        return self.bounds.numpy()

    @property
    def each_shift(self) -> tuple[Shift, ...]:
        """Each client's shift, also where there are none."""
        return self.shifts or tuple({} for _ in self.names)

    @property
    def n_training(self) -> int:
        """The number of clients that are not held out from training: they are numbered before those that are."""
        return self.n_clients - len(self.new)

    @property
    def n_at_first(self) -> int:
        """The number of clients that trained from the first round on: those that joined later are numbered behind."""
        return self.n_training - sum(len(join.clients) for join in self.joined)

    def train(self, client: int) -> tuple[Inputs, Tensor]:
        return self._slice(client, "train")

    def validation(self, client: int) -> tuple[Inputs, Tensor]:
        return self._slice(client, "validation")

    def test(self, client: int) -> tuple[Inputs, Tensor]:
        return self._slice(client, "test")

    def classes_of(self, client: int) -> tuple[str, ...]:
        """Return the names of a client's classes in the order of the outputs.

        Where labels are its own, the outputs after these stand for nothing, and are named by their number.
        """
        if not self.own_names:
            return self.classes
        own = self.own_names[client]
        return (*own, *(f"output {number}" for number in range(len(own), len(self.classes))))

    def preprocessing_of(self, client: int | None) -> Preprocessing | None:
        """Return how a client's columns became features; of all clients together for None."""
        if self.preprocessing is None or client is None or self.preprocessing.how != "per-client":
            return self.preprocessing
        return self.preprocessing.personal(self.facts[client])

    def client(self, number: int) -> ClientData:
        """Cut out one client's data; nothing is copied."""
        start, trained, validated, end = self.places[number].tolist()
        own_classes = self.own_classes[number] if self.own_classes else None
        ends = (trained - start, validated - start)
        return ClientData(self.names[number], self.x[start:end], self.y[start:end], ends, own_classes)

    def to(self, device: torch.device | str) -> "FederatedData":
        """Move all samples to a device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def aligned(self) -> "FederatedData":
        """Put each client's samples at a 64-byte address: matrix products have other last bits at other addresses.

        The rows between two clients repeat the last sample before them, and belong to nobody.
        """
        if self.elsewhere is not None:
            return self
        step, (stored, starts, sizes) = self._step, self._stored()
        if is_aligned(self.x) and is_aligned(self.y) and not (self.bounds[:, 0] % step).any():
            return self
        room = (sizes + step - 1) // step * step
        room[-1:] = sizes[-1:]  # nobody is behind the last one
        moved = torch.zeros(self.n_clients, dtype=torch.int64, device="cpu")
        moved[stored] = room.cumsum(0) - room
        order = _rows(starts, room, sizes).to(self.y.device)
        bounds = self.bounds - self.bounds[:, :1] + moved[:, None]
        return replace(self, x=select(self.x, order), y=self.y.index_select(0, order), bounds=bounds)

    def only(self, client: int) -> "FederatedData":
        """Copy the samples of one client into memory of their own. All names and numbers stay; the others' data, and
        what is known of them, are left out."""
        start, *_, end = self.places[client].tolist()
        rows = torch.arange(start, end, device=self.y.device)
        alone = replace(
            self,
            x=select(self.x, rows),
            y=self.y.index_select(0, rows),
            bounds=self.bounds[client : client + 1] - start,
            names=self.names[client : client + 1],
            own_classes=self.own_classes[client : client + 1],
            own_names=self.own_names[client : client + 1],
            facts=self.facts[client : client + 1],
            shifts=(),
            tokens=self.vocabulary,
            notes=(),
        )
        return alone.placed(client, self.names)

    def placed(self, number: int, names: tuple[str, ...]) -> "FederatedData":
        """Make the one client of these data client `number` of a federation with these names. The others are empty."""
        if self.n_clients != 1:
            raise ValueError(f"These are the data of {self.n_clients} clients, not of one.")
        before, after = number, len(names) - number - 1
        return replace(
            self,
            bounds=functional.pad(self.bounds, (0, 0, before, after)),
            names=names,
            own_classes=(*(0,) * before, *self.own_classes, *(0,) * after) if self.own_classes else (),
            own_names=(*((),) * before, *self.own_names, *((),) * after) if self.own_names else (),
            facts=(*((),) * before, *self.facts, *((),) * after) if self.facts else (),
        )

    @property
    def _step(self) -> int:
        """The number of rows from one 64-byte address to the next. Targets that are whole numbers may be anywhere."""
        return lcm(samples_per_line(self.x), samples_per_line(self.y) if self.y.is_floating_point() else 1)

    def _stored(self) -> tuple[Tensor, Tensor, Tensor]:
        """List the clients that have samples as these are stored: their numbers, first rows and numbers of rows."""
        starts, sizes = self.bounds[:, 0], self.bounds[:, -1] - self.bounds[:, 0]
        order = starts.argsort(stable=True)
        order = order[sizes[order] > 0]
        return order, starts[order], sizes[order]

    def with_new(self, other: "FederatedData") -> "FederatedData":
        """Append the clients of other data of the same kind, as new ones. What is there stays where it is."""
        count, n = self.n_clients + other.n_clients, len(self.y)
        gap = torch.full((-n % self._step,), n - 1, device=self.y.device)
        return replace(
            self,
            x=_stacked(self.x, select(self.x, gap), other.x),
            y=torch.cat([self.y, self.y[gap], other.y]),
            bounds=torch.cat([self.bounds, other.bounds + n + len(gap)]),
            names=(*self.names, *other.names),
            new=self.new | set(range(self.n_clients, count)),
            own_classes=(*self.own_classes, *other.own_classes),
            own_names=(*self.own_names, *other.own_names),
            facts=(*self.facts, *other.facts),
            shifts=(*self.each_shift, *other.each_shift) if self.shifts or other.shifts else (),
        )

    def with_joined(self, join: Join) -> "FederatedData":
        """Make training clients of new ones: they are numbered behind the others, before those that are still new."""
        joining = [self.names.index(name) for name in join.clients]
        rest = [client for client in sorted(self.new) if client not in joining]
        order = [*range(self.n_training), *joining, *rest]
        return replace(
            self,
            bounds=self.bounds[order],
            names=tuple(self.names[client] for client in order),
            new=frozenset(range(len(order) - len(rest), len(order))),
            own_classes=tuple(self.own_classes[client] for client in order) if self.own_classes else (),
            own_names=tuple(self.own_names[client] for client in order) if self.own_names else (),
            facts=tuple(self.facts[client] for client in order) if self.facts else (),
            shifts=tuple(self.shifts[client] for client in order) if self.shifts else (),
            joined=(*self.joined, join),
        )

    def fingerprint(self) -> str:
        """Compute a checksum of all samples and of their partition; of samples that are not in memory, some.

        The rows between clients do not count: it is that of samples without any.
        """
        if self.elsewhere is not None:
            return self.elsewhere.checksum
        stored, starts, sizes = self._stored()
        bounds = self.bounds.clone()
        bounds[stored] += (sizes.cumsum(0) - sizes - starts)[:, None]
        checksum, rows = 0, _rows(starts, sizes)
        for tensor in (bounds, *_tensors(self.y, rows), *_tensors(self.x, rows)):
            tensor = tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor
            checksum = crc32(tensor.cpu().contiguous().numpy().data, checksum)
        return f"{checksum:08x}"

    def _slice(self, client: int, split: str) -> tuple[Inputs, Tensor]:
        first, last = SPLITS[split]
        start, end = self.places[client, [first, last]].tolist()
        return self.x[start:end], self.y[start:end]

    def counts(self, split: str | None = None) -> Tensor:
        """Count the samples, clients × classes (one column for regression), in one split or in all.

        A sample with several labels counts for each of them. The samples of sites have one column too.
        """
        split = split or "all"
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        first, last = SPLITS[split]
        sizes = self.bounds[:, last] - self.bounds[:, first]
        if self.elsewhere is not None or self.targets == "numbers":
            return sizes[:, None]
        labels = self.y[_rows(self.bounds[:, first], sizes).to(self.y.device)].cpu()
        client, classes = torch.arange(self.n_clients, device="cpu").repeat_interleave(sizes), len(self.classes)
        if self.targets == "classes":
            cells = torch.bincount(client * classes + labels, minlength=self.n_clients * classes)
            return cells.view(self.n_clients, classes)
        counted = torch.zeros(self.n_clients, classes, dtype=torch.int64, device="cpu")
        return counted.index_add_(0, client, labels.long())

    def class_counts(self) -> Tensor:
        """Count all training clients' training samples by class."""
        if self.elsewhere is not None and self.elsewhere.counts is not None:
            return self.elsewhere.counts.sum(0)
        return self.counts("train")[: self.n_training].sum(0)


def _rows(starts: Tensor, numbers: Tensor, sizes: Tensor | None = None) -> Tensor:
    """List the rows from these starts, so many of each. Of those that have only so many (`sizes`), the last one
    stands for what is missing."""
    before = numbers.cumsum(0) - numbers
    rows = torch.arange(int(numbers.sum()), device="cpu") - before.repeat_interleave(numbers)
    if sizes is not None:
        rows = rows.minimum((sizes - 1).repeat_interleave(numbers))
    return rows + starts.repeat_interleave(numbers)


def _tensors(x: Inputs, rows: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that stand for samples in a checksum: all, or some that are spread evenly over lazy ones."""
    if isinstance(x, Several):
        for part in x.parts:
            yield from _tensors(part, rows)
    elif isinstance(x, Lazy):
        yield from tensors(take(x, rows[torch.linspace(0, len(rows) - 1, CHECKED, device="cpu").long().unique()]))
    else:
        yield from (select(x, piece) for piece in rows.to(x.device).split(PIECE))


def _stacked(*pieces: Inputs) -> Inputs:
    """Put samples behind each other; images keep their channels last in memory (see `as_inputs`)."""
    images = [piece.permute(0, 2, 3, 1) for piece in pieces if isinstance(piece, Tensor) and piece.ndim == 4]
    return torch.cat(images).permute(0, 3, 1, 2) if images else join(pieces)
