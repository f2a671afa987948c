"""A summary of comparable runs: a line for each method and choice of settings, over its seeds.

A line has the metric that decides, the gain over Local, the cost, and whether it differs from the best by more than
chance.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from statistics import fmean, pstdev, stdev
from typing import Any

from fedtailor._common.errors import FedtailorError
from fedtailor.engines.result import RunResult
from fedtailor.experiment import DATA_SETTINGS, EXECUTION_ONLY, NONE
from fedtailor.server.records import Plain
from fedtailor.studies.captions import sentences
from fedtailor.studies.measures import (
    LEVEL,
    holm,
    individual_gains,
    paired,
    passes,
    samples_per_second,
    until,
    wilcoxon,
)
from fedtailor.training.metrics import Metric

CONDITIONS = ("privacy", "epsilon", "aggregation", "fairness", "attack")  # that are not chosen by validation data
# What tells nothing about a line: it is the same for all, or does not change what is compared.
_COMMON = {*EXECUTION_ONLY, *DATA_SETTINGS, "seed", "observe_every", "method", "parameters"}


@dataclass(frozen=True)
class Line:
    """One method with one choice of settings, over its seeds. Accuracies are shares of 1; None: there is no value.

    `value`, `worst_decile`, `gain` and what follows from them are of the metric that decides. A gain above 0 is for the
    better, whatever the metric's direction.
    """

    title: str
    method: str
    name: str  # of the method, as its paper writes it
    settings: Plain  # what differs from line to line
    results: tuple[RunResult, ...]  # one a seed
    value: float | None  # mean over seeds
    value_std: float | None  # over seeds, with n - 1; None for one seed
    accuracy: float | None  # the same of the accuracy
    accuracy_std: float | None
    loss: float | None
    worst_decile: float | None
    rounds_to_target: float | None  # mean over the seeds that reach it; None if none does
    bytes_to_target: float | None
    passes: float | None  # over a participant's training samples in a round, mean over seeds
    samples_per_second: float | None
    bytes: float  # up and down, mean over seeds
    failed: float  # clients that failed in some round, mean over seeds
    failed_always: float  # clients that failed in every round that they were called in
    gain: float | None = None  # over Local: mean over clients, mean over seeds
    gain_std: float | None = None  # over clients (with n), mean over seeds
    losing: float | None = None  # clients worse than with Local, mean over seeds
    clients: int | None = None  # of which so many were compared
    speed_up: float | None = None  # in rounds to the target, over the slowest line that reaches it
    validation: float | None = None  # what settings are chosen by, more being better: mean over seeds
    chosen: bool | None = None  # by it, among the lines of the method; None if there is no choice
    ranked: bool = True  # not a line that was not chosen, nor one under attack beside others without
    epsilon: float | None = None  # spent in all rounds, the most of all seeds; None without privacy
    hostile_value: float | None = None  # as `value`, of the hostile clients of a study
    backdoor: float | None = None  # the share of samples that a backdoor misleads, mean over seeds
    missing: float = 0.0  # clients that were not measured in the round that counts, mean over seeds
    reached: int = 0  # seeds that reach the target
    rounds_to_target_std: float | None = None  # over these seeds, with n - 1; None for one
    bytes_to_target_std: float | None = None
    clock_to_target: float | None = None  # virtual seconds, where clients have a system
    clock_to_target_std: float | None = None
    std: float | None = None  # over clients (with n), mean over seeds
    p: float | None = None  # of the difference from the best line, corrected; None for the best itself
    best: bool = False
    second: bool = False

    @property
    def label(self) -> str:
        """The title for readers, with the method's name as its paper writes it."""
        return self.name + self.title.removeprefix(self.method)

    @property
    def metric(self) -> Metric:
        """The metric that decides."""
        return self.results[0].metric

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(result.experiment.seed for result in self.results)

    @property
    def finished(self) -> bool:
        return all(result.finished for result in self.results)

    @property
    def of_clients(self) -> str:
        """Say of how many clients the metrics are, on average over seeds; "" if none is missing."""
        counted = [record for result in self.results if (record := result.chosen())]
        if not self.missing or not counted:
            return ""
        most = max(record.evaluated + len(record.missing) for record in counted)
        return f"{round(most - self.missing, 1):g} of {most} clients"

    @property
    def like_best(self) -> bool:
        """True if it is not significantly different from the best line."""
        return self.p is not None and self.p >= LEVEL

    def plain(self) -> Plain:
        """All numbers as JSON has them."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "results"}
        more = {"metric": self.metric.name, "seeds": list(self.seeds), "finished": self.finished}
        return {**own, **more, "like_best": self.like_best}


@dataclass(frozen=True)
class Summary:
    """The lines of a comparison, with the title, target and base that one needs to read them."""

    title: str
    lines: tuple[Line, ...]
    target: float | None
    base: str | None  # the line of Local that gains are measured against
    tuned: str | None = None  # how the methods' settings were chosen, if by `tune`
    target_given: bool = True  # or it is what all runs reach

    @property
    def metric(self) -> Metric:
        """The metric that decides."""
        return self.lines[0].metric

    @property
    def base_label(self) -> str:
        """The line of Local that gains are measured against, for readers."""
        return next((line.label for line in self.lines if line.title == self.base), "")

    @property
    def best(self) -> Line | None:
        return next((line for line in self.lines if line.best), None)

    def plain(self) -> Plain:
        """All numbers as JSON has them."""
        lines = [line.plain() for line in self.lines]
        metric = {"metric": self.metric.name, "higher_is_better": self.metric.higher_is_better}
        target = {"target": self.target, "target_given": self.target_given}
        about = {"title": self.title, **metric, **target, "base": self.base, "caption": self.caption}
        return {**about, "lines": lines}

    @cached_property
    def caption(self) -> str:
        """The text below the table: the evaluation protocol, and the test of significance."""
        return " ".join(sentences(self))


# --- the numbers ---


def summarize(results: Sequence[RunResult], target: float | None = None, tuned: str | None = None) -> Summary:
    """Summarize comparable runs, in the order in which their methods and settings first appear.

    The target, unless given, is what the worst run reaches, rounded to what is no harder (a whole percent). `tuned`
    says how the methods' settings were chosen, if by `tune`.
    """
    if not results:
        raise FedtailorError("There is no run to make a table of.")
    metric = results[0].metric
    metric.check_target(target)
    given = target is not None
    check_comparable(results)
    if target is None:
        worst = metric.worst(result.value for result in results if result.value is not None)
        target = None if worst is None else metric.easier(worst)
    groups = _groups(results)
    varied = zip(groups, _varied(groups), _titles(groups, tuned is not None), strict=True)
    names = _names({group[0].experiment.method: group[0].method_title for group in groups})
    lines = [_line(group, settings, named, names, target or None) for group, settings, named in varied]
    lines, base = _with_gains(_with_choice(lines))
    lines = _with_significance(_with_speed_up(_ranked(lines)))
    return Summary(_title(results), tuple(lines), target or None, base, tuned, given)


def _identity(result: RunResult) -> tuple[str, Plain, Plain]:
    """Return what all runs of a line have in common: the method, the settings, the method's parameters."""
    settings = result.experiment.model_dump(exclude=_COMMON)
    evaluation = settings.pop("evaluation")
    settings["fine_tune"] = evaluation["fine_tune"]
    return result.experiment.method, settings, result.experiment.parameters


