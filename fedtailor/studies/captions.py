"""The words below a table: the evaluation protocol, who was not measured, how lines were chosen and tested."""

from collections.abc import Collection, Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from fedtailor._common.errors import listed
from fedtailor.experiment.tuned import tuned_in_words
from fedtailor.server.evaluation import early_stop
from fedtailor.server.records import failures_in_words, joined_in_words
from fedtailor.studies.measures import LEVEL, majority_baseline, paired
from fedtailor.training.metrics import ACCURACY

if TYPE_CHECKING:
    from fedtailor.engines.result import RunResult
    from fedtailor.studies.summary import Line, Summary

REASONS = 5  # for which runs stopped, that are told


def sentences(summary: "Summary", shown: Collection[str] | None = None) -> Iterable[str]:
    """Yield the sentences below the table: about the runs, and about the columns that are `shown`, or all."""
    lines = summary.lines
    protocols = [line.results[0].experiment.evaluation for line in lines]
    tuned = protocols[0].fine_tune if len({protocol.fine_tune for protocol in protocols}) == 1 else 0
    yield protocols[0].model_copy(update={"fine_tune": tuned}).in_words(summary.metric)
    if (baseline := _majority(summary)) is not None:
        yield f"Predicting each client's most frequent training class: {100 * baseline:.1f} %."
    yield from hostile_in_words(lines)
    if known := lines[0].results[0].known_for:
        yield known
    yield from missing_in_words(lines)
    if summary.tuned is not None:
        yield tuned_in_words(summary.tuned)
    if any(line.chosen for line in lines) and _has(shown, "validation"):
        yield "✓: the line of its method that validation data choose; only chosen lines are ranked and tested."
    yield from _about_no_choice(lines)
    if any(not line.ranked and line.chosen is not False for line in lines):
        yield "Lines under attack are not ranked or tested beside those without one."
    seeds = {line.seeds for line in lines}
    if len(seeds) > 1:
        yield "Lines differ in their seeds: what is compared is of the seeds that both have."
    elif len(lines[0].seeds) > 1:
        yield f"Mean ± standard deviation (n − 1) over {len(lines[0].seeds)} seeds."
    if unfinished := [line.label for line in lines if not line.finished]:
        yield f"Not finished: {'; '.join(unfinished)}."
    if came := joined_in_words(lines[0].results[0].partition["joined"]):
        yield f"{came}."
    yield from _about_early_stops(summary)
    clients = len(lines[0].results[0].names)
    said = [(line.label, failures_in_words([r.failures for r in line.results], clients)) for line in lines]
    if failed := [f"{title}: {words}" for title, words in said if words]:
        who = "Honest ones" if any(result.hostile for line in lines for result in line.results) else "These clients"
        yield f"Failures: {'; '.join(failed)}. {who} count with models that missed that training."
    same = lines[0].results[0].experiment.evaluation.of_the_same
    if absent := same and max(len(result.never_called) for line in lines for result in line.results):
        yield (
            f"Up to {absent} of {clients} clients were never called: they count with what the "
            "method gives to a new client."
        )
    yield from dict.fromkeys(words for line in lines if (words := line.results[0].privacy_in_words))
    yield from about_columns(summary, shown)


def about_columns(summary: "Summary", shown: Collection[str] | None = None) -> Iterable[str]:
    """Yield what explains the columns that are `shown`, or all."""
    lines, protocol = summary.lines, summary.lines[0].results[0].experiment.evaluation
    if any(line.gain is not None for line in lines) and _has(shown, "gain", "losing"):
        yield (
            f"Gain over {summary.base_label}: mean ± standard deviation over clients{_mean(lines, ', averaged')}, and "
            "how many clients lose."
        )
    if _has(shown, "worst-decile"):
        yield "Worst decile: mean of the worst tenth of the clients."
    if summary.target is not None and _has(shown, "rounds", "speed-up", "bytes-to-target", "clock-to-target"):
        slowest = ", and the speed-up over the slowest that gets there" if len(lines) > 1 else ""
        costs = "Rounds and bytes"
        if any(line.clock_to_target is not None for line in lines):
            costs = "Rounds, bytes and virtual time"
        partly = protocol.of_the_same and any(
            result.experiment.participation != "all" for line in lines for result in line.results
        )
        metric = summary.metric
        whose = f"mean {metric.title} of the clients called so far" if partly else metric.title
        seeds, some = _mean(lines, ", mean ± standard deviation"), ""
        if any(0 < line.reached < len(line.seeds) for line in lines):
            some = " that reach it, with their number"
        chosen = "" if summary.target_given else ", what all runs reach"
        yield f"{costs} until the {whose} is {target_text(summary)}{chosen}{seeds}{some}{slowest}."
    if _has(shown, "passes") and len({round(line.passes, 1) for line in lines if line.passes is not None}) > 1:
        yield "Passes: how often a participant computes the gradient of each training sample in a round."
    if _has(shown, "vs-best"):
        yield from _about_the_test(summary)


def _mean(lines: Sequence["Line"], word: str) -> str:
    """Say that numbers are means over seeds, where there are several."""
    return f"{word} over seeds" if any(len(line.seeds) > 1 for line in lines) else ""


