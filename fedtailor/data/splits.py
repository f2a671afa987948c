"""Splits: which of a client's samples are for training, for validation and for testing."""

import numpy as np
from numpy.typing import NDArray

from fedtailor._common.errors import FedtailorError
from fedtailor.data.dataset import TEST, TRAIN, VALIDATION, Dataset
from fedtailor.data.partitions import Ints
from fedtailor.training.streams import numpy_stream


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
        clients = dataset.client if by_client else None
        owner = np.zeros_like(mine) if clients is None else _numbered(clients.numpy()[first[mine]])
        sizes = np.bincount(owner) - 1  # each client keeps a training sample
        shares = _apportion(sizes, min(round(validation * len(train)), int(sizes.sum())), rng)
        for places, n in zip(of_each(owner, len(shares)), shares.tolist(), strict=True):
            units = mine[places]
            parts[units[_proportional(strata[units], n, rng)]] = VALIDATION
    return parts


def random_sides(client: Ints, strata: Ints, clients: int, test: float, validation: float, seed: int) -> Ints:
    """Split each client's units at random into train, validation and test, each stratum in proportion.

    Train gets one first; then test and validation, where asked for, get at least one while there are any.
    """
    side = np.full(len(client), TRAIN, dtype=np.int64)
    for c, units in enumerate(of_each(client, clients)):
        rng = numpy_stream(seed, "partition", "split", c)
        mine = rng.permutation(units)
        n_test = min(max(round(test * len(mine)), 1), len(mine) - 1) if test else 0
        n_validation = min(max(round(validation * len(mine)), 1), len(mine) - 1 - n_test) if validation else 0
        for n, held in ((n_test, TEST), (n_validation, VALIDATION)):
            chosen = _proportional(strata[mine], n, rng)
            side[mine[chosen]] = held
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
    numbers = _numbered(strata)
    chosen = np.zeros(len(numbers), dtype=bool)
    if n > 0:
        shares = _apportion(np.bincount(numbers), n, rng)
        for places, share in zip(of_each(numbers, len(shares)), shares.tolist(), strict=True):
            chosen[places[:share]] = True
    return chosen


def _apportion(sizes: Ints, n: int, rng: np.random.Generator) -> Ints:
    """Divide n in proportion to the sizes. A share that is no whole number is rounded up with the probability of its
    fraction (systematic sampling): so every unit has the same chance to be chosen, those of rare classes too."""
    total, order = int(sizes.sum()), rng.permutation(len(sizes))
    shares = np.zeros_like(sizes)
    if total:
        shares[order] = np.diff((np.cumsum(sizes[order]) * n + rng.integers(total)) // total, prepend=0)
    return shares


def _numbered(values: Ints) -> Ints:
    """Number the different values 0, 1, …"""
    numbers: Ints = np.unique(values, return_inverse=True)[1]
    return numbers


def thin(client: Ints, side: Ints, clients: int, max_train: int, seed: int) -> Ints:
    """Drop training samples at random until each client has at most `max_train`, and as large a share of its validation
    samples: a method that uses these has no more data than the others."""
    thinned = client.copy()
    for c, samples in enumerate(of_each(np.where(side != TEST, client, -1), clients)):
        train, validation = samples[side[samples] == TRAIN], samples[side[samples] == VALIDATION]
        thinned[numpy_stream(seed, "partition", "max_train", c).permutation(train)[max_train:]] = -1
        kept = max(1, round(len(validation) * min(1.0, max_train / max(len(train), 1))))
        thinned[numpy_stream(seed, "partition", "max_validation", c).permutation(validation)[kept:]] = -1
    return thinned


def of_each(client: Ints, clients: int) -> list[Ints]:
    """List the positions of each client's number, in their order. Samples of no client have -1."""
    order = np.argsort(client, kind="stable")
    return np.split(order, np.searchsorted(client[order], np.arange(clients + 1)))[1:-1]
