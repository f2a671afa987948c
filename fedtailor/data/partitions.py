"""Partitions of a data set's samples among the clients of a simulated federation, and random splits of each client's.

A partition is a matrix of shares, classes × clients, drawn once. Each part of the data (train, validation, test) is
then divided by these shares, so that a client's parts have the same mix of classes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from fedtailor._common.errors import FedtailorError, unknown
from fedtailor.data.dataset import TEST, TRAIN, VALIDATION, Dataset, Ints
from fedtailor.data.shifts import SHIFTS, shifts_catalogue
from fedtailor.training.streams import numpy_stream

Shares = NDArray[np.float64]  # (classes, clients); a row sums to 1, or to 0 where nobody owns the class
DRAWS = 1000
NATURAL = "natural"  # not drawn: the data set knows its clients
WITHIN = "natural+"  # drawn within each of them: its samples are divided among several clients


@dataclass(frozen=True)
class Partition:
    """A way to draw the shares: `draw(totals, clients, parameter, rng)`, `totals` being (parts, classes)."""

    description: str
    draw: Callable[[Ints, int, float, np.random.Generator], Shares]
    parameter: str = ""  # "ALPHA" (a positive number), "K" (a whole number) or none
    by_label: bool = True  # otherwise all samples count as one class
    in_turn: bool = False  # hand out a class's samples round-robin in file order; otherwise shuffle and cut


def parse(spec: str) -> tuple[Partition, float]:
    """Find the partition that `name[:parameter]` asks for, and its parameter (0 if it takes none)."""
    name, colon, text = spec.partition(":")
    if name not in PARTITIONS:
        raise unknown("partition", name, [*PARTITIONS, NATURAL, *SHIFTS])
    partition = PARTITIONS[name]
    if not partition.parameter:
        if colon:
            raise FedtailorError(f"The partition {name!r} takes no parameter: write {name!r}, not {spec!r}.")
        return partition, 0.0
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    whole = partition.parameter == "K"
    if not isfinite(value) or value <= 0 or (whole and value != int(value)):
        kind = "a whole number above 0" if whole else "a number above 0"
        example = f"{name}:{2 if whole else 0.3}"
        raise FedtailorError(f"The partition {spec!r} needs {kind} after the colon: write for example {example!r}.")
    return partition, value


def draw(
    labels: Ints, classes: int, parts: Ints, spec: str, clients: int, min_samples: int, seed: int, *where: int
) -> Ints:
    """Assign each sample to a client; -1 for samples of a class that no client owns.

    Part 0 is trained on. `where` tells several draws apart.
    """
    partition, parameter = parse(spec)
    if not partition.by_label:
        labels, classes = np.zeros_like(parts), 1
    elif not classes:
        raise FedtailorError(
            f"The partition {spec!r} draws by class, but these targets are numbers: use iid, quantity or natural."
        )
    totals = np.zeros((int(parts.max()) + 1, classes), dtype=np.int64)
    np.add.at(totals, (parts, labels), 1)
    rng, order = (numpy_stream(seed, "partition", purpose, *where) for purpose in ("shares", "order"))
    for _ in range(DRAWS):
        shares = partition.draw(totals, clients, parameter, rng)
        counts = _counts(totals, shares, partition.in_turn)
        fewest = int(counts.sum(axis=(0, 1)).min())
        if fewest >= min_samples and counts[0].sum(axis=0).min() > 0:
            return _hand_out(labels, parts, counts, partition.in_turn, order)
    raise FedtailorError(
        f"The partition {spec!r} did not give every client {max(min_samples, 1)} samples, one of them to train on, in "
        f"any of {DRAWS} draws (the last gave a client {fewest}): ask for fewer clients, a smaller --min-samples or "
        "more even shares."
    )


def _counts(totals: Ints, shares: Shares, in_turn: bool = False) -> Ints:
    """Count the samples of `totals[...]` that each client gets: cut at the cumulative shares, rounded down, or one to
    each owner in turn."""
    counts: Ints
    if in_turn:
        owned = shares > 0
        owners = np.maximum(owned.sum(axis=1, keepdims=True), 1)
        rounds, rest = np.divmod(totals[..., None], owners)
        turn = np.cumsum(owned, axis=1) - 1
        counts = np.where(owned, rounds + (turn < rest), 0)
    else:  # the small number keeps 0.1 + 0.2 of 10 from being cut at 2.9999
        edges = np.floor(totals[..., None] * np.cumsum(shares, axis=-1) + 1e-6).astype(np.int64)
        counts = np.diff(edges, axis=-1, prepend=0)
    return counts


def _hand_out(labels: Ints, parts: Ints, counts: Ints, in_turn: bool, rng: np.random.Generator) -> Ints:
    client = np.full(len(labels), -1, dtype=np.int64)
    for part, label in np.argwhere(counts.sum(axis=2) > 0):
        samples = np.flatnonzero((parts == part) & (labels == label))
        to = np.repeat(np.arange(counts.shape[2]), counts[part, label])
        if in_turn:
            owners = len(np.unique(to))
            order = np.argsort(np.arange(len(samples)) % owners, kind="stable")
        else:
            order = rng.permutation(len(samples))
        client[samples[order]] = to
    return client


def _even(totals: Ints, clients: int, _: float, rng: np.random.Generator) -> Shares:
    return np.full((totals.shape[1], clients), 1 / clients)


def _plain_dirichlet(totals: Ints, clients: int, alpha: float, rng: np.random.Generator) -> Shares:
    return rng.dirichlet(np.full(clients, alpha), size=totals.shape[1])


def _capped_dirichlet(totals: Ints, clients: int, alpha: float, rng: np.random.Generator) -> Shares:
    """Draw PGFed's shares: a client that already has its even part of all samples gets none of the next class."""
    shares = np.zeros((totals.shape[1], clients))
    size = np.zeros(clients, dtype=np.int64)
    for label, of_class in enumerate(totals.T):
        room = size * clients < totals.sum()
        row = rng.dirichlet(np.full(clients, alpha)) * room
        if row.sum() == 0:  # a tiny alpha gives all to clients that have enough
            row = room if room.any() else np.ones(clients)
        shares[label] = row / row.sum()
        size += _counts(of_class, shares[label]).sum(axis=0)
    return shares


