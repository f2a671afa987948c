"""Advice on which method to take, and whether personalization is needed at all: measured, not guessed.

First the partition itself: how far the clients' labels and features differ, beside a random partition of the same
samples. Then a race: a shortlist from "one model for all" to "everybody alone" by successive halving on validation
accuracy within a time budget. The answer is the simplest method that nothing beats by more than chance, or that the
samples cannot tell.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedtailor.data import FederatedData
from fedtailor.errors import FedtailorError
from fedtailor.experiment import Experiment, merged
from fedtailor.local.inputs import Held, tensors
from fedtailor.local.isolation import isolated
from fedtailor.local.metrics import outputs
from fedtailor.local.streams import numpy_stream
from fedtailor.simulation import Objects, Prepared, Simulation, partition_data, prepare
from fedtailor.studies.measures import Accuracies, holm

GLOBAL, TUNED, ALONE = "fedavg", "fedavg, fine-tuned", "local"
SHORTLIST = (GLOBAL, TUNED, ALONE, "fedper", "fedrod", "ditto", "apfl", "pgfed", "fedacs")
MARGIN = 0.01  # a gain of less than a point is not worth another method
LEVEL = 0.05
FEW = 10  # clients below which a test over clients can hardly find anything
DRAWS = 20_000  # of a test: its p-values are right to 0.002 where it matters, at the level
UNSEEN = 2  # samples that count as a difference nobody saw: without them, samples that all agree would prove equality
PILOT, MOST = 2, 100  # rounds to measure a method's speed, and the most that one is given
PERMUTATIONS = 20
PIECE = 1024  # samples that are read together
FEATURES = 256  # of which skew is measured, evenly chosen where there are more

Report = Callable[[str, int, int], None]  # of progress: a title, rounds done, rounds to do


@dataclass
class Skew:
    """The differences between clients, and those in a random partition of the same samples."""

    label: float  # mean total variation distance between a client's classes and all
    label_by_chance: float  # the same in a random partition
    feature: float  # share of the features' variance within a class that goes with the client, chance taken off


@dataclass(eq=False)
class Candidate:
    """A method in the race."""

    title: str
    experiment: Experiment
    simulation: Simulation | None = None
    seconds: float = 0.0  # a round
    rounds: int = 0
    accuracy: Accuracies = field(default_factory=dict)  # on validation samples, by client
    n_samples: dict[int, int] = field(default_factory=dict)  # how many validation samples those are
    hits: dict[int, NDArray[np.bool_]] = field(default_factory=dict)  # which of them are right, where clients are few

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

    def look_closer(self) -> None:
        """Find out which validation samples each client's model has right.

        This is more than the metrics that a site replies with: it is for whoever owns the simulation and its data.
        """
        assert self.simulation is not None
        for client in self.accuracy:
            site = self.simulation.sites.site(client)
            x, y = site.data.validation
            scores = outputs(site.terms.network, self.simulation.personal_model(client), x)
            self.hits[client] = (scores[:, : site.n_outputs].argmax(1) == y).cpu().numpy()


class Decision(NamedTuple):
    """The recommended candidate, and the gain that it rests on: of the best personal candidate over the global model,
    in accuracy."""

    chosen: str | None
    best: str
    gain: float
    p: float
    interval: tuple[float, float]


@dataclass
class Advice:
    """The measurements, and the recommendation that follows from them."""

    skew: Skew
    candidates: list[Candidate]  # the best first
    chosen: str | None  # the title of the recommended one; None if the samples cannot tell
    best: str  # the title of the best personal one
    gain: float  # of the best over the global model, in accuracy
    p: float  # the p-value of this gain, corrected
    interval: tuple[float, float]  # the 95 % confidence interval of this gain
    seconds: float

    @property
    def decided(self) -> bool:
        """False if the validation samples cannot tell whether personal models gain a point."""
        return self.chosen is not None

    @property
    def needed(self) -> bool | None:
        """True if the recommended candidate is a personalized one; None if nothing is decided."""
        return self.chosen != GLOBAL if self.decided else None

    @property
    def n_samples(self) -> int:
        """The number of validation samples of all clients."""
        return sum(self.candidates[0].n_samples.values())


def advise(
    experiment: Experiment,
    budget: float = 90.0,
    shortlist: tuple[str, ...] = SHORTLIST,
    report: Report | None = None,
    objects: Objects | None = None,
    on_data: Callable[[FederatedData], None] | None = None,
) -> Advice:
    """Race the shortlist on the experiment's data and clients for about `budget` seconds, and recommend a method."""
    begin = time.perf_counter()
    report = report or (lambda title, done, total: None)
    objects = objects or Objects()
    with isolated():
        given = objects.data
        data = given if isinstance(given, FederatedData) else partition_data(experiment, given)
        if on_data:
            on_data(data)
        skew = measure_skew(data, experiment.seed)
        candidates = [Candidate(title, _experiment(experiment, title)) for title in (GLOBAL, *shortlist)]
        candidates = list({candidate.title: candidate for candidate in candidates}.values())
        prepared = [prepare(candidate.experiment, replace(objects, data=data)) for candidate in candidates]
        try:
            for candidate, its in zip(candidates, prepared, strict=True):
                candidate.simulation = _started(its)
                candidate.advance(PILOT, report)
            ranked = _race(candidates, budget - (time.perf_counter() - begin), report)
            for candidate in _finalists(ranked):
                if len(candidate.accuracy) < FEW:
                    candidate.look_closer()
        finally:
            for candidate in candidates:
                if candidate.simulation is not None:
                    candidate.simulation.close()
    return Advice(skew, ranked, *_decide(ranked, experiment.seed), seconds=time.perf_counter() - begin)


