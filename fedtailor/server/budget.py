"""The privacy budget of a run: what its rounds have cost, and whether one more is affordable."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Protocol

from fedtailor.accounting import Releases, Spent, spent
from fedtailor.participation import Participation
from fedtailor.privacy import Privacy

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
