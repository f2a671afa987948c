"""Is personalization needed here at all, and how much? Measured, not guessed.

First the partition itself: how far the clients' labels and features differ, beside what dealing the same samples at
random would give. Then a race: a shortlist from "one model for all" to "everybody alone" by successive halving on
validation accuracy within a time budget. The answer is the simplest that nothing beats by more than chance.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import erfc, sqrt
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.api import isolated
from fedtailor.data import FederatedData
from fedtailor.errors import FedtailorError
from fedtailor.experiment import Experiment, merged
from fedtailor.local.streams import numpy_stream
from fedtailor.server.loop import Federation
from fedtailor.simulation import Objects, deal_data, federation, prepare
from fedtailor.studies.measures import holm, wilcoxon
from fedtailor.transport import Bench

GLOBAL, TUNED, ALONE = "fedavg", "fedavg, fine-tuned", "local"
SHORTLIST = (GLOBAL, TUNED, ALONE, "fedper", "fedrod", "ditto", "apfl", "pgfed", "fedacs")
MARGIN = 0.01  # a gain of less than a point is not worth another method
LEVEL = 0.05
FEW = 10  # clients below which a test over clients can hardly find anything
PILOT, MOST = 2, 100  # rounds to measure a method's speed, and the most that one is given
PERMUTATIONS = 20
FEATURES = 256  # of which skew is measured, evenly chosen where there are more

Accuracies = dict[int, float]
Report = Callable[[str, int, int], None]  # what is going on: a title, rounds done, rounds to do


@dataclass
class Skew:
    """How far clients differ, and how far they would if the same samples were dealt at random."""

    label: float  # mean total variation distance between a client's classes and all
    label_by_chance: float
    feature: float  # share of the features' variance within a class that goes with the client, chance taken off


@dataclass
class Candidate:
    """A method in the race."""

    title: str
    experiment: Experiment
    run: Federation | None = None
    seconds: float = 0.0  # a round
    rounds: int = 0
    accuracy: Accuracies = field(default_factory=dict)  # on validation samples, by client
    held_out: dict[int, int] = field(default_factory=dict)  # how many those are

    @property
    def mean(self) -> float:
        return fmean(self.accuracy.values())

    def advance(self, rounds: int, report: Report) -> None:
        """Train until so many rounds are done, and measure."""
        assert self.run is not None
        begin, before = time.perf_counter(), self.rounds
        while self.rounds < rounds:
            self.rounds += 1
            self.run.round(self.rounds)
            report(self.title, self.rounds, rounds)
        self.seconds = (time.perf_counter() - begin) / max(1, rounds - before)
        measured = self.run.evaluator.evaluate(self.run.server, [])
        found = {client: metrics["validation"]["accuracy"] for client, metrics in measured.items()}
        self.accuracy = {client: value for client, value in found.items() if value is not None}
        bounds = self.run.data.bounds.tolist()
        self.held_out = {client: bounds[client][2] - bounds[client][1] for client in self.accuracy}
        if not self.accuracy:
            raise FedtailorError("There are no validation samples with classes to judge by: give --validation 0.2.")


@dataclass
class Advice:
    """What was found, and what follows from it."""

    skew: Skew
    candidates: list[Candidate]  # the best first
    chosen: str
    needed: bool  # is personalization worth it?
    gain: float  # of the best over the global model, in accuracy
    p: float  # that this is chance
    seconds: float


def advise(
    experiment: Experiment, budget: float = 120.0, shortlist: tuple[str, ...] = SHORTLIST, report: Report | None = None
) -> Advice:
    """Race the shortlist on the experiment's data and clients for about `budget` seconds, and say what to take."""
    begin = time.perf_counter()
    report = report or (lambda title, done, total: None)
    with isolated():
        data = deal_data(experiment)
        skew = measure_skew(data, experiment.seed)
        candidates = [Candidate(title, _experiment(experiment, title)) for title in (GLOBAL, *shortlist)]
        candidates = list({candidate.title: candidate for candidate in candidates}.values())
        benches = [prepare(candidate.experiment, Objects(data=data)) for candidate in candidates]
        try:
            for candidate, bench in zip(candidates, benches, strict=True):
                candidate.run = _started(candidate.experiment, bench)
                candidate.advance(PILOT, report)
            ranked = _race(candidates, budget - (time.perf_counter() - begin), report)
        finally:
            for candidate in candidates:
                if candidate.run is not None:
                    candidate.run.close()
    chosen, gain, p = _decide(ranked)
    return Advice(skew, ranked, chosen, chosen != GLOBAL, gain, p, time.perf_counter() - begin)