def _groups(results: Sequence[RunResult]) -> list[list[RunResult]]:
    """Group the runs by line, ordered by seed. Of equal runs the longest counts."""
    groups: dict[str, dict[int, RunResult]] = {}
    for result in results:
        group = groups.setdefault(json.dumps(_identity(result), sort_keys=True), {})
        before = group.get(result.experiment.seed)
        if before is None or len(result.rounds) > len(before.rounds):
            group[result.experiment.seed] = result
    return [[group[seed] for seed in sorted(group)] for group in groups.values()]


def _varied(groups: Sequence[Sequence[RunResult]]) -> list[Plain]:
    """Find the values that distinguish each line: of settings that are not the same in all lines, of parameters that
    are not the same in all lines of the method."""
    identities = [_identity(group[0]) for group in groups]
    varied = []
    for method, settings, parameters in identities:
        others = [of_other for name, _, of_other in identities if name == method]
        shown = {n: v for n, v in parameters.items() if any(other.get(n) != v for other in others)}
        shown |= {n: v for n, v in settings.items() if any(other[n] != v for _, other, _ in identities)}
        varied.append(shown)
    return varied


def _titles(groups: Sequence[Sequence[RunResult]], tuned: bool) -> list[Plain]:
    """Find the values that a line's title names: those that distinguish it. If the settings of each method are `tuned`,
    they are not the same in all lines, and name a line only where the method has several."""
    identities, titles = [_identity(group[0]) for group in groups], []
    for (method, _, _), varied in zip(identities, _varied(groups), strict=True):
        own = [settings for name, settings, _ in identities if name == method]
        always = {"fine_tune", *CONDITIONS}
        same = {n for n in own[0] if n not in always and all(settings[n] == own[0][n] for settings in own)}
        titles.append({n: v for n, v in varied.items() if not (tuned and n in same)})
    return titles


def _names(names: dict[str, str]) -> dict[str, str]:
    """Keep the titles of methods that differ; classes of the same title are named by their modules."""
    written = list(names.values())
    return {method: name if written.count(name) == 1 else method for method, name in names.items()}


