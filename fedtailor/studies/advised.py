"""Advice in plain words."""

from typing import TYPE_CHECKING

from fedtailor._common.text import percent
from fedtailor.training.metrics import Metric

if TYPE_CHECKING:
    from fedtailor.studies.advice import Advice

MORE = 0.4  # the share of validation samples that is asked for where nothing is decided


def sentences(advice: "Advice") -> list[str]:
    """Say in plain words what was measured, what is recommended and why."""
    from fedtailor.studies.advice import ALONE, GLOBAL, TUNED  # which imports this module to speak

    found, metric = _skew_sentences(advice), advice.metric
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


def _skew_sentences(advice: "Advice") -> list[str]:
    """Say how far the clients' targets and features differ."""
    skew = advice.skew
    beside = "more than" if skew.label > 1.5 * skew.label_by_chance else "about as much as"
    chance = f"{beside} chance would give ({percent(skew.label_by_chance)} %)"
    targets = {
        "classes": f"Labels: a client's classes differ from everybody's by {percent(skew.label)} % on average, "
        f"{chance}.",
        "labels": f"Labels: a client has a label more or less often than everybody by {percent(skew.label)} % on "
        f"average, {chance}.",
        "numbers": f"Targets: {percent(skew.label)} % of what varies goes with the client, {chance}.",
    }
    within = " within a class" if skew.targets == "classes" else ""
    return [targets[skew.targets], f"Features: {percent(skew.feature)} % of what varies{within} goes with the client."]


def _points(metric: Metric, gain: float) -> str:
    """Format a gain: in points, or in the metric's own unit."""
    return f"{100 * gain:+.1f}" if metric.percent else metric.text(gain, "+")
