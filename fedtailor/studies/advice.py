"""Advice on which method to take, and whether personalization is needed at all: measured, not guessed.

First the partition itself: how far the clients' labels and features differ, beside a random partition of the same
samples. Then a race: a shortlist from "one model for all" to "everybody alone" by successive halving on the validation
metric within a time budget. The answer is the simplest method that nothing beats by more than chance, or that the
samples cannot tell, or that the race was too short.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedtailor._common.errors import FedtailorError
from fedtailor.data import FederatedData
from fedtailor.engines.preparation import Objects, Prepared, partition_data, prepare
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import Experiment, merged
from fedtailor.studies.candidate import Candidate, Report
from fedtailor.studies.skew import Skew, measure_skew
from fedtailor.training.isolation import isolated
from fedtailor.training.metrics import ACCURACY, ON_ONE_SCALE, Metric
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
PILOT, MOST = 2, 100  # rounds to measure a method's speed, and the most that one is given: those of a run, too
RUNGS = (1, 2, 4)  # of the race: times the rounds that all candidates are given
SHARE = 2.5  # rounds of all candidates together that a race takes for each of the first rung: 2, and what is measured


class Decision(NamedTuple):
    """The recommended candidate, and the gain that it rests on: of the best personal candidate over the global model,
    by the metric, for the better above 0."""

    chosen: str | None
    best: str
    gain: float
    p: float
    interval: tuple[float, float]
    rising: dict[str, float]  # the finalists that still learn, and their gain in the last half of the rounds
    unfinished: bool  # True if to go on may change the answer


@dataclass
class Advice:
    """The measurements, and the recommendation that follows from them."""

    skew: Skew
    candidates: list[Candidate]  # the best first
    chosen: str | None  # the title of the recommended one; None if the samples cannot tell or the race was too short
    best: str  # the title of the best personal one
    gain: float  # of the best over the global model, by the metric; above 0, it is better
    p: float  # the p-value of this gain, corrected for the number of candidates
    interval: tuple[float, float]  # the 95 % confidence interval of this gain, corrected likewise
    rising: dict[str, float]  # the finalists that still learn, and their gain in the last half of the rounds
    unfinished: bool  # True if nothing is decided as to go on may change the answer
    budget: int | None  # the seconds of the race that would tell then, about
    seconds: float

    def __str__(self) -> str:
        return "\n".join(sentences(self))

    @property
    def decided(self) -> bool:
        """False if the race was too short or its samples cannot tell whether personal models gain a point."""
        return self.chosen is not None

    @property
    def few_samples(self) -> bool:
        """True if the validation samples alone would not tell either, were the training finished."""
        return self.p >= LEVEL and self.interval[1] > self.margin

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
        data = partition_data(experiment, objects.data, partition=objects.partition)
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
                _check_base(candidate)
            before, of_all = time.perf_counter() - begin, sum(candidate.seconds for candidate in candidates)
            ranked = _race(candidates, budget - before, report)
            _judged_alike(_finalists(ranked))
            for candidate in _finalists(ranked):
                if len(candidate.values) < FEW:
                    candidate.look_closer()
            _check_finalists(_finalists(ranked))
        finally:
            for candidate in candidates:
                if candidate.simulation is not None:
                    candidate.simulation.close()
    decision = _decide(ranked, experiment.seed)
    longer = ceil(before + _budget(of_all)) if decision.unfinished else None
    return Advice(skew, ranked, *decision, budget=longer, seconds=time.perf_counter() - begin)


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
    rounds = _first_rung(budget, sum(candidate.seconds for candidate in candidates))
    left = list(candidates)
    for rung in RUNGS:
        out = [candidate for candidate in candidates if candidate not in left]
        for candidate in left:
            candidate.advance(rung * rounds, report, along=rung == RUNGS[-1])
            _check_base(candidate)
        left.sort(key=_rank)
        ranked = left + sorted(out, key=lambda candidate: (-candidate.rounds, _rank(candidate)))
        rival = next((candidate for candidate in left if candidate.title != GLOBAL), None)
        half = left[: (len(left) + 1) // 2]
        left = [candidate for candidate in left if candidate in half or candidate.title == GLOBAL or candidate is rival]
    return ranked


def _first_rung(budget: float, seconds: float) -> int:
    """Compute the rounds of all candidates that fit into a budget, if one round of all takes so many seconds."""
    return int(max(PILOT + 1, min(MOST / RUNGS[-1], budget / (SHARE * seconds))))


def _budget(seconds: float) -> float:
    """Compute the inverse for the longest race, twofold: should the machine not be slower then, the race ends early."""
    return 2 * SHARE * seconds * MOST / RUNGS[-1]


def _rank(candidate: Candidate) -> float:
    """A number that is lower for a better candidate; one whose training diverged comes last."""
    return -candidate.metric.gain(candidate.mean, 0.0) if isfinite(candidate.mean) else inf


def margin(base: Candidate) -> float:
    """The gain over the global model that is worth another method: a point, or 1 % of an error."""
    on_one_scale = base.metric.percent or base.metric.name in ON_ONE_SCALE
    return MARGIN if on_one_scale else MARGIN * abs(base.mean)


def _finalists(ranked: list[Candidate]) -> list[Candidate]:
    """List the candidates that went furthest."""
    most = max(candidate.rounds for candidate in ranked if not candidate.failed)
    return [candidate for candidate in ranked if candidate.rounds == most and not candidate.failed]


def _judged_alike(finalists: list[Candidate]) -> None:
    """Leave the same clients to all of them: whether a metric is defined may depend on what a model predicts."""
    common = set.intersection(*(set(candidate.values) for candidate in finalists))
    for candidate in finalists:
        candidate.values = {client: value for client, value in candidate.values.items() if client in common}
    if not common:
        raise FedtailorError(f"No client has a {finalists[0].metric.title} with all methods: judge by another metric.")


def _check_base(candidate: Candidate) -> None:
    """Refuse to go on without the global model, which the others are judged against."""
    if candidate.failed and candidate.title == GLOBAL:
        raise FedtailorError(candidate.failed)


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


def _decide(ranked: list[Candidate], seed: int = 0, draws: int = DRAWS) -> Decision:
    """Choose a candidate, if the samples can tell and the race was long enough.

    It is a personal one if the best of those that went furthest beats the global model by a point and by more than
    chance: the simplest that is within a point of the best. It is the global model if more than a point is ruled out,
    or if what is gained for certain is less. Otherwise, nothing is decided. The best is the best of all personal
    candidates in the race, so its p-value and interval are corrected for their number (Bonferroni).
    """
    last = _finalists(ranked)
    base = next(candidate for candidate in last if candidate.title == GLOBAL)
    others = [candidate for candidate in last if candidate is not base and isfinite(candidate.mean)]
    if not others:
        return Decision(GLOBAL, GLOBAL, 0.0, 1.0, (0.0, 0.0), {}, False)
    best, number = min(others, key=_rank), len(ranked) - 1
    p = sign_flip(_differences(best, base), numpy_stream(seed, "advice", "test"), draws)
    gain, worth = best.gain(base), margin(base)
    found = Decision(None, best.title, gain, min(1.0, number * p), _interval(best, base, p, number), {}, False)
    if gain > worth and found.p < LEVEL:
        good = [other.title for other in others if _rank(other) <= _rank(best) + worth]
        simplest = min(good, key=lambda title: SHORTLIST.index(title) if title in SHORTLIST else len(SHORTLIST))
        found = found._replace(chosen=simplest)
    elif found.p < LEVEL or found.interval[1] <= worth:
        found = found._replace(chosen=GLOBAL)
    return _if_learned(found, base, others)


def _if_learned(found: Decision, base: Candidate, others: list[Candidate]) -> Decision:
    """Take a choice back if it rests on unfinished training.

    That is so if a finalist still rises by more than the margin and, at its pace for as many rounds again, would move
    by more than the lead: the distance of the gain from the margin or, of a personal candidate that was not chosen,
    what it lacks to get ahead of the chosen one by the margin, if that goes on likewise. After as many rounds as a run
    that is recommended has, the answer is the one for such runs, and stands.
    """
    worth = margin(base)
    rising = {one.title: rise for one in [base, *others] if (rise := one.rise()) > worth}
    chosen = next((one for one in others if one.title == found.chosen), None)
    doubtful = False
    for one in [base, *others]:
        lead = abs(found.gain - worth)
        if chosen and one not in (base, chosen):
            lead = min(lead, worth - one.gain(chosen) + 2 * max(0.0, chosen.rise()))
        doubtful |= one.title in rising and 2 * rising[one.title] > lead
    unfinished = doubtful and base.rounds < MOST
    return found._replace(chosen=None if unfinished else found.chosen, rising=rising, unfinished=unfinished)


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


def _interval(one: Candidate, base: Candidate, p: float, number: int = 1) -> tuple[float, float]:
    """Compute a 95 % confidence interval of the gain of one candidate over another, given the p-value of its test.

    It is Student's, of the differences that the test takes and, of the accuracy, two samples (`UNSEEN`) more on which
    the candidates differ. For the best of a number of candidates its level is Bonferroni's, as it is for p. It excludes
    zero if and only if the corrected p is below the level: where Student and the test do not agree, the test's p gives
    the width.
    """
    from scipy import stats

    parts, level = _differences(one, base), LEVEL / number
    gain, total = float(parts.sum()), sum(one.n_samples.values())
    unseen = UNSEEN * sum(1 / one.n_samples[i] for i in one.values) / len(one.values) ** 2 / total
    spread = len(parts) * float(np.var(parts, ddof=1)) if len(parts) > 1 else 1.0
    by_accuracy = one.metric == ACCURACY
    quantile = stats.t(max(1, len(parts) - 1)).isf
    half = float(quantile(level / 2)) * sqrt(spread + (unseen if by_accuracy else 0.0))
    if (p < level) != (half < abs(gain)):
        half = abs(gain) * float(quantile(level / 2) / quantile(p / 2)) if p < level else abs(gain)
    low, high = gain - half, gain + half
    return (max(low, -1.0), min(high, 1.0)) if by_accuracy else (low, high)


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
    found += [f"{one.title} left the race. {one.failed}" for one in advice.candidates if one.failed]
    if not advice.by_samples and metric.name != "accuracy":
        clients = len(advice.candidates[0].values)
        found.append(f"The test is over {clients} clients: how sure the {metric.title} of each is does not count.")
    if not advice.decided:
        return [*found, _undecided(advice, gain)]
    if advice.rising:
        pace = "To go on at this pace would not change the answer."
        if advice.candidates[0].rounds >= MOST:
            pace = f"The answer is for runs of {MOST} rounds."
        found.append(f"Still learning: {_rises(advice)}. {pace}")
    if advice.chosen == GLOBAL:
        why = f"No personal model is better by {worth}. The best is {advice.best} ({gain})."
        if advice.best == GLOBAL:
            why = "There was no personal model in the race."
        return [*found, f"Recommended: one global model ({GLOBAL}). {why}"]
    if advice.best != advice.chosen:  # whose gain it is
        gain = f"{advice.best} {gain}"
    if advice.chosen == ALONE:
        why = f"Models that each client trains alone are as good as any ({gain}): learning together adds nothing here."
    elif advice.chosen == TUNED:
        why = f"The global model, fine-tuned by each client, is as good as any personalized method ({gain})."
    elif advice.chosen == advice.best:
        why = f"Personal models pay ({gain})."
    else:
        why = f"Personal models pay ({gain}), and {advice.chosen} is the simplest within {worth} of the best."
    return [*found, f"Recommended: a personal model for each client, by {advice.chosen}. {why}"]


def _undecided(advice: Advice, gain: str) -> str:
    """Say why nothing is decided, and what would help."""
    leader, rounds = advice.best if advice.gain > 0 else GLOBAL, advice.candidates[0].rounds
    best = f"The best personal candidate is {advice.best} ({gain}). Best so far: {leader}."
    share = advice.candidates[0].experiment.validation
    more = f"more validation samples (--validation {MORE:g})" if share < MORE else "more samples"
    if not advice.unfinished:
        return (
            f"Not decided: can't tell with {advice.n_samples:,} validation samples whether personal models pay. {best} "
            f"Give {more} or more clients."
        )
    samples = f", with {more} or more clients" if advice.few_samples else ""
    return (
        f"Not decided: still learning after {rounds} rounds ({_rises(advice)}). A budget of {advice.budget} seconds "
        f"({MOST} rounds) would tell{samples}. {best}"
    )


def _rises(advice: Advice) -> str:
    """List the finalists that still learn."""
    metric, rounds = advice.metric, advice.candidates[0].rounds
    unit = " points" if metric.percent else f" in {metric.title}"
    each = [f"{title} {_points(metric, rise)}" for title, rise in advice.rising.items()]
    return f"{', '.join(each)}{unit} in the last {rounds // 2} rounds"


def _points(metric: Metric, gain: float) -> str:
    """Format a gain: in points, or in the metric's own unit."""
    return f"{100 * gain:+.1f}" if metric.percent else metric.text(gain, "+")
