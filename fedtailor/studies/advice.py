"""Advice on which method to take, and whether personalization is needed at all: measured, not guessed.

First the partition itself: how far the clients' labels and features differ, beside a random partition of the same
samples. Then a race: a shortlist from "one model for all" to "everybody alone" by successive halving on the validation
metric within a time budget. The answer is the simplest method that nothing beats by more than chance, or that the
samples cannot tell.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedtailor._common.errors import FedtailorError
from fedtailor.data import FederatedData
from fedtailor.engines.preparation import Objects, Prepared, partition_data, prepare
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import Experiment, merged
from fedtailor.studies.measures import Values, holm
from fedtailor.studies.skew import Skew, measure_skew
from fedtailor.training.isolation import isolated
from fedtailor.training.metrics import ACCURACY, ON_ONE_SCALE, Metric
from fedtailor.training.predictions import outputs, sample_scores
from fedtailor.training.streams import numpy_stream

GLOBAL, TUNED, ALONE = "fedavg", "fedavg, fine-tuned", "local"
SHORTLIST = (GLOBAL, TUNED, ALONE, "fedper", "fedrod", "ditto", "apfl", "pgfed", "fedacs")
FOR_CLASSES = ("fedrod",)  # of these, those that need one class a sample
MARGIN = 0.01  # a gain of less than a point (or, of an error, 1 % of it) is not worth another method
LEVEL = 0.05
FEW = 10  # clients below which a test over clients can hardly find anything
DRAWS = 20_000  # of a test: its p-values are right to 0.002 where it matters, at the level
MORE = 0.4  # the share of validation samples that is asked for where nothing is decided
UNSEEN = 2  # samples that count as a difference nobody saw: without them, samples that all agree would prove equality
PILOT, MOST = 2, 100  # rounds to measure a method's speed, and the most that one is given

Report = Callable[[str, int, int], None]  # of progress: a title, rounds done, rounds to do


@dataclass(eq=False)
class Candidate:
    """A method in the race."""

    title: str
    experiment: Experiment
    simulation: Simulation | None = None
    seconds: float = 0.0  # a round
    rounds: int = 0
    values: Values = field(default_factory=dict)  # of the metric on validation samples, by client
    n_samples: dict[int, int] = field(default_factory=dict)  # how many validation samples those are
    parts: dict[int, NDArray[np.float64]] = field(default_factory=dict)  # of each sample, where clients are few
    metric: Metric = ACCURACY

    @property
    def mean(self) -> float:
        """The mean of the metric over clients."""
        return fmean(self.values.values())

    @property
    def by_samples(self) -> bool:
        """True if the metric is a mean over samples that were looked at one by one."""
        return bool(self.parts)

    def gain(self, base: "Candidate") -> float:
        """Compute by how much the mean is better than another candidate's."""
        return self.metric.gain(self.mean, base.mean)

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
        evaluated = loop.evaluator.evaluate(loop.server, loop.versions, [], self.simulation.transport)
        for client in evaluated.missing:  # candidates are compared on the same clients
            reply = evaluated.replies[client]
            raise FedtailorError(
                f"The evaluation of client {loop.names[client]} failed: {reply.error}."
            ) from reply.cause
        on_validation = {client: of_client["validation"] for client, of_client in evaluated.measured.items()}
        found = {client: self.metric.of(metrics) for client, metrics in on_validation.items()}
        self.values = {client: value for client, value in found.items() if value is not None}
        self.n_samples = {client: on_validation[client].n_samples for client in self.values}
        if not self.values:
            raise FedtailorError(
                f"No client has validation samples to compute the {self.metric.title} of: give --validation 0.2."
            )

    def look_closer(self) -> None:
        """Find each validation sample's part of the metric, if that is a mean over samples: whether it is right, say.

        This is more than the metrics that a site replies with: it is for whoever owns the simulation and its data.
        """
        assert self.simulation is not None
        for client in self.values:
            site = self.simulation.sites.site(client)
            x, y = site.data.validation
            scores = site.counted(outputs(site.terms.network, self.simulation.personal_model(client), x))
            parts = sample_scores(self.metric.name, scores, y, site.terms.multi_label)
            if parts is not None:
                self.parts[client] = parts


