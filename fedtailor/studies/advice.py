"""Advice on which method to take, and whether personalization is needed at all: measured, not guessed.

First the partition itself: how far the clients' labels and features differ, beside a random partition of the same
samples. Then a race: a shortlist from "one model for all" to "everybody alone" by successive halving on validation
accuracy within a time budget. The answer is the simplest method that nothing beats by more than chance.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import erfc, sqrt
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data import FederatedData
from fedtailor.errors import FedtailorError
from fedtailor.experiment import Experiment, merged
from fedtailor.local.isolation import isolated
from fedtailor.local.streams import numpy_stream
from fedtailor.simulation import Objects, Prepared, Simulation, partition_data, prepare
from fedtailor.studies.measures import Accuracies, holm, wilcoxon

GLOBAL, TUNED, ALONE = "fedavg", "fedavg, fine-tuned", "local"
SHORTLIST = (GLOBAL, TUNED, ALONE, "fedper", "fedrod", "ditto", "apfl", "pgfed", "fedacs")
MARGIN = 0.01  # a gain of less than a point is not worth another method
LEVEL = 0.05
FEW = 10  # clients below which a test over clients can hardly find anything
PILOT, MOST = 2, 100  # rounds to measure a method's speed, and the most that one is given
PERMUTATIONS = 20
FEATURES = 256  # of which skew is measured, evenly chosen where there are more

Report = Callable[[str, int, int], None]  # of progress: a title, rounds done, rounds to do


@dataclass
class Skew:
    """The differences between clients, and those in a random partition of the same samples."""

    label: float  # mean total variation distance between a client's classes and all
    label_by_chance: float  # the same in a random partition
    feature: float  # share of the features' variance within a class that goes with the client, chance taken off


@dataclass
class Candidate:
    """A method in the race."""

    title: str
    experiment: Experiment
    simulation: Simulation | None = None
    seconds: float = 0.0  # a round
    rounds: int = 0
    accuracy: Accuracies = field(default_factory=dict)  # on validation samples, by client
    n_samples: dict[int, int] = field(default_factory=dict)  # how many validation samples those are

    @property
    def mean(self) -> float:
        """The mean accuracy over clients."""
        return fmean(self.accuracy.values())

    def advance(self, rounds: int, report: Report) -> None:
        """Train until so many rounds are done, and measure."""
        assert self.simulation is not None
        begin, before = time.perf_counter(), self.rounds
        while self.rounds < rounds:
            self.rounds += 1
            self.simulation.round(self.rounds)
            report(self.title, self.rounds, rounds)
        self.seconds = (time.perf_counter() - begin) / max(1, rounds - before)
        loop = self.simulation.loop
        measured = loop.evaluator.evaluate(loop.server, loop.versions, [], self.simulation.transport)
        on_validation = {client: of_client["validation"] for client, of_client in measured.items()}
        self.accuracy = {client: m.accuracy for client, m in on_validation.items() if m.accuracy is not None}
        self.n_samples = {client: on_validation[client].n_samples for client in self.accuracy}
        if not self.accuracy:
            raise FedtailorError("There are no validation samples with classes to judge by: give --validation 0.2.")


@dataclass
class Advice:
    """The measurements, and the recommendation that follows from them."""

    skew: Skew
    candidates: list[Candidate]  # the best first
    chosen: str  # the title of the recommended one
    needed: bool  # whether that is a personalized one
    gain: float  # of the best over the global model, in accuracy
    p: float  # the p-value of this gain, corrected
    seconds: float


def advise(
    experiment: Experiment, budget: float = 90.0, shortlist: tuple[str, ...] = SHORTLIST, report: Report | None = None
) -> Advice:
    """Race the shortlist on the experiment's data and clients for about `budget` seconds, and recommend a method."""
    begin = time.perf_counter()
    report = report or (lambda title, done, total: None)
    with isolated():
        data = partition_data(experiment)
        skew = measure_skew(data, experiment.seed)
        candidates = [Candidate(title, _experiment(experiment, title)) for title in (GLOBAL, *shortlist)]
        candidates = list({candidate.title: candidate for candidate in candidates}.values())
        prepared = [prepare(candidate.experiment, Objects(data=data)) for candidate in candidates]
        try:
            for candidate, its in zip(candidates, prepared, strict=True):
                candidate.simulation = _started(its)
                candidate.advance(PILOT, report)
            ranked = _race(candidates, budget - (time.perf_counter() - begin), report)
        finally:
            for candidate in candidates:
                if candidate.simulation is not None:
                    candidate.simulation.close()
    chosen, gain, p = _decide(ranked)
    return Advice(skew, ranked, chosen, chosen != GLOBAL, gain, p, time.perf_counter() - begin)