def _some_classes(totals: Ints, clients: int, k: float, rng: np.random.Generator) -> Shares:
    """Draw K classes at random for each client.

    Then each class without an owner takes the place of a class with several, at a random client: so every
    class has an owner wherever clients × K ≥ classes. Otherwise classes without an owner are left out.
    """
    classes = totals.shape[1]
    if k > classes:
        raise FedtailorError(
            f"{int(k)} classes per client were asked for, but the data has {classes}: ask for at most {classes}."
        )
    owned = np.zeros((classes, clients), dtype=bool)
    for client in range(clients):
        owned[rng.permutation(classes)[: int(k)], client] = True
    for orphan in np.flatnonzero(~owned.any(axis=1)):
        spare = np.argwhere(owned & (owned.sum(axis=1, keepdims=True) > 1))
        if len(spare):
            label, client = spare[rng.integers(len(spare))]
            owned[label, client], owned[orphan, client] = False, True
    shares: Shares = owned / np.maximum(owned.sum(axis=1, keepdims=True), 1)
    return shares


def _pairs(totals: Ints, clients: int, _: float, rng: np.random.Generator) -> Shares:
    """Return pFedMB's shares: clients 0 and 1 own classes 0 and 1, clients 2 and 3 classes 2 and 3, and so on."""
    classes = totals.shape[1]
    if classes % 2 or clients % classes:
        raise FedtailorError(
            "The partition 'pairs' needs an even number of classes and as many clients as classes, or a "
            f"multiple: {clients} clients do not fit {classes} classes."
        )
    owned = np.arange(classes)[:, None] // 2 == np.arange(clients) // 2 % (classes // 2)
    shares: Shares = owned / owned.sum(axis=1, keepdims=True)
    return shares


PARTITIONS: dict[str, Partition] = {
    "iid": Partition("all clients alike: shuffled and split evenly", _even, by_label=False),
    "dirichlet": Partition(
        "each class by Dirichlet(ALPHA) shares; a client with an even part of all gets no more (PGFed)",
        _capped_dirichlet, "ALPHA",
    ),
    "dirichlet-plain": Partition(
        "each class by Dirichlet(ALPHA) shares, without that cap", _plain_dirichlet, "ALPHA"
    ),
    "classes": Partition(
        "K random classes per client, each handed in turn to its owners (PFLEGO)",
        _some_classes, "K", in_turn=True,
    ),
    "classes-random": Partition(
        "K random classes per client, each shuffled and cut evenly (pFedMB, FedACS)", _some_classes, "K"
    ),
    "pairs": Partition("clients 2k and 2k+1 share the same two classes (pFedMB)", _pairs),
    "quantity": Partition(
        "classes alike, sizes by Dirichlet(ALPHA)", _plain_dirichlet, "ALPHA", by_label=False
    ),
}  # fmt: skip


def partitions_catalogue() -> dict[str, str]:
    """List the partitions: how each is written, and one line on what it does."""
    drawn = {
        f"{name}:{partition.parameter}" if partition.parameter else name: partition.description
        for name, partition in PARTITIONS.items()
    }
    return drawn | {
        NATURAL: "the clients that the data itself names",
        f"{WITHIN}…": "each of those divided among equally many clients, by any of the others (natural+dirichlet:0.3)",
        **dict(shifts_catalogue()),
    }


# --- which of a client's samples are for training, for validation and for testing ---


