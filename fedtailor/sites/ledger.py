"""The privacy that a site's data have lost: one ledger for all runs, plans and restarts, written before each training.

Every answer of a private training has fresh noise, so their mean has ever less of it. The ledger belongs to the site's
directory, and so to its data, whatever they are now: the site's owner alone can begin another one, by another
`directory` in the site's own file. A ledger that is gone or damaged stops every private training.
"""

import os
from collections import Counter
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import (
    Count,
    is_regular,
    make_directory,
    read_bytes,
    seal,
    unseal,
    write_atomically,
    writing,
)
from fedtailor.client.private_queries import Cost, Level, Release, cost_in_epsilon
from fedtailor.engines.preparation import Prepared
from fedtailor.experiment import Experiment
from fedtailor.experiment.privacy import Privacy
from fedtailor.sites.plan import Plan
from fedtailor.sites.site_file import SECRET, SiteFile

LEDGER, LOCK = "ledger.json", "ledger.lock"


def training_cost(prepared: Prepared, n_samples: int) -> Cost:
    """Count what one training of a site with so many samples releases; nothing if it has no privacy to lose.

    A change with the client's own share of the noise counts by that share: the server sees it alone. Under secure
    aggregation it sees a sum, which has the shares of as many as it takes to open it.
    """
    privacy = prepared.terms.privacy
    if privacy is None or not prepared.terms.method.uploads:
        return {}
    assert privacy.noise is not None  # the plan says it
    if privacy.level == "sample":
        queries = prepared.private_queries(n_samples)
        return {Release("sample", privacy.noise, share): count for share, count in queries.items()}
    shares = max(prepared.terms.per_round, 1.0) if privacy.by == "clients" else 1.0
    return {Release("client", privacy.noise / (shares / prepared.terms.seen_together) ** 0.5): 1}


class _Line(BaseModel):
    """Releases of one kind, in the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    level: Level
    noise: Annotated[float, Field(gt=0)]
    share: Annotated[float, Field(gt=0, le=1)]
    count: Count


class Account(BaseModel):
    """The content of a site's ledger: the private trainings of all its runs, and what they released."""

    model_config = ConfigDict(frozen=True, strict=True)
    trainings: Count = 0
    releases: tuple[_Line, ...] = ()

    @property
    def cost(self) -> Counter[Release]:
        """All releases so far."""
        total = Counter[Release]()
        for line in self.releases:
            total[Release(line.level, line.noise, line.share)] += line.count
        return total


@dataclass(frozen=True)
class Budget:
    """The cost of one training at a site, and the most that all of them together may cost: ε as the site's own file
    says it, or as the plan does for samples; without both, what the rounds of one run of the plan cost."""

    privacy: Privacy
    training: Cost
    rounds: int
    epsilon: float | None = None

    @classmethod
    def of(cls, site: SiteFile, plan: Plan, training: Cost) -> "Budget | None":
        """The budget of a site in a plan; None where there is no privacy to lose."""
        terms = plan.terms()
        return cls(Privacy.parse(terms.privacy), training, terms.rounds, most(site, terms)) if training else None

    @property
    def run(self) -> Counter[Release]:
        """The cost of one run of the plan."""
        return _times(self.training, self.rounds)

    @property
    def limit(self) -> float:
        """The most that all private trainings may cost, as ε."""
        return cost_in_epsilon(self.run, self.privacy) if self.epsilon is None else self.epsilon

    def allows(self, before: Cost, trainings: int = 1) -> bool:
        """Find out whether so many more trainings are affordable."""
        after = Counter(before) + _times(self.training, trainings)
        if self.epsilon is None and after <= self.run:
            return True  # whatever the accountant's last digits
        return cost_in_epsilon(after, self.privacy) <= self.limit


def most(site: SiteFile, terms: Experiment) -> float | None:
    """The most ε that a site's file names, or its plan; None if what the plan's rounds cost is the most."""
    if site.epsilon is not None or terms.privacy is None:
        return site.epsilon
    # At client level the plan's ε may count on it being secret who takes part, which it is not for a site.
    samples = Privacy.parse(terms.privacy).level == "sample"
    return terms.epsilon if samples and isinstance(terms.epsilon, float) else None


