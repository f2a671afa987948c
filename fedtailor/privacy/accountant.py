"""The privacy that rounds have cost, ε at a given δ, by Google's dp-accounting (the extra `privacy`).

Two accountants: privacy loss distributions (PLD), which are tight, and Rényi divergences (RDP) beside them. Both give
upper bounds; where both apply, the smaller one counts. Neighbouring federations differ in one client, or one sample,
whose contribution is zero in one of them.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from fedtailor._common.errors import FedtailorError
from fedtailor._common.extras import install_command

Sampling = Literal["all", "poisson", "fixed"]
# Width of the discretised losses, for few releases and for more than MANY: upper bounds at most two percent above those
# of 1e-4, in a tenth of the time.
COARSE, FINE, MANY = 5e-3, 1e-3, 500
ORDERS = (1.5, 2, 2.5, *range(3, 33), 40, 48, 64, 96, 128, 256, 512)  # of RDP: the usual ones without the slow
LEAST_NOISE, MOST_NOISE = 0.05, 1e4  # that is looked for
HOPELESS = 100.0  # an ε that protects nobody: no memory is spent on a tighter one
DIGITS = 4  # of noise that was found: it is rounded up, so that the last digits of a search do not count


@dataclass(frozen=True)
class Releases:
    """So many releases of a clipped sum with Gaussian noise, over a random part of the contributions.

    `noise` is the noise's deviation as a multiple of the clip. Sampling: all contribute; each with probability `share`
    (Poisson); or a fixed number of `sampled` out of `population`.
    """

    noise: float
    count: int = 1
    sampling: Sampling = "all"
    share: float = 1.0
    sampled: int = 1
    population: int = 1


class Spent(NamedTuple):
    """The privacy that was spent: ε by the tighter accountant, and by RDP."""

    epsilon: float
    rdp: float


def spent(releases: Iterable[Releases], delta: float) -> Spent:
    """Compute ε at δ of all these releases together. None at all cost nothing."""
    merged: dict[Releases, int] = {}
    for each in releases:
        key = Releases(each.noise, 1, each.sampling, each.share, each.sampled, each.population)
        merged[key] = merged.get(key, 0) + each.count
    together = tuple((kind, count) for kind, count in merged.items() if count)
    return _spent(together, delta) if together else Spent(0.0, 0.0)


@lru_cache(maxsize=4096)
def _spent(releases: tuple[tuple[Releases, int], ...], delta: float) -> Spent:
    rdp = _rdp(releases, delta, sampled=True)
    if rdp > HOPELESS:
        return Spent(rdp, rdp)
    if not any(each.sampling == "fixed" for each, _ in releases):
        return Spent(min(_pld(releases, delta), rdp), rdp)
    # A fixed number of participants: PLD has no such bound, but that all take part in every round is one.
    plain = tuple((Releases(each.noise), count) for each, count in releases)
    return Spent(min(rdp, _pld(plain, delta), _rdp(plain, delta, sampled=False)), rdp)


def _pld(releases: tuple[tuple[Releases, int], ...], delta: float) -> float:
    _, pld, _ = _library()
    many = sum(count for _, count in releases) > MANY
    accountant = pld.PLDAccountant(value_discretization_interval=FINE if many else COARSE)
    for each, count in releases:
        accountant.compose(_event(each), count)
    return float(accountant.get_epsilon(delta))


def _rdp(releases: tuple[tuple[Releases, int], ...], delta: float, sampled: bool) -> float:
    accounting, _, rdp = _library()
    fixed = sampled and any(each.sampling == "fixed" for each, _ in releases)
    relation = accounting.NeighboringRelation
    accountant = rdp.RdpAccountant(ORDERS, relation.REPLACE_ONE if fixed else relation.ADD_OR_REMOVE_ONE)
    for each, count in releases:
        accountant.compose(_event(each), count)
    return float(accountant.get_epsilon(delta))


def _event(release: Releases) -> Any:
    accounting, _, _ = _library()
    if release.sampling == "fixed" and release.sampled < release.population:
        # Who is not among a fixed number stands aside for somebody else: the sum then moves by up to twice the clip.
        halved = accounting.GaussianDpEvent(release.noise / 2)
        return accounting.SampledWithoutReplacementDpEvent(release.population, release.sampled, halved)
    gaussian = accounting.GaussianDpEvent(release.noise)
    if release.sampling == "poisson" and release.share < 1:
        return accounting.PoissonSampledDpEvent(release.share, gaussian)
    return gaussian


def noise_for(epsilon: float, cost: Callable[[float], float]) -> float:
    """Find the smallest noise, to four digits, whose cost is at most ε."""
    low, high = LEAST_NOISE, 1.0
    while cost(high) > epsilon:
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise FedtailorError(
                f"No noise below {MOST_NOISE:g} times the clip brings ε down to {epsilon:g}: allow a larger one, or "
                "fewer rounds."
            )
    while rounded_up(low) < rounded_up(high) and high - low > high * 10.0**-DIGITS:
        middle = (low + high) / 2
        low, high = (low, middle) if cost(middle) <= epsilon else (middle, high)
    return rounded_up(high)


def rounded_up(noise: float) -> float:
    """Round up to four digits."""
    unit = 10.0 ** (math.floor(math.log10(noise)) + 1 - DIGITS)
    return round(math.ceil(noise / unit - 1e-9) * unit, 12)


@lru_cache(maxsize=1)
def _library() -> tuple[Any, Any, Any]:
    """Import dp-accounting, and have it say nothing of orders that it leaves out."""
    try:
        import dp_accounting
        from dp_accounting import pld, rdp
    except ImportError:
        raise FedtailorError(f"dp-accounting is not installed: {install_command('privacy')}.") from None
    logging.getLogger("absl").setLevel(logging.ERROR)
    return dp_accounting, pld, rdp