def official_parts(
    dataset: Dataset, first: Ints, strata: Ints, validation: float, seed: int, *, by_client: bool
) -> Ints:
    """Return each unit's part. Where there is no validation part, a share of the training part is taken for it: of each
    stratum in proportion and, if `by_client`, of each of the clients that the data name."""
    if dataset.part is None:
        raise FedtailorError(f"The data set {dataset.name!r} has no official split: leave out --split official.")
    parts: Ints = dataset.part.numpy()[first].astype(np.int64)
    train = np.flatnonzero(parts == TRAIN)
    if validation > 0 and len(train) and not (parts == VALIDATION).any():
        rng = numpy_stream(seed, "partition", "validation")
        mine = rng.permutation(train)
        owner: Ints = np.zeros_like(mine)
        if by_client and dataset.client is not None:
            owner = np.unique(dataset.client.numpy()[first[mine]], return_inverse=True)[1]
        sizes = np.bincount(owner) - 1  # each client keeps a training sample
        shares = _apportion(sizes.tolist(), min(round(validation * len(train)), int(sizes.sum())), rng)
        for places, n in zip(of_each(owner, len(shares)), shares, strict=True):
            units = mine[places]
            parts[units[_proportional(strata[units], n, rng)]] = VALIDATION
    return parts


def random_sides(client: Ints, strata: Ints, clients: int, test: float, validation: float, seed: int) -> Ints:
    """Split each client's units at random into train, validation and test, each stratum in proportion.

    Train gets one first; then test and validation, where asked for, get at least one while there are any.
    """
    side = np.full(len(client), TRAIN, dtype=np.int64)
    stream = numpy_stream(seed, "partition", "split")
    for units in of_each(client, clients):
        (rng,) = stream.spawn(1)  # of this client: as it would be of the key ("partition", "split", client)
        mine = rng.permutation(units)
        n_test = min(max(round(test * len(mine)), 1), len(mine) - 1) if test else 0
        n_validation = min(max(round(validation * len(mine)), 1), len(mine) - 1 - n_test) if validation else 0
        for n, which in ((n_test, TEST), (n_validation, VALIDATION)):
            chosen = _proportional(strata[mine], n, rng)
            side[mine[chosen]] = which
            mine = mine[~chosen]
    return side


def strata_of(dataset: Dataset, units: Ints, first: Ints, stratify: bool) -> Ints:
    """Return the class of each unit: for a group the one that most of its samples have. Without classes all are 0."""
    if not stratify or dataset.targets != "classes":
        return np.zeros_like(first)
    labels: Ints = dataset.y.numpy()
    if dataset.group is None:
        return labels
    pairs, counts = np.unique(units * len(dataset.classes) + labels, return_counts=True)
    unit, label = np.divmod(pairs, len(dataset.classes))
    order = np.lexsort((label, -counts, unit))
    _, most = np.unique(unit[order], return_index=True)
    majority: Ints = label[order][most]
    return majority


def _proportional(strata: Ints, n: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Choose n units: of each stratum its share, the first ones in this order."""
    chosen = np.zeros(len(strata), dtype=bool)
    if n > 0:
        order = strata.argsort(kind="stable")
        ranked = strata[order]
        edges = [0, *((ranked[1:] != ranked[:-1]).nonzero()[0] + 1).tolist(), len(order)]
        shares = _apportion([end - start for start, end in pairwise(edges)], n, rng)
        for start, share in zip(edges, shares, strict=False):
            chosen[order[start : start + share]] = True
    return chosen


def _apportion(sizes: Sequence[int], n: int, rng: np.random.Generator) -> list[int]:
    """Divide n in proportion to the sizes. A share that is no whole number is rounded up with the probability of its
    fraction (systematic sampling): so every unit has the same chance to be chosen, those of rare classes too.

    In plain numbers: there may be a million clients with a handful of sizes each, for which NumPy's calls take longer.
    """
    total, order, shares = sum(sizes), rng.permutation(len(sizes)).tolist(), [0] * len(sizes)
    seen, before, first = 0, 0, int(rng.integers(total)) if total else 0
    for place in order if total else ():
        seen += sizes[place]
        end = (seen * n + first) // total
        shares[place], before = end - before, end
    return shares


def thin(client: Ints, side: Ints, clients: int, max_train: int, seed: int) -> Ints:
    """Drop training samples at random until each client has at most `max_train`, and as large a share of its validation
    samples: a method that uses these has no more data than the others."""
    thinned = client.copy()
    streams = [numpy_stream(seed, "partition", purpose) for purpose in ("max_train", "max_validation")]
    for samples in of_each(np.where(side != TEST, client, -1), clients):
        of_train, of_validation = (stream.spawn(1)[0] for stream in streams)
        train, validation = samples[side[samples] == TRAIN], samples[side[samples] == VALIDATION]
        thinned[of_train.permutation(train)[max_train:]] = -1
        kept = max(1, round(len(validation) * min(1.0, max_train / max(len(train), 1))))
        thinned[of_validation.permutation(validation)[kept:]] = -1
    return thinned


def of_each(client: Ints, clients: int) -> Iterator[Ints]:
    """Yield the positions of each client's number, in their order. Samples of no client have -1."""
    order = np.argsort(client, kind="stable")
    edges = np.searchsorted(client[order], np.arange(clients + 1)).tolist()
    return (order[start:end] for start, end in pairwise(edges))
