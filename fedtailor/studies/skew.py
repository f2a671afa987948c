"""The differences between the clients of a federation, in their targets and in their features."""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor._common.text import percent
from fedtailor.data import FederatedData
from fedtailor.training.inputs import Held, tensors
from fedtailor.training.metrics import Targets
from fedtailor.training.streams import numpy_stream

PERMUTATIONS = 20
PIECE = 1024  # samples that are read together
FEATURES = 256  # of which skew is measured, evenly chosen where there are more


@dataclass
class Skew:
    """The differences between clients, and those in a random partition of the same samples.

    With several labels a sample, `label` is the mean over labels of the distance; of numbers, it is the share of their
    variance that goes with the client. Without classes, the features' variance is that of all samples.
    """

    label: float  # mean total variation distance between a client's classes and all
    label_by_chance: float  # the same in a random partition
    feature: float  # share of the features' variance within a class that goes with the client, chance taken off
    targets: Targets = "classes"

    def sentences(self) -> list[str]:
        """Say how far the clients' targets and features differ."""
        beside = "more than" if self.label > 1.5 * self.label_by_chance else "about as much as"
        chance = f"{beside} chance would give ({percent(self.label_by_chance)} %)"
        targets = {
            "classes": f"Labels: a client's classes differ from everybody's by {percent(self.label)} % on average, "
            f"{chance}.",
            "labels": f"Labels: a client has a label more or less often than everybody by {percent(self.label)} % on "
            f"average, {chance}.",
            "numbers": f"Targets: {percent(self.label)} % of what varies goes with the client, {chance}.",
        }
        within = " within a class" if self.targets == "classes" else ""
        return [
            targets[self.targets],
            f"Features: {percent(self.feature)} % of what varies{within} goes with the client.",
        ]


def measure_skew(data: FederatedData, seed: int) -> Skew:
    """Measure how far the clients' targets and features differ (of the training samples)."""
    parts = [data.train(client) for client in range(data.n_clients)]
    y = np.concatenate([targets.cpu().numpy() for _, targets in parts])
    client = np.repeat(np.arange(data.n_clients), [len(targets) for _, targets in parts])
    rng = numpy_stream(seed, "advice")
    skew_of = {"classes": _label_skew, "labels": _labels_skew, "numbers": _number_skew}[data.targets]
    by_chance = [skew_of(y, rng.permutation(client)) for _ in range(PERMUTATIONS)]
    x = np.concatenate([_some_features(piece) for inputs, _ in parts for piece in inputs.split(PIECE)])
    groups = y if data.targets == "classes" else np.zeros(len(y), dtype=np.int64)
    return Skew(skew_of(y, client), fmean(by_chance), _feature_skew(x, groups, client), data.targets)


def _labels_skew(y: NDArray[Any], client: NDArray[Any]) -> float:
    """Compute the mean distance between each client's share of samples with a label and that of all, over labels."""
    return fmean(_label_skew(column.astype(np.int64), client) for column in y.T)


def _number_skew(y: NDArray[Any], client: NDArray[Any]) -> float:
    """Compute the share of the targets' variance that lies between clients."""
    y = y.reshape(len(y), -1)
    sums = np.zeros((client.max() + 1, y.shape[1]))
    np.add.at(sums, client, y)
    means = sums / np.bincount(client)[:, None]
    total = ((y - y.mean(0)) ** 2).sum()
    return float(1 - ((y - means[client]) ** 2).sum() / total) if total else 0.0


def _label_skew(y: NDArray[Any], client: NDArray[Any]) -> float:
    """Compute the mean total variation distance between each client's classes and those of all samples."""
    counts = np.zeros((client.max() + 1, y.max() + 1))
    np.add.at(counts, (client, y), 1)
    shares, everywhere = counts / counts.sum(1, keepdims=True), counts.sum(0) / counts.sum()
    return float(np.abs(shares - everywhere).sum(1).mean() / 2)


def _some_features(samples: Held) -> NDArray[Any]:
    x = np.hstack([part.cpu().numpy().reshape(len(part), -1) for part in tensors(samples)])
    return x[:, np.linspace(0, x.shape[1] - 1, min(FEATURES, x.shape[1])).astype(int)]


def _feature_skew(x: NDArray[Any], y: NDArray[Any], client: NDArray[Any]) -> float:
    """Compute ε²: the share of the variance within classes that lies between clients, less what chance alone gives."""
    between = within = 0.0
    for label in np.unique(y):
        mine, owners = x[y == label].astype(float), client[y == label]
        groups, place = np.unique(owners, return_inverse=True)
        free = len(mine) - len(groups)
        if len(groups) < 2 or free < 1:
            continue
        sums = np.zeros((len(groups), x.shape[1]))
        np.add.at(sums, place, mine)
        means = sums / np.bincount(place)[:, None]
        total, inside = ((mine - mine.mean(0)) ** 2).sum(), ((mine - means[place]) ** 2).sum()
        between += total - inside - (len(groups) - 1) * inside / free
        within += total
    return max(0.0, float(between / within)) if within else 0.0