def _times(cost: Cost, times: int) -> Counter[Release]:
    return Counter({release: times * count for release, count in cost.items()})


class Ledger:
    """The ledger in a site's directory."""

    def __init__(self, directory: Path) -> None:
        self.path, self._lock = directory / LEDGER, directory / LOCK

    def open(self) -> None:
        """Begin the ledger of a site that starts for the first time; one that is there goes on."""
        if not os.path.lexists(self.path):
            self._write(Account())

    def read(self) -> Account:
        """Read the ledger; refuse to go on without it."""
        if not os.path.lexists(self.path):
            raise self._lost("gone")
        try:
            if not is_regular(self.path):
                raise ValueError("it is a link, of which a new version would take the place")
            content = read_bytes(self.path)
            unseal(content)
            return Account.model_validate_json(content)
        except ValueError:
            raise self._lost("damaged") from None

    def _lost(self, how: str) -> FedtailorError:
        return FedtailorError(
            f"The ledger of private trainings, {self.path}, is {how}: bring back its newest copy; without one nobody "
            "knows what these data have answered, and for others the site's file takes another `directory`."
        )

    def spend(self, budget: Budget) -> None:
        """Write down one more training, before it begins; refuse it if it is not affordable."""
        from fedtailor.sites.nvflare.processes import alone  # not for Windows, where a site may look and not join

        make_directory(self.path.parent)
        with writing(self._lock), alone(self._lock):
            account = self.read()
            if not budget.allows(account.cost):
                raise FedtailorError(refusal(account, budget))
            after = account.cost + Counter(budget.training)
            lines = [_Line(**release._asdict(), count=count) for release, count in sorted(after.items())]
            self._write(Account(trainings=account.trainings + 1, releases=tuple(lines)))

    def _write(self, account: Account) -> None:
        make_directory(self.path.parent)
        write_atomically(self.path, seal(account.model_dump(mode="json"), pretty=True))


def account_of(site: SiteFile) -> Account:
    """Read a site's ledger; nothing is spent where the site has not started yet."""
    ledger = Ledger(site.private)
    started = (site.private / SECRET).exists() or os.path.lexists(ledger.path)
    return ledger.read() if started else Account()


def refusal(account: Account, budget: Budget) -> str:
    """Say why no training is affordable."""
    after, answered = cost_in_epsilon(account.cost + Counter(budget.training), budget.privacy), answered_so_far(account)
    if after == inf:
        return (
            f"The privacy of this site's data is spent: {answered}, with noise that hides single samples and not the "
            "whole site, as this plan promises."
        )
    return (
        f"The privacy of this site's data is spent: {answered}, and one more would cost ε = {after:.3g} in all, more "
        f"than {budget.limit:.3g} (`epsilon` in site.toml is the most)."
    )


def standing(account: Account, budget: Budget) -> str:
    """Say what is spent, what a run of the plan costs, and what all runs may cost."""
    run = cost_in_epsilon(budget.run, budget.privacy)
    said = (
        f"Here one run of the plan costs ε = {run:.3g}. So far {spent_so_far(account, budget.privacy)}. All together "
        f"may cost ε = {budget.limit:.3g} at most (`epsilon` in site.toml)"
    )
    return f"{said}." if budget.allows(account.cost, budget.rounds) else f"{said}: not all rounds will be answered."


def spent_so_far(account: Account, privacy: Privacy) -> str:
    """Say how many private trainings there were, and what they cost by the measure of a plan."""
    cost = cost_in_epsilon(account.cost, privacy)
    return f"{answered_so_far(account)}, which cost ε = {cost:.3g} at δ = {privacy.delta:g} ({privacy.level} level)"


def answered_so_far(account: Account) -> str:
    """Say how many private trainings there were."""
    one = account.trainings == 1
    return f"{account.trainings:,} private training{' was' if one else 's were'} answered"