def _experiment(experiment: Experiment, title: str) -> Experiment:
    """Make the experiment of a candidate; "fedavg, fine-tuned" is FedAvg, fine-tuned before it is evaluated."""
    method, _, tuned = title.partition(", ")
    evaluation = {**experiment.evaluation.model_dump(), "model": "personal", "every": MOST + 1}
    evaluation["fine_tune"] = (experiment.evaluation.fine_tune or experiment.epochs) if tuned else 0
    changes: dict[str, Any] = {"method": method, "parameters": {}, "rounds": MOST, "evaluation": evaluation}
    return Experiment(**merged(experiment.model_dump(), changes))


def _started(prepared: Prepared) -> Simulation:
    simulation = Simulation(prepared)
    simulation.start()
    return simulation


def _race(candidates: list[Candidate], budget: float, report: Report) -> list[Candidate]:
    """Race by successive halving: all get r rounds, the better half 2r, the better quarter 4r. The global model, which
    the others are judged against, stays to the end, and so does the best of the others. Return the best first, those
    that went further before the others."""
    cost = sum(candidate.seconds for candidate in candidates)
    rounds = int(max(PILOT + 1, min(MOST / 4, budget / (2.5 * cost))))
    left = list(candidates)
    for rung in (1, 2, 4):
        out = [candidate for candidate in candidates if candidate not in left]
        for candidate in left:
            candidate.advance(rung * rounds, report)
        left.sort(key=lambda candidate: -candidate.mean)
        ranked = left + sorted(out, key=lambda candidate: (-candidate.rounds, -candidate.mean))
        rival = next((candidate for candidate in left if candidate.title != GLOBAL), None)
        half = left[: (len(left) + 1) // 2]
        left = [candidate for candidate in left if candidate in half or candidate.title == GLOBAL or candidate is rival]
    return ranked


def _finalists(ranked: list[Candidate]) -> list[Candidate]:
    """List the candidates that went furthest."""
    return [candidate for candidate in ranked if candidate.rounds == ranked[0].rounds]


def _decide(ranked: list[Candidate], seed: int = 0) -> Decision:
    """Choose a candidate, if the samples can tell.

    It is a personal one if the best of those that went furthest beats the global model by a point and by more than
    chance (corrected for the number of candidates): the simplest that is within a point of the best. It is the global
    model if more than a point is ruled out, or if what is gained for certain is less. Otherwise, nothing is decided.
    """
    last = _finalists(ranked)
    base = next(candidate for candidate in last if candidate.title == GLOBAL)
    others = [candidate for candidate in last if candidate is not base]
    if not others:
        return Decision(GLOBAL, GLOBAL, 0.0, 1.0, (0.0, 0.0))
    rng = numpy_stream(seed, "advice", "test")
    ps = holm([sign_flip(_differences(other, base), rng) for other in others])
    best, p = max(zip(others, ps, strict=True), key=lambda pair: pair[0].mean)
    gain = best.mean - base.mean
    found = best.title, gain, p, _interval(best, base, p)
    if gain > MARGIN and p < LEVEL:
        good = [other.title for other in others if other.mean >= best.mean - MARGIN]
        simplest = min(good, key=lambda title: SHORTLIST.index(title) if title in SHORTLIST else len(SHORTLIST))
        return Decision(simplest, *found)
    certain = p < LEVEL or found[-1][1] <= MARGIN
    return Decision(GLOBAL if certain else None, *found)


def _differences(one: Candidate, base: Candidate) -> NDArray[np.float64]:
    """Split the difference between two candidates' mean accuracies into the parts that it is the sum of.

    They are the clients' parts, (a_i - b_i) / N. Where clients are too few for a test, they are those of the validation
    samples, on which both were measured: ±1 / (N n_i) where only one of the two is right, and 0 elsewhere. So a test of
    them weighs as the mean over clients does.
    """
    clients = sorted(one.accuracy)
    if not one.hits:
        return np.array([one.accuracy[i] - base.accuracy[i] for i in clients]) / len(clients)
    parts = [(one.hits[i].astype(float) - base.hits[i]) / len(one.hits[i]) for i in clients]
    return np.concatenate(parts) / len(clients)


def sign_flip(differences: NDArray[np.float64], rng: np.random.Generator, draws: int = DRAWS) -> float:
    """Compute the two-sided p-value of the sum of paired differences by Fisher's randomization test.

    If two models are equally good, each difference might as well have the other sign. So p is the share of random signs
    that give a sum as large as the observed one (which counts as one of the draws: the test keeps its level with any
    number of them). No distribution is assumed, and the sum is the gain that is shown, with its weights. With one
    client it is the exact test of McNemar, up to the draws.
    """
    differences = differences.round(12)  # equal ones may differ in the last bit
    sums = np.zeros(draws)
    for size, count in zip(*np.unique(np.abs(differences), return_counts=True), strict=True):
        sums += size * (2 * rng.binomial(count, 0.5, draws) - count)
    as_large = np.abs(sums) >= abs(differences.sum()) - 1e-9
    return float((1 + as_large.sum()) / (1 + draws))


def _interval(one: Candidate, base: Candidate, p: float) -> tuple[float, float]:
    """Compute a 95 % confidence interval of the difference between two candidates' mean accuracies.

    It is Student's, of the differences that the test takes, and two samples (`UNSEEN`) more on which the candidates
    differ. It has zero in it if and only if the test does not exclude zero.
    """
    from scipy import stats

    parts = _differences(one, base)
    gain, total = float(parts.sum()), sum(one.n_samples.values())
    unseen = UNSEEN * sum(1 / one.n_samples[i] for i in one.accuracy) / len(one.accuracy) ** 2 / total
    spread = len(parts) * float(np.var(parts, ddof=1)) if len(parts) > 1 else 1.0
    half = float(stats.t.ppf(1 - LEVEL / 2, max(1, len(parts) - 1))) * sqrt(spread + unseen)
    low, high = max(gain - half, -1.0), min(gain + half, 1.0)
    if p >= LEVEL:
        return min(low, 0.0), max(high, 0.0)
    return (max(low, 0.0), high) if gain > 0 else (low, min(high, 0.0))


def measure_skew(data: FederatedData, seed: int) -> Skew:
    """Measure how far the clients' labels and features differ (of the training samples)."""
    if not data.classes:
        raise FedtailorError("Advice needs classes: these targets are numbers.")
    parts = [data.train(client) for client in range(data.n_clients)]
    y = np.concatenate([labels.cpu().numpy() for _, labels in parts])
    client = np.repeat(np.arange(data.n_clients), [len(labels) for _, labels in parts])
    rng = numpy_stream(seed, "advice")
    by_chance = [_label_skew(y, rng.permutation(client)) for _ in range(PERMUTATIONS)]
    x = np.concatenate([_some_features(piece) for inputs, _ in parts for piece in inputs.split(PIECE)])
    return Skew(_label_skew(y, client), fmean(by_chance), _feature_skew(x, y, client))


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
