"""Splits: which of a client's samples are for training, for validation and for testing."""

import numpy as np

from fedtailor.data.dataset import TEST, TRAIN, VALIDATION, Dataset
from fedtailor.data.partitions import Ints
from fedtailor.errors import FedtailorError
from fedtailor.local.streams import numpy_stream


def official_parts(dataset: Dataset, first: Ints, validation: float, seed: int) -> Ints:
    if dataset.part is None:
        raise FedtailorError(f"The data set {dataset.name!r} has no official split: leave out --split official.")
    parts: Ints = dataset.part.numpy()[first].astype(np.int64)
    train = np.flatnonzero(parts == TRAIN)
    if validation > 0 and not (parts == VALIDATION).any():
        taken = round(validation * len(train))
        parts[numpy_stream(seed, "partition", "validation").permutation(train)[:taken]] = VALIDATION
    return parts


def random_sides(client: Ints, clients: int, test: float, validation: float, seed: int) -> Ints:
    """Split each client's units at random into train, validation and test.

    Train gets one first; then test and validation, where asked for, get at least one while there are any.
    """
    side = np.full(len(client), TRAIN, dtype=np.int64)
    for c, units in enumerate(of_each(client, clients)):
        mine = numpy_stream(seed, "partition", "split", c).permutation(units)
        n_test = min(max(round(test * len(mine)), 1), len(mine) - 1) if test else 0
        n_validation = min(max(round(validation * len(mine)), 1), len(mine) - 1 - n_test) if validation else 0
        side[mine[:n_test]] = TEST
        side[mine[n_test : n_test + n_validation]] = VALIDATION
    return side


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
