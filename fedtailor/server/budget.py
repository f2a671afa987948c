"""The privacy budget of a run: what is refused, the noise that it asks for, and what the rounds have cost."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Protocol

from fedtailor._common.errors import FedtailorError
from fedtailor.experiment import Experiment
from fedtailor.experiment.participation import Participation
from fedtailor.experiment.privacy import Privacy
from fedtailor.method import Mean, Method
from fedtailor.privacy.accountant import Releases, Spent, noise_for, spent
from fedtailor.training.layout import Layout

WORST = 3  # clients whose ε is computed in each round: those that have spent the most by a rough estimate


class Round(Protocol):
    """The part of a round's record that costs privacy."""

    participants: list[int]
    failed: list[int]


Queries = Mapping[float, int]  # noisy gradients of one client in one round, by the share of samples in each


@dataclass(frozen=True)
class Budget:
    """The privacy of a run, and what it may cost at most: at client level each round is one release of the mean; at
    sample level, every noisy gradient of a client is one."""

    privacy: Privacy
    participation: Participation
    clients: int  # that take part in training
    releases: bool = True  # False if clients upload nothing
    limit: float | None = None
    queries: Sequence[Queries] = field(default_factory=list)  # of each client, at sample level

    def after(self, rounds: Sequence[Round]) -> Spent:
        """Compute what these rounds have cost: at sample level, the client that has spent the most."""
        if not self.releases:
            return Spent(0.0, 0.0)
        if self.privacy.level == "client":
            return spent(self._rounds(rounds), self.privacy.delta)
        times = Counter(client for record in rounds for client in record.participants)
        worst = sorted(times, key=lambda client: -self._estimate(client, times[client]))[:WORST]
        return max((self._of(client, times[client]) for client in worst), default=Spent(0.0, 0.0))

    def of_client(self, client: int, times: int) -> Spent:
        """Compute what a client has spent in so many rounds; at client level all have spent the same."""
        return self._of(client, times) if self.releases else Spent(0.0, 0.0)

    def exhausted(self, rounds: Sequence[Round], participants: list[int]) -> str:
        """Say why no round with these participants is affordable after these; "" if one is."""
        if self.limit is None:
            return ""
        after = self.after([*rounds, _Next(participants)]).epsilon
        return f"one more would cost ε = {after:.3g}, more than {self.limit:g}" if after > self.limit else ""

    def planned(self, rounds: Sequence[Sequence[int]], noise: float) -> Spent:
        """Compute what rounds with these participants would cost with this noise."""
        other = replace(self, privacy=self.privacy.model_copy(update={"noise": noise}))
        return other.after([_Next(list(participants)) for participants in rounds])

    def in_words(self, rounds: int) -> str:
        """Say how the noise is made, and what limits the rounds."""
        privacy = self.privacy
        if not self.releases:
            return "Privacy: clients upload nothing, so nothing is spent."
        clip = privacy.clip if privacy.quantile is None else f"the {privacy.quantile:g}-quantile of the changes' norms"
        who = "by each client, a share" if privacy.by == "clients" else "by the server"
        who = "in each gradient of a client" if privacy.level == "sample" else who
        limit = f"; at most ε = {self.limit:g} in {rounds} rounds" if self.limit is not None else ""
        return f"Privacy, {privacy.level} level: clip {clip}, noise {self.noise:g} times the clip, {who}{limit}."

    @property
    def noise(self) -> float:
        assert self.privacy.noise is not None  # it was found before the run
        return self.privacy.noise

    def _rounds(self, rounds: Sequence[Round]) -> list[Releases]:
        kind, participation = self._release(), self.participation
        if self.privacy.by == "server":
            return [replace(kind, count=len(rounds))]
        # Each client adds its share of the noise: those that failed are missing in the sum.
        expected = participation.mean(self.clients)
        replied = [len(record.participants) - len(record.failed) for record in rounds]
        return [replace(kind, noise=self.noise * sqrt(number / expected)) for number in replied if number]

    def _release(self) -> Releases:
        participation, clients = self.participation, self.clients
        if participation.kind == "independent":
            return Releases(self.noise, sampling="poisson", share=float(participation.amount))
        most = participation.most if participation.kind == "range" else participation.count(clients)
        assert most is not None
        if most >= clients:
            return Releases(self.noise)
        return Releases(self.noise, sampling="fixed", sampled=most, population=clients)

    def _of(self, client: int, times: int) -> Spent:
        queries = self.queries[client]
        return spent(
            [Releases(self.noise, times * count, "poisson", share) for share, count in queries.items()],
            self.privacy.delta,
        )

    def _estimate(self, client: int, times: int) -> float:
        """Estimate a client's ε for comparison with others': q² T, as in the central limit."""
        return times * sum(share**2 * count for share, count in self.queries[client].items())


@dataclass
class _Next:
    """A round that is still to come."""

    participants: list[int]
    failed: list[int] = field(default_factory=list)


# --- before the first round ---


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
    limit, draw = budget.limit, budget.participation.draw
    if budget.privacy.noise is not None:
        if limit is not None and (why := budget.exhausted([], list(range(budget.clients)))):
            raise FedtailorError(f"No round fits the budget: {why}; give more noise, or a larger --epsilon.")
        return budget
    assert limit is not None  # without both, `wanted_privacy` has refused
    called = [draw(budget.clients, experiment.seed, number + 1) for number in range(experiment.rounds)]
    noise = noise_for(limit, lambda noise: budget.planned(called, noise).epsilon)
    return replace(budget, privacy=budget.privacy.model_copy(update={"noise": noise}))


def check_private_means(method: Method) -> str:
    """Say why a client's whole upload cannot be hidden in a mean; "" if it can."""
    title = type(method).__name__
    for name, how in method.uploads.items():
        if not isinstance(how, Mean):
            if not how.record:
                return f"{title} needs every client's own {name}, and noise hides a client only in a mean"
        elif how.weights not in ("samples", "equal"):
            return f"{title}'s clients upload the weights of their mean, {how.weights}, which no clip bounds"
    return ""