def _experiment(experiment: Experiment, title: str) -> Experiment:
    method, _, tuned = title.partition(", ")
    evaluation = {**experiment.evaluation.model_dump(), "model": "personal", "every": MOST + 1}
    evaluation["fine_tune"] = experiment.epochs if tuned else 0
    changes: dict[str, Any] = {"method": method, "parameters": {}, "rounds": MOST, "evaluation": evaluation}
    return Experiment(**merged(experiment.model_dump(), changes))


def _started(experiment: Experiment, bench: Bench) -> Federation:
    run = federation(experiment, bench, None)
    run.start()
    return run


def _race(candidates: list[Candidate], budget: float, report: Report) -> list[Candidate]:
    """Successive halving: all get r rounds, the better half 2r, the better quarter 4r. The global model, which is the
    question, stays to the end. The best first, those that went further before the others."""
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
    """The global model, unless the best of those that went furthest beats it by a point and by more than chance
    (corrected for the number of candidates): then the simplest that is within a point of the best."""
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
    """The p-value of a difference: over clients, or over validation samples where clients are too few for that."""
    if len(one.accuracy) >= FEW:
        p = wilcoxon(one.accuracy, other.accuracy)
        return 1.0 if p is None else p
    total = sum(one.held_out[client] for client in one.accuracy)
    rates = [sum(c.accuracy[i] * c.held_out[i] for i in c.accuracy) / total for c in (one, other)]
    error = sqrt(sum(rate * (1 - rate) for rate in rates) / total)
    return erfc(abs(rates[0] - rates[1]) / error / sqrt(2)) if error else 1.0


def measure_skew(data: FederatedData, seed: int) -> Skew:
    """The skew of a partition's labels and features (of the training samples)."""
    if not data.classes:
        raise FedtailorError("Advice needs classes: these targets are numbers.")
    parts = [data.train(client) for client in range(data.clients)]
    y = np.concatenate([labels.cpu().numpy() for _, labels in parts])
    client = np.repeat(np.arange(data.clients), [len(labels) for _, labels in parts])
    rng = numpy_stream(seed, "advice")
    by_chance = [_label_skew(y, rng.permutation(client)) for _ in range(PERMUTATIONS)]
    x = np.concatenate([_some_features(inputs.cpu().numpy().reshape(len(inputs), -1)) for inputs, _ in parts])
    return Skew(_label_skew(y, client), fmean(by_chance), _feature_skew(x, y, client))


def _label_skew(y: NDArray[Any], client: NDArray[Any]) -> float:
    counts = np.zeros((client.max() + 1, y.max() + 1))
    np.add.at(counts, (client, y), 1)
    shares, everywhere = counts / counts.sum(1, keepdims=True), counts.sum(0) / counts.sum()
    return float(np.abs(shares - everywhere).sum(1).mean() / 2)


def _some_features(x: NDArray[Any]) -> NDArray[Any]:
    return x[:, np.linspace(0, x.shape[1] - 1, min(FEATURES, x.shape[1])).astype(int)]


def _feature_skew(x: NDArray[Any], y: NDArray[Any], client: NDArray[Any]) -> float:
    """ε²: the share of the variance within classes that lies between clients, without what chance alone gives."""
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