class Decision(NamedTuple):
    """The recommended candidate, and the gain that it rests on: of the best personal candidate over the global model,
    by the metric, for the better above 0."""

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
    gain: float  # of the best over the global model, by the metric; above 0, it is better
    p: float  # the p-value of this gain, corrected
    interval: tuple[float, float]  # the 95 % confidence interval of this gain
    seconds: float

    def __str__(self) -> str:
        return "\n".join(sentences(self))

    @property
    def decided(self) -> bool:
        """False if the validation samples cannot tell whether personal models gain a point."""
        return self.chosen is not None

    @property
    def needed(self) -> bool | None:
        """True if the recommended candidate is a personalized one; None if nothing is decided."""
        return self.chosen != GLOBAL if self.decided else None

    @property
    def metric(self) -> Metric:
        """The metric that decided."""
        return self.candidates[0].metric

    @property
    def by_samples(self) -> bool:
        """True if the test went by validation samples, as there are few clients."""
        return self.candidates[0].by_samples

    @property
    def margin(self) -> float:
        """The gain that is worth another method."""
        return margin(next(candidate for candidate in self.candidates if candidate.title == GLOBAL))

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
        data = partition_data(experiment, objects.data)
        if on_data:
            on_data(data)
        skew = measure_skew(data, experiment.seed)
        if data.targets != "classes" and shortlist == SHORTLIST:
            shortlist = tuple(title for title in shortlist if title not in FOR_CLASSES)
        candidates = [Candidate(title, _experiment(experiment, title)) for title in (GLOBAL, *shortlist)]
        candidates = list({candidate.title: candidate for candidate in candidates}.values())
        prepared = [prepare(candidate.experiment, replace(objects, data=data)) for candidate in candidates]
        try:
            for candidate, its in zip(candidates, prepared, strict=True):
                candidate.simulation, candidate.metric = _started(its), its.terms.metric
                candidate.advance(PILOT, report)
            ranked = _race(candidates, budget - (time.perf_counter() - begin), report)
            _judged_alike(_finalists(ranked))
            for candidate in _finalists(ranked):
                if len(candidate.values) < FEW:
                    candidate.look_closer()
            _check_finalists(_finalists(ranked))
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
        left.sort(key=_rank)
        ranked = left + sorted(out, key=lambda candidate: (-candidate.rounds, _rank(candidate)))
        rival = next((candidate for candidate in left if candidate.title != GLOBAL), None)
        half = left[: (len(left) + 1) // 2]
        left = [candidate for candidate in left if candidate in half or candidate.title == GLOBAL or candidate is rival]
    return ranked


def _rank(candidate: Candidate) -> float:
    """A number that is lower for a better candidate; one whose training diverged comes last."""
    return -candidate.metric.gain(candidate.mean, 0.0) if isfinite(candidate.mean) else inf


def margin(base: Candidate) -> float:
    """The gain over the global model that is worth another method: a point, or 1 % of an error."""
    on_one_scale = base.metric.percent or base.metric.name in ON_ONE_SCALE
    return MARGIN if on_one_scale else MARGIN * abs(base.mean)


def _finalists(ranked: list[Candidate]) -> list[Candidate]:
    """List the candidates that went furthest."""
    return [candidate for candidate in ranked if candidate.rounds == ranked[0].rounds]


def _judged_alike(finalists: list[Candidate]) -> None:
    """Leave the same clients to all of them: whether a metric is defined may depend on what a model predicts."""
    common = set.intersection(*(set(candidate.values) for candidate in finalists))
    for candidate in finalists:
        candidate.values = {client: value for client, value in candidate.values.items() if client in common}
    if not common:
        raise FedtailorError(f"No client has a {finalists[0].metric.title} with all methods: judge by another metric.")


def _check_finalists(finalists: list[Candidate]) -> None:
    """Refuse to decide what cannot be tested."""
    base = next(candidate for candidate in finalists if candidate.title == GLOBAL)
    if not isfinite(base.mean):
        raise FedtailorError(f"The training of {GLOBAL} diverged: lower --lr, or scale the data.")
    if len(base.values) < 2 and not base.by_samples:
        raise FedtailorError(
            f"With one client there is nothing to test by {base.metric.title}, which is no mean over samples: judge by "
            "accuracy, log_loss or mae."
        )


def _decide(ranked: list[Candidate], seed: int = 0) -> Decision:
    """Choose a candidate, if the samples can tell.

    It is a personal one if the best of those that went furthest beats the global model by a point and by more than
    chance (corrected for the number of candidates): the simplest that is within a point of the best. It is the global
    model if more than a point is ruled out, or if what is gained for certain is less. Otherwise, nothing is decided.
    """
    last = _finalists(ranked)
    base = next(candidate for candidate in last if candidate.title == GLOBAL)
    others = [candidate for candidate in last if candidate is not base and isfinite(candidate.mean)]
    if not others:
        return Decision(GLOBAL, GLOBAL, 0.0, 1.0, (0.0, 0.0))
    rng = numpy_stream(seed, "advice", "test")
    ps = holm([sign_flip(_differences(other, base), rng) for other in others])
    best, p = min(zip(others, ps, strict=True), key=lambda pair: _rank(pair[0]))
    gain, worth = best.gain(base), margin(base)
    found = best.title, gain, p, _interval(best, base, p)
    if gain > worth and p < LEVEL:
        good = [other.title for other in others if _rank(other) <= _rank(best) + worth]
        simplest = min(good, key=lambda title: SHORTLIST.index(title) if title in SHORTLIST else len(SHORTLIST))
        return Decision(simplest, *found)
    certain = p < LEVEL or found[-1][1] <= worth
    return Decision(GLOBAL if certain else None, *found)


def _differences(one: Candidate, base: Candidate) -> NDArray[np.float64]:
    """Split the gain of one candidate over another into the parts that it is the sum of.

    They are the clients' parts, (a_i - b_i) / N. Where clients are too few for a test and the metric is a mean over
    samples, they are those of the validation samples, on which both were measured: of the accuracy, ±1 / (N n_i) where
    only one of the two is right, and 0 elsewhere. So a test of them weighs as the mean over clients does.
    """
    clients, sign = sorted(one.values), one.metric.gain(1.0, 0.0)
    if not one.by_samples:
        return sign * np.array([one.values[i] - base.values[i] for i in clients]) / len(clients)
    parts = [(one.parts[i] - base.parts[i]) / len(one.parts[i]) for i in clients]
    return sign * np.concatenate(parts) / len(clients)


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
    """Compute a 95 % confidence interval of the gain of one candidate over another.

    It is Student's, of the differences that the test takes and, of the accuracy, two samples (`UNSEEN`) more on which
    the candidates differ. It has zero in it if and only if the test does not exclude zero.
    """
    from scipy import stats

    parts = _differences(one, base)
    gain, total = float(parts.sum()), sum(one.n_samples.values())
    unseen = UNSEEN * sum(1 / one.n_samples[i] for i in one.values) / len(one.values) ** 2 / total
    spread = len(parts) * float(np.var(parts, ddof=1)) if len(parts) > 1 else 1.0
    by_accuracy = one.metric == ACCURACY
    half = float(stats.t.ppf(1 - LEVEL / 2, max(1, len(parts) - 1))) * sqrt(spread + (unseen if by_accuracy else 0.0))
    low, high = (max(gain - half, -1.0), min(gain + half, 1.0)) if by_accuracy else (gain - half, gain + half)
    if p >= LEVEL:
        return min(low, 0.0), max(high, 0.0)
    return (max(low, 0.0), high) if gain > 0 else (low, min(high, 0.0))


# --- in plain words ---


def sentences(advice: Advice) -> list[str]:
    """Say in plain words what was measured, what is recommended and why."""
    found, metric = advice.skew.sentences(), advice.metric
    low, high = (_points(metric, end) for end in advice.interval)
    unit = "points" if metric.percent else f"in {metric.title}"
    gain = (
        f"{_points(metric, advice.gain)} {unit} against one model for all, 95 % interval {low} … {high}, "
        f"p = {advice.p:.2g}"
    )
    worth = "a point" if metric.percent else f"{advice.margin:.3g}"
    if not advice.by_samples and metric.name != "accuracy":
        clients = len(advice.candidates[0].values)
        found.append(f"The test is over {clients} clients: how sure the {metric.title} of each is does not count.")
    if not advice.decided:
        leader = advice.best if advice.gain > 0 else GLOBAL
        share = advice.candidates[0].experiment.validation
        more = f"more validation samples (--validation {MORE:g})" if share < MORE else "more samples"
        return [
            *found,
            f"Not decided: can't tell with {advice.n_samples:,} validation samples whether personal models pay. The "
            f"best of them is {advice.best} ({gain}). Best so far: {leader}. Give {more} or more clients.",
        ]
    if advice.chosen == GLOBAL:
        why = f"No personal model is better by {worth}. The best is {advice.best} ({gain})."
        if advice.best == GLOBAL:
            why = "There was no personal model in the race."
        return [*found, f"Recommended: one global model ({GLOBAL}). {why}"]
    if advice.chosen == ALONE:
        why = f"Models that each client trains alone are as good as any ({gain}): learning together adds nothing here."
    elif advice.chosen == TUNED:
        why = f"The global model, fine-tuned by each client, is as good as any personalized method ({gain})."
    else:
        why = f"Personal models pay ({gain})."
    return [*found, f"Recommended: a personal model for each client, by {advice.chosen}. {why}"]


def _points(metric: Metric, gain: float) -> str:
    """Format a gain: in points, or in the metric's own unit."""
    return f"{100 * gain:+.1f}" if metric.percent else metric.text(gain, "+")
