"""The privacy of an experiment before its first round: what is refused, and the noise that a budget asks for."""

from dataclasses import replace

from fedtailor.accounting import noise_for
from fedtailor.clipping import check_private_means
from fedtailor.errors import FedtailorError
from fedtailor.experiment import Experiment
from fedtailor.local.layout import Layout
from fedtailor.method import Method
from fedtailor.participation import Participation
from fedtailor.privacy import Privacy
from fedtailor.server.budget import Budget


def wanted_privacy(experiment: Experiment, method: Method, layout: Layout) -> Privacy | None:
    """Return the privacy that an experiment asks for; refuse one that cannot be had."""
    if experiment.privacy is None and experiment.epsilon not in (None, "inf"):
        raise FedtailorError(
            f"The budget ε = {experiment.epsilon} needs noise: give --privacy client, or --privacy sample."
        )
    if experiment.privacy is None or experiment.epsilon == "inf":
        return None
    privacy = Privacy.parse(experiment.privacy)
    if privacy.noise is None and experiment.epsilon is None:
        raise FedtailorError(
            "Privacy needs noise: give it, as in --privacy 'client, noise=1', or a budget like --epsilon 8 to find it."
        )
    if layout.buffers:
        raise FedtailorError(
            "BatchNorm's buffers are means of a client's samples, which noise would make invalid: use GroupNorm or "
            "LayerNorm with --privacy."
        )
    if privacy.level == "client":
        _check_client_level(experiment, method, privacy)
    else:
        _check_sample_level(experiment)
    return privacy


def _check_client_level(experiment: Experiment, method: Method, privacy: Privacy) -> None:
    if reason := check_private_means(method):
        raise FedtailorError(f"{reason}: take a method whose uploads are means, like fedavg, or --privacy sample.")
    if experiment.aggregation != "mean":
        raise FedtailorError(
            f"The noise of --privacy client is made for a mean, whose clip bounds what one client can do: leave "
            f"--aggregation {experiment.aggregation} out."
        )
    if privacy.by == "clients" and Participation.parse(experiment.participation).kind in ("independent", "range"):
        raise FedtailorError(
            "Clients can share the noise only if the number of participants is known: take --participation all, a "
            "number or a fraction, or leave the noise to the server (by=server)."
        )


def _check_sample_level(experiment: Experiment) -> None:
    """Refuse settings with which the gradients of single samples have no bound. (Methods are tried.)"""
    if experiment.autocast:
        raise FedtailorError("Privacy of single samples needs the exact norms of gradients: leave --autocast out.")
    if experiment.class_weights == "balanced":
        raise FedtailorError(
            "Balanced class weights come of the clients' class counts, which privacy of single samples cannot protect: "
            "give --class-weights one number a class, or leave it out."
        )


def settled(experiment: Experiment, budget: Budget) -> Budget:
    """Find the noise, if it is not given, for all rounds of the experiment; refuse a limit that one round exceeds."""
    training, limit = list(range(budget.clients)), budget.limit
    if budget.privacy.noise is not None:
        if limit is not None and (why := budget.exhausted([], training)):
            raise FedtailorError(f"No round fits the budget: {why}; give more noise, or a larger --epsilon.")
        return budget
    assert limit is not None  # without both, `wanted_privacy` has refused
    called = [budget.participation.draw(training, experiment.seed, number + 1) for number in range(experiment.rounds)]
    noise = noise_for(limit, lambda noise: budget.planned(called, noise).epsilon)
    return replace(budget, privacy=budget.privacy.model_copy(update={"noise": noise}))
