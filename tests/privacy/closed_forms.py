"""Closed forms of privacy."""

from math import exp

from scipy.optimize import brentq
from scipy.stats import norm


def gaussian_epsilon(noise: float, releases: int, delta: float) -> float:
    """ε of Gaussian noise, exactly (Balle & Wang 2018, Theorem 8): releases together are one with noise σ/√T."""
    s = noise / releases**0.5
    excess = lambda e: norm.cdf(0.5 / s - e * s) - exp(e) * norm.cdf(-0.5 / s - e * s) - delta  # noqa: E731
    return float(brentq(excess, 0, 200))
