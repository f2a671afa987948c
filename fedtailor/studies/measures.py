"""Statistics of finished runs for tables and reports, beside the metrics that a run records itself."""

from collections.abc import Mapping, Sequence
from operator import truediv
from statistics import fmean
from typing import NamedTuple, TypeVar

from fedtailor.engines.result import RunResult
from fedtailor.server.evaluation import averages
from fedtailor.server.records import Averages, Plain, counted_classes
from fedtailor.training.metrics import Metric

Values = dict[int, float]  # by client
Client = TypeVar("Client", int, str)  # a number, or a name
LEVEL = 0.05  # a corrected p-value below it is a significant difference


def client_values(
    result: RunResult, metric: Metric | None = None, hostile: bool = False, split: str = "test"
) -> Values:
    """Return each honest client's test value of the metric that decides, or of another one, in the round that counts;
    or each `hostile` one's; or those of another `split`. Clients without one, as they have no such samples, are left
    out."""
    metric, found = metric or result.metric, dict[int, list[float]]()
    for results in result.counted:
        for client, measured in results.items():
            known = split in measured and (client in result.hostile) == hostile
            if known and (value := metric.of(measured[split])) is not None:
                found.setdefault(client, []).append(value)
    return {client: fmean(values) for client, values in sorted(found.items())}


def individual_gains(result: RunResult, base: RunResult) -> Values:
    """Return each client's gain over another run on the same clients: above 0, it is better off."""
    mine, theirs = client_values(result), client_values(base)
    return {client: result.metric.gain(value, theirs[client]) for client, value in mine.items() if client in theirs}


def paired(one: Sequence[RunResult], other: Sequence[RunResult]) -> tuple[Values, Values]:
    """Average each client's value in two lines over the seeds that both have."""
    theirs = {result.experiment.seed: client_values(result) for result in other}
    pairs: dict[int, list[tuple[float, float]]] = {}
    for result in one:
        values = theirs.get(result.experiment.seed, {})
        for client, value in client_values(result).items():
            if client in values:
                pairs.setdefault(client, []).append((value, values[client]))
    first = {client: fmean(a for a, _ in both) for client, both in pairs.items()}
    return first, {client: fmean(b for _, b in both) for client, both in pairs.items()}


def majority_counts(partition: Plain) -> list[tuple[int, int]] | None:
    """Count each client's test samples of its most frequent training class, and all its test samples. None without
    classes, with several labels a sample, or if the sites do not tell their classes."""
    train, test = partition["train"], partition["test"]
    if not counted_classes(partition) or [sum(row) for row in train] != partition["n_train"]:
        return None
    return [(tested[trained.index(max(trained))], sum(tested)) for trained, tested in zip(train, test, strict=True)]


def majority_baseline(result: RunResult) -> float | None:
    """Compute the accuracy of predicting each client's most frequent training class, whatever the sample: over the
    clients and rounds that count, averaged as the result is. None if it is not known."""
    counts = majority_counts(result.partition)
    if counts is None:
        return None
    found, by_samples = [], result.experiment.evaluation.average == "sample"
    for results in result.counted:
        tested = [counts[c] for c in results if c not in result.hostile and counts[c][1]]
        if tested:
            right, n_samples = zip(*tested, strict=True)
            found.append(sum(right) / sum(n_samples) if by_samples else fmean(map(truediv, right, n_samples)))
    return fmean(found) if found else None


def samples_per_second(result: RunResult) -> float | None:
    """Count the training samples that went through the local epochs (or steps), per second of all rounds."""
    experiment = result.experiment
    sizes = result.partition["n_train"]
    if experiment.steps is not None:
        batches = [size if experiment.batch == "full" else min(size, experiment.batch) for size in sizes]
        passed = [experiment.steps * batch for batch in batches]
    else:
        passed = [experiment.epochs * size for size in sizes]
    seconds = sum(record.seconds for record in result.rounds)
    total = sum(passed[client] for record in result.rounds for client in record.participants)
    return total / seconds if seconds else None


def passes(result: RunResult) -> float | None:
    """Count how often a participant computes the gradient of each of its training samples in a round, on average: the
    local epochs, and whatever a method does beside them. None if nobody took part."""
    sizes = result.partition["n_train"]
    seen = sum(sizes[c] for record in result.rounds for c in record.participants if c not in record.failed)
    return sum(record.differentiated for record in result.rounds) / seen if seen else None


class Cost(NamedTuple):
    """The cost of a run up to the end of a round; virtual seconds only where clients have a system."""

    rounds: int
    bytes: int
    clock: float | None


def until(result: RunResult, target: float) -> Cost | None:
    """Find the first round in which the clients called so far reach the target on average, and what the run has cost
    until its end; None if there is none.

    Clients that were never called do not count: some methods adapt a model to their data, others give them one that is
    not trained. So the same clients count for all methods.
    """
    sent, called, protocol, metric = 0, set[int](), result.experiment.evaluation, result.metric
    for record, clients in zip(result.rounds, result.clients, strict=False):
        sent += record.bytes
        called |= set(record.participants) - set(record.failed)
        value = metric.of(record)
        honest = {client: measured for client, measured in clients.results.items() if client not in result.hostile}
        if protocol.of_the_same and not honest.keys() <= called:
            counted = {client: measured for client, measured in honest.items() if client in called}
            value = metric.of(averages(counted, protocol.average, metric))
        if value is not None and metric.reaches(value, target):
            return Cost(record.round, sent, record.clock)
    return None


def wilcoxon(one: Mapping[Client, float], other: Mapping[Client, float]) -> float | None:
    """Compute the two-sided p-value of Wilcoxon's signed-rank test over the clients that both have; None without any.

    Clients without a difference do not count (Wilcoxon's rule); if no client has one, p is 1.
    """
    from scipy import stats

    both = sorted(one.keys() & other.keys())
    if not both:
        return None
    # Rounded, as equal values may differ in the last bit after averaging, and would not be ties.
    differences = [round(one[client] - other[client], 12) for client in both]
    moved = [difference for difference in differences if difference]
    return float(stats.wilcoxon(moved).pvalue) if moved else 1.0


def holm(ps: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's step-down rule: the chance of any false finding among them stays
    below the level."""
    corrected, least = [0.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda place: ps[place])):
        least = max(least, min(1.0, (len(ps) - rank) * ps[place]))
        corrected[place] = least
    return corrected


def validation_score(record: Averages, metric: Metric) -> float | None:
    """Return what settings are chosen by, more being better: the metric on validation data, or its negative."""
    value = metric.validation(record)
    return None if value is None else metric.score(value)