def _mean(values: Iterable[float | None]) -> float | None:
    """Compute the mean; None if any value is missing."""
    found = list(values)
    return None if not found or None in found else fmean(value for value in found if value is not None)


def _line(
    results: Sequence[RunResult], settings: Plain, named: Plain, names: dict[str, str], target: float | None
) -> Line:
    method = results[0].experiment.method
    value, value_std = _over_seeds([result.value for result in results])
    accuracy, accuracy_std = _over_seeds([result.accuracy for result in results])
    reached = [cost for result in results if target is not None and (cost := until(result, target))]
    rounds, sent, clock = (_over_seeds([cost[place] for cost in reached]) for place in range(3))
    chosen = [result.chosen() for result in results]
    return Line(
        title=", ".join([method, *(f"{name}={_plain_value(value)}" for name, value in named.items())]),
        method=method,
        name=names[method],
        settings=settings,
        results=tuple(results),
        value=value,
        value_std=value_std,
        accuracy=accuracy,
        accuracy_std=accuracy_std,
        loss=_mean(record.loss if record else None for record in chosen),
        worst_decile=_mean(record.worst_decile if record else None for record in chosen),
        rounds_to_target=rounds[0],
        bytes_to_target=sent[0],
        passes=_mean(passes(result) for result in results),
        samples_per_second=_mean(samples_per_second(result) for result in results),
        bytes=fmean(sum(record.bytes for record in result.rounds) for result in results),
        failed=fmean(len(result.failures) for result in results),
        failed_always=fmean(sum(f == n for f, n in result.failures.values()) for result in results),
        validation=_mean(results[0].metric.validation(record) if record else None for record in chosen),
        epsilon=max((r.epsilon for r in results if r.epsilon is not None), default=None),
        hostile_value=_over_seeds([result.hostile_value for result in results])[0],
        backdoor=_over_seeds([result.recorded_backdoor for result in results])[0],
        missing=fmean(len(record.missing) if record else 0 for record in chosen),
        reached=len(reached),
        rounds_to_target_std=rounds[1],
        bytes_to_target_std=sent[1],
        clock_to_target=clock[0],
        clock_to_target_std=clock[1],
        std=_mean(record.std if record else None for record in chosen),
    )


