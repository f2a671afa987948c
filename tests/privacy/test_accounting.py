"""The accountant against closed forms, numerical integrals and published values."""

from math import comb, exp, inf, log

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from fedtailor._common.errors import FedtailorError
from fedtailor.privacy.accountant import HOPELESS, Releases, noise_for, rounded_up, spent
from tests.privacy.closed_forms import gaussian_epsilon

DELTA = 1e-5


def sampled_epsilon(noise: float, share: float, delta: float) -> float:
    """ε of one release with Poisson sampling, by the integral of the hockey-stick divergence in both directions."""

    def divergence(e: float, removed: bool) -> float:
        def density(x: float) -> tuple[float, float]:
            without, with_one = norm.pdf(x, 0, noise), norm.pdf(x, 1, noise)
            mixed = (1 - share) * without + share * with_one
            return (mixed, without) if removed else (without, mixed)

        def integrand(x: float) -> float:
            p, q = density(x)
            return max(p - exp(e) * q, 0.0)

        return float(quad(integrand, -12 * noise, 12 * noise + 1, limit=800)[0])

    return float(brentq(lambda e: max(divergence(e, True), divergence(e, False)) - delta, 1e-6, 20))


@pytest.mark.parametrize(("noise", "count"), [(1.0, 1), (5.0, 30), (0.7, 2), (20.0, 400)])
def test_epsilon_of_gaussian_noise_is_the_closed_form(noise: float, count: int) -> None:
    found, exact = spent([Releases(noise, count)], DELTA), gaussian_epsilon(noise, count, DELTA)
    assert exact <= found.epsilon + 1e-6
    assert found.epsilon == pytest.approx(exact, rel=2e-3)
    assert found.epsilon <= found.rdp <= 1.25 * exact + 0.1


@pytest.mark.parametrize(("noise", "share"), [(1.0, 0.1), (0.6, 0.5), (2.0, 0.25)])
def test_epsilon_of_sampled_noise_is_the_integral(noise: float, share: float) -> None:
    found, exact = spent([Releases(noise, 1, "poisson", share)], DELTA), sampled_epsilon(noise, share, DELTA)
    assert exact - 1e-4 <= found.epsilon <= exact * 1.01 + 2e-3


def moments_accountant(noise: float, share: float, steps: int, delta: float) -> float:
    """ε as Abadi et al. 2016 compute it: the least (T α(λ) + log 1/δ) / λ, with α(λ) by the binomial formula."""

    def moment(order: int) -> float:
        terms = [
            comb(order + 1, k) * (1 - share) ** (order + 1 - k) * share**k * exp((k * k - k) / (2 * noise**2))
            for k in range(order + 2)
        ]
        return log(sum(terms))

    return min((steps * moment(order) + log(1 / delta)) / order for order in range(1, 33))


@pytest.mark.parametrize(
    ("noise", "share", "steps", "published"),
    [
        (4.0, 0.01, 10_000, 1.26),  # Abadi et al. 2016, Section 3.2
        (1.3, 250 / 60_000, 15 * 240, 1.18),  # the tutorial of TensorFlow Privacy: batches of 250, 15 epochs
        (1.1, 250 / 60_000, 60 * 240, 2.92),  # the same, 60 epochs
    ],
)
def test_published_values(noise: float, share: float, steps: int, published: float) -> None:
    """Published values come out by the older bound that they were computed with; ours are tighter, and not absurdly."""
    older = moments_accountant(noise, share, steps, DELTA)
    assert older == pytest.approx(published, rel=0.04)
    found = spent([Releases(noise, steps, "poisson", share)], DELTA)
    assert 0.7 * older < found.epsilon < found.rdp < older


def test_releases_of_several_kinds_add_up() -> None:
    parts = [Releases(2.0, 10, "poisson", 0.2), Releases(2.0, 20, "poisson", 0.2)]
    assert spent(parts, DELTA) == spent([Releases(2.0, 30, "poisson", 0.2)], DELTA)
    unlike = [Releases(3.0, 4), Releases(6.0, 4)]  # 4/9 + 4/36 = 5/9 of a release with noise 1
    assert spent(unlike, DELTA).epsilon == pytest.approx(gaussian_epsilon(1.0 / (5 / 9) ** 0.5, 1, DELTA), rel=2e-3)
    assert spent([], DELTA) == spent([Releases(1.0, 0)], DELTA) == (0.0, 0.0)


def test_fixed_number_of_participants_lies_between_poisson_and_all() -> None:
    for noise, sampled in ((1.0, 20), (5.0, 20), (5.0, 2)):
        fixed = spent([Releases(noise, 30, "fixed", sampled=sampled, population=100)], DELTA)
        poisson = spent([Releases(noise, 30, "poisson", sampled / 100)], DELTA)
        assert poisson.epsilon < fixed.epsilon <= spent([Releases(noise, 30)], DELTA).epsilon
    # Sampling helps where few take part: less than all of them would cost.
    assert fixed.epsilon < 0.5 * spent([Releases(5.0, 30)], DELTA).epsilon


def test_fixed_number_pays_for_twice_the_clip() -> None:
    """A client that is not drawn makes room for another: the sum moves by 2 C, and noise σ C is σ/2 of that."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent, rdp

    accountant = rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant.compose(SampledWithoutReplacementDpEvent(100, 2, GaussianDpEvent(2.5)), 30)
    found = spent([Releases(5.0, 30, "fixed", sampled=2, population=100)], DELTA)
    assert found.rdp == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-12)


def test_noise_that_protects_nobody_is_not_computed_at_length() -> None:
    found = spent([Releases(1e-3, 1000)], DELTA)
    assert found.epsilon == found.rdp > HOPELESS
    assert found.epsilon < inf


def test_noise_is_found_for_a_budget() -> None:
    def cost(noise: float) -> float:
        return spent([Releases(noise, 30, "poisson", 0.2)], DELTA).epsilon

    for epsilon in (0.5, 2.0, 8.0):
        noise = noise_for(epsilon, cost)
        assert cost(noise) <= epsilon < cost(0.998 * noise)
    with pytest.raises(FedtailorError, match="No noise below"):
        noise_for(1e-7, cost)


def test_noise_is_rounded_up_to_four_digits() -> None:
    assert rounded_up(0.99512) == 0.9952
    assert rounded_up(12.341) == 12.35
    assert rounded_up(12.34) == 12.34
    assert all(rounded_up(x) >= x * (1 - 1e-12) for x in np.geomspace(0.01, 1e4, 500))