def _experiment(experiment: Experiment, title: str) -> Experiment:
    """Make the experiment of a candidate; "fedavg, fine-tuned" is FedAvg, fine-tuned before it is evaluated."""
    method, _, tuned = title.partition(", ")
    evaluation = {**experiment.evaluation.model_dump(), "model": "personal", "every": MOST + 1}
    evaluation["fine_tune"] = experiment.epochs if tuned else 0
    changes: dict[str, Any] = {"method": method, "parameters": {}, "rounds": MOST, "evaluation": evaluation}
    return Experiment(**merged(experiment.model_dump(), changes))


def _started(prepared: Prepared) -> Simulation:
    simulation = Simulation(prepared)
    simulation.start()
    return simulation


def _race(candidates: list[Candidate], budget: float, report: Report) -> list[Candidate]:
    """Race by successive halving: all get r rounds, the better half 2r, the better quarter 4r. The global model, which
    the others are judged against, stays to the end. Return the best first, those that went further before the
    others."""
    cost = sum(candidate.seconds for candidate in candidates)
    rounds = int(max(PILOT + 1, min(MOST / 4, budget / (2.5 * cost))))
    left = list(candidates)
    for rung in (1, 2, 4):
        out = [candidate for candidate in candidates if candidate not in left]
        for candidate in left:
            candidate.advance(rung * rounds, report)
        left.sort(key=lambda candidate: -candidate.mean)
        ranked = left + sorted(out, key=lambda candidate: (-candidate.rounds, -candidate.mean))
        left = [c for place, c in enumerate(left) if place < (len(left) + 1) // 2 or c.title == GLOBAL]
    return ranked


def _decide(ranked: list[Candidate]) -> tuple[str, float, float]:
    """Choose a candidate, and return its title, the best one's gain over the global model, and the p-value of this.

    It is the global model, unless the best of those that went furthest beats it by a point and by more than chance
    (corrected for the number of candidates): then the simplest that is within a point of the best.
    """
    last = [candidate for candidate in ranked if candidate.rounds == ranked[0].rounds]
    base = next(candidate for candidate in last if candidate.title == GLOBAL)
    others = [candidate for candidate in last if candidate is not base]
    if not others:
        return GLOBAL, 0.0, 1.0
    ps = holm([_chance(other, base) for other in others])
    best, p = max(zip(others, ps, strict=True), key=lambda pair: pair[0].mean)
    gain = best.mean - base.mean
    if gain <= MARGIN or p >= LEVEL:
        return GLOBAL, gain, p
    good = [other.title for other in others if other.mean >= best.mean - MARGIN]
    return min(good, key=lambda title: SHORTLIST.index(title) if title in SHORTLIST else len(SHORTLIST)), gain, p


def _chance(one: Candidate, other: Candidate) -> float:
    """Compute the p-value of a difference: over clients, or over validation samples where clients are too few."""
    if len(one.accuracy) >= FEW:
        p = wilcoxon(one.accuracy, other.accuracy)
        return 1.0 if p is None else p
    total = sum(one.n_samples[client] for client in one.accuracy)
    rates = [sum(c.accuracy[i] * c.n_samples[i] for i in c.accuracy) / total for c in (one, other)]
    error = sqrt(sum(rate * (1 - rate) for rate in rates) / total)
    return erfc(abs(rates[0] - rates[1]) / error / sqrt(2)) if error else 1.0


def measure_skew(data: FederatedData, seed: int) -> Skew:
    """Measure how far the clients' labels and features differ (of the training samples)."""
    if not data.classes:
        raise FedtailorError("Advice needs classes: these targets are numbers.")
    parts = [data.train(client) for client in range(data.n_clients)]
    y = np.concatenate([labels.cpu().numpy() for _, labels in parts])
    client = np.repeat(np.arange(data.n_clients), [len(labels) for _, labels in parts])
    rng = numpy_stream(seed, "advice")
    by_chance = [_label_skew(y, rng.permutation(client)) for _ in range(PERMUTATIONS)]
    x = np.concatenate([_some_features(inputs.cpu().numpy().reshape(len(inputs), -1)) for inputs, _ in parts])
    return Skew(_label_skew(y, client), fmean(by_chance), _feature_skew(x, y, client))


def _label_skew(y: NDArray[Any], client: NDArray[Any]) -> float:
    """Compute the mean total variation distance between each client's classes and those of all samples."""
    counts = np.zeros((client.max() + 1, y.max() + 1))
    np.add.at(counts, (client, y), 1)
    shares, everywhere = counts / counts.sum(1, keepdims=True), counts.sum(0) / counts.sum()
    return float(np.abs(shares - everywhere).sum(1).mean() / 2)


def _some_features(x: NDArray[Any]) -> NDArray[Any]:
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