def _over_seeds(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Compute the mean and the standard deviation (with n - 1) over the seeds that have a value."""
    found = [value for value in values if value is not None]
    return fmean(found) if found else None, stdev(found) if len(found) > 1 else None


def _plain_value(value: Any) -> str:
    if value is None:  # as a grid says it
        return NONE
    return f"{value:g}" if isinstance(value, float) else str(value)


def _with_choice(lines: list[Line]) -> list[Line]:
    """Choose one of each method's lines by its value on validation data, the first of equals; none where there are no
    such data. With and without fine-tuning, under another attack or budget, or with another defence, it is another
    question. Of several attacks nobody chooses: lines without one are ranked, or else those with the first."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        asked = line.results[0].experiment
        question = (asked.evaluation.fine_tune, *(getattr(asked, name) for name in CONDITIONS))
        groups.setdefault((line.method, *question), []).append(line)
    chosen = dict[str, bool]()
    for group in groups.values():
        if len(group) > 1:
            found = [line.validation for line in group if line.validation is not None]
            best = group[0].metric.best(found)
            first = next((line for line in group if best is not None and line.validation == best), None)
            chosen |= {line.title: line is first for line in group}
    attacks = [line.results[0].experiment.attack for line in lines]
    ranked = None if None in attacks else attacks[0]
    return [
        replace(line, chosen=(known := chosen.get(line.title)), ranked=known is not False and attack == ranked)
        for line, attack in zip(lines, attacks, strict=True)
    ]


def _with_gains(lines: list[Line]) -> tuple[list[Line], str | None]:
    """Add the gain of every line over the best line of Local on the same seeds, and return the title of that. If there
    are several, the best is the one on validation data, where there are any."""
    local = [line for line in lines if line.method == "local" and line.value is not None]
    local = [line for line in local if line.ranked] or local
    if not local:
        return lines, None
    validated = all(line.validation is not None for line in local)
    found = [(line.validation if validated else line.value) or 0.0 for line in local]
    base = local[found.index(local[0].metric.worst_first(found)[-1])]
    of_seed = {result.experiment.seed: result for result in base.results}
    return [_gained(line, of_seed) if line is not base else line for line in lines], base.title


def _gained(line: Line, base: dict[int, RunResult]) -> Line:
    pairs = [(result, base.get(result.experiment.seed)) for result in line.results]
    gains = [list(individual_gains(result, local).values()) for result, local in pairs if local is not None]
    gains = [gained for gained in gains if gained]
    if not gains:
        return line
    return replace(
        line,
        gain=fmean(fmean(gained) for gained in gains),
        gain_std=fmean(pstdev(gained) for gained in gains) if max(map(len, gains)) > 1 else None,
        losing=fmean(sum(gain < 0 for gain in gained) for gained in gains),
        clients=round(fmean(map(len, gains))),
    )


def _ranked(lines: list[Line]) -> list[Line]:
    """Mark the best line and the second, by the mean of the metric; equals share a place."""
    ranked = [line for line in lines if line.value is not None and line.ranked]
    places = lines[0].metric.worst_first({line.value for line in ranked if line.value is not None})
    alone = len(ranked) == 1 and not ranked[0].chosen  # the others are lines of which none is chosen
    if len(lines) < 2 or not places or alone:
        return lines
    first, second = places[-1], places[-2] if len(places) > 1 else None
    return [
        replace(line, best=line.value == first, second=second is not None and line.value == second)
        if line.ranked
        else line
        for line in lines
    ]


def _with_speed_up(lines: list[Line]) -> list[Line]:
    """Add the speed-up over the slowest line that reaches the target, of those that do so with every seed."""
    rounds = [line.rounds_to_target if line.reached == len(line.results) else None for line in lines]
    slowest = max((of_line for of_line in rounds if of_line), default=0.0)
    both = zip(lines, rounds, strict=True)
    return [replace(line, speed_up=slowest / of_line) if of_line else line for line, of_line in both]


def _with_significance(lines: list[Line]) -> list[Line]:
    """Test each line against the best, over clients."""
    best = next((line for line in lines if line.best), None)
    if best is None:
        return lines
    others = {place: line for place, line in enumerate(lines) if line is not best and line.ranked}
    raw = {place: wilcoxon(*paired(line.results, best.results)) for place, line in others.items()}
    tested = {place: p for place, p in raw.items() if p is not None}
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    return [replace(line, p=corrected.get(place)) for place, line in enumerate(lines)]


def _title(results: Sequence[RunResult]) -> str:
    rounds = sorted({result.experiment.rounds for result in results})
    seeds = sorted({result.experiment.seed for result in results})
    shown = ", ".join(map(str, seeds))
    return (
        f"{results[0].clients_title}, {' or '.join(map(str, rounds))} rounds, "
        f"seed{'s' if len(seeds) > 1 else ''} {shown}"
    )


# --- can these runs be compared? ---


def check_comparable(results: Sequence[RunResult]) -> None:
    """Refuse runs with different clients, samples or evaluation protocols; the error names the setting."""
    of_seed: dict[int, RunResult] = {}
    for result in results:
        first, twin = results[0], of_seed.setdefault(result.experiment.seed, result)
        if _samples(twin) != _samples(result):
            _refuse(twin, result, _settings_of_data)
        if twin is result:
            _refuse_if_different(first, result, _settings_of_data)
        _refuse_if_different(first, result, _protocol)


def _samples(result: RunResult) -> Plain:
    """Return the partition, without the names of the data and of the partition, the checksum of the network and who is
    hostile."""
    left_out = ("data", "partition", "assignment", "network", "hostile", "picture")
    return {name: value for name, value in result.partition.items() if name not in left_out}


def _settings_of_data(result: RunResult) -> Plain:
    names = [name for name in DATA_SETTINGS if name not in EXECUTION_ONLY]
    experiment = result.experiment.model_dump(include={*names, "dtype"})
    return {**{name: experiment[name] for name in names}, "clients": len(result.names), "dtype": experiment["dtype"]}


def _protocol(result: RunResult) -> Plain:
    """Return the evaluation settings that must agree. Fine-tuning may differ: it makes another method of it, and the
    line's title says so."""
    protocol = result.experiment.evaluation.model_dump(exclude={"fine_tune", "train", "metrics"})
    return {f"evaluation.{name}": value for name, value in {**protocol, "metric": result.metric.name}.items()}


def _refuse_if_different(one: RunResult, other: RunResult, of: Callable[[RunResult], Plain]) -> None:
    if of(one) != of(other):
        _refuse(one, other, of)


def _refuse(one: RunResult, other: RunResult, of: Callable[[RunResult], Plain]) -> None:
    mine, theirs = of(one), of(other)
    name = next((name for name in mine if mine[name] != theirs[name]), None)
    if name is None:
        what = f"the samples themselves are others in {_where(one)} than in {_where(other)}"
    else:
        values = (mine[name], theirs[name])
        here, there = ("the default" if value is None else json.dumps(value) for value in values)
        what = f"{name} is {here} in {_where(one)} and {there} in {_where(other)}"
    raise FedtailorError(f"These runs cannot be compared: {what}.")


def _where(result: RunResult) -> str:
    return str(result.path or f"{result.experiment.method} with seed {result.experiment.seed}")