def _majority(summary: "Summary") -> float | None:
    """Average the accuracy of the most frequent class over the seeds; None if the table's metric is another one."""
    if summary.metric != ACCURACY:
        return None
    of_seeds = {result.experiment.seed: result for line in summary.lines for result in line.results}
    found = [majority_baseline(result) for result in of_seeds.values()]
    return None if None in found else fmean(share for share in found if share is not None)


def _has(shown: Collection[str] | None, *names: str) -> bool:
    """Find out whether one of these columns is shown."""
    return shown is None or any(name in shown for name in names)


def _about_no_choice(lines: Sequence["Line"]) -> Iterable[str]:
    """Say which methods have several lines and no validation data to choose one by."""
    chosen = {line.method for line in lines if line.chosen}
    methods = dict.fromkeys(line.name for line in lines if line.chosen is False and line.method not in chosen)
    if methods:
        yield (
            f"Without validation data, none of the lines of {listed(list(methods))} is chosen: they are not ranked, as "
            "the best of them on test data would be better there than on others."
        )


def hostile_in_words(lines: Sequence["Line"]) -> Iterable[str]:
    """Say of whom the averages are where clients are hostile, and who these are with each seed."""
    attacks = dict.fromkeys(result.experiment.attack for line in lines for result in line.results)
    for attack in filter(None, attacks):
        runs = [result for line in lines for result in line.results if result.experiment.attack == attack]
        of_seed = {run.experiment.seed: run for run in runs}
        first, *others = of_seed
        said = of_seed[first].averages_of.rstrip(".") + (f" with seed {first}" if others else "")
        for seed in others:
            names = of_seed[seed].names
            said += f"; {listed([names[client] for client in of_seed[seed].hostile])} with seed {seed}"
        yield f"{f'attack={attack}: ' if len(attacks) > 1 else ''}{said}."


def missing_in_words(lines: Sequence["Line"]) -> Iterable[str]:
    """Say which clients were not measured, and with which lines: their averages are of other clients."""
    absent = {line.label: sorted({name for result in line.results for name in result.missing}) for line in lines}
    named = [(title, "clients" if len(names) > 1 else "client", names) for title, names in absent.items() if names]
    if said := "; ".join(f"{title}: {word} {listed(names)}" for title, word, names in named):
        yield f"Not measured in the round that counts: {said}. These averages are of the other clients."
    rounds = [bool(record.missing) for line in lines for result in line.results for record in result.rounds]
    if any(rounds):
        yield f"In {sum(rounds)} of {len(rounds)} rounds not all clients were measured."


def target_text(summary: "Summary") -> str:
    """Format the target: 90 %, or "at most 55" where lower is better."""
    metric, target = summary.metric, summary.target or 0.0
    return f"{100 * target:g} %" if metric.percent else f"{'' if metric.higher_is_better else 'at most '}{target:g}"


def _about_early_stops(summary: "Summary") -> Iterable[str]:
    stopped = [result for line in summary.lines for result in line.results if result.stopped]
    if stopped:
        rounds = [len(result.rounds) for result in stopped]
        runs, reasons = sum(len(line.results) for line in summary.lines), list(dict.fromkeys(map(_reason, stopped)))
        said = f"{'; '.join(reasons[:REASONS])}{' …' if len(reasons) > REASONS else ''}"
        yield f"{len(rounds)} of {runs} runs stopped early, after {min(rounds)} to {max(rounds)} rounds: {said}."


def _reason(result: "RunResult") -> str:
    """Say why a run stopped: by its patience, in the same words for all runs."""
    patience, metric = result.experiment.evaluation.patience, result.metric
    if early_stop(result.rounds, patience, metric):
        return f"no better validation {metric.title} in {patience} evaluated rounds"
    return result.rounds[-1].stop


def _about_the_test(summary: "Summary") -> Iterable[str]:
    best, tested = summary.best, [line for line in summary.lines if line.p is not None]
    if best is None or not tested:
        return
    clients = min(len(paired(line.results, best.results)[0]) for line in tested)
    whose = f"their {summary.metric.title}{_mean(summary.lines, ' averaged')}"
    honest = "honest " if any(result.hostile for line in summary.lines for result in line.results) else ""
    yield (
        f"vs best: p of a paired two-sided Wilcoxon signed-rank test over {clients} {honest}clients ({whose}) against "
        f"{best.label}, corrected by Holm for {len(tested)} "
        f"comparison{'s' if len(tested) > 1 else ''}; ≈: no significant difference (p ≥ {LEVEL:g})."
    )
    if test_finds_nothing(summary):
        many = " and so many comparisons" if len(tested) > 1 else ""
        yield f"With {clients} clients{many}, this test cannot find any."


def test_finds_nothing(summary: "Summary") -> bool:
    """Find out whether the smallest p of the test, corrected, is not significant with so few clients."""
    best, tested = summary.best, [line for line in summary.lines if line.p is not None]
    if best is None or not tested:
        return False
    clients = min(len(paired(line.results, best.results)[0]) for line in tested)
    return bool(len(tested) * 2 / 2**clients >= LEVEL)
