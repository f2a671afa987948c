"""Noise for privacy: moments, tails, independence, and where it comes from."""

from collections.abc import Callable
from math import erf, log, sqrt

import pytest
import torch
from torch import Tensor

from fedtailor.privacy.noise import Noise
from fedtailor.training.streams import torch_stream

SOURCES: dict[str, Callable[[], Noise]] = {"stream": lambda: Noise(torch_stream(3, "privacy", 1, 2)), "system": Noise}
both = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


def distance(drawn: Tensor, distribution: Callable[[float], float]) -> float:
    """The Kolmogorov–Smirnov statistic √n · sup |F_n − F|; it exceeds 2.5 once in 130 000 times."""
    values, n = drawn.double().sort().values.tolist(), len(drawn)
    gaps = [max((k + 1) / n - distribution(x), distribution(x) - k / n) for k, x in enumerate(values)]
    return sqrt(n) * max(gaps)


@both
@pytest.mark.parametrize("std", [1.0, 0.3])
def test_noise_is_normal(make: Callable[[], Noise], std: float) -> None:
    drawn = make().normal(torch.empty(20_001), std)
    assert drawn.dtype == torch.float32
    assert drawn.shape == (20_001,)
    assert distance(drawn, lambda x: (1 + erf(x / std / sqrt(2))) / 2) < 2.5
    scaled = drawn.double() / std
    assert abs(scaled.mean()) < 5 / sqrt(len(drawn))
    assert abs(scaled.var() - 1) < 5 * sqrt(2 / len(drawn))
    beyond = (scaled.abs() > 3).double().mean()  # 0.0027 of a normal distribution
    assert abs(beyond - 0.0027) < 5 * sqrt(0.0027 / len(drawn))
    assert distance(scaled[::2] * scaled[1::2].sign().repeat(2)[:10_001], lambda x: (1 + erf(x / sqrt(2))) / 2) < 2.5


@both
def test_uniform_numbers_are_uniform_and_below_one(make: Callable[[], Noise]) -> None:
    drawn = make().uniform(20_000)
    assert drawn.dtype == torch.float64
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert distance(drawn, lambda x: x) < 2.5


@both
def test_two_draws_differ_and_are_uncorrelated(make: Callable[[], Noise]) -> None:
    noise, like = make(), torch.empty(3, 4000)
    first, second = noise.normal(like, 1.0), noise.normal(like, 1.0)
    assert first.shape == like.shape
    assert abs((first * second).mean()) < 5 / sqrt(like.numel())
    half = like.numel() // 2  # of the two halves of Box and Muller's pairs
    assert abs((first.flatten()[:half] * first.flatten()[half:]).mean()) < 5 / sqrt(half)
    assert noise.seed() != noise.seed()


@both
def test_pytorchs_own_generator_is_neither_used_nor_moved(make: Callable[[], Noise]) -> None:
    torch.manual_seed(1)
    before, first = torch.get_rng_state(), make().normal(torch.empty(9), 1.0)
    make().uniform(5)
    assert torch.equal(before, torch.get_rng_state())
    again = make().normal(torch.empty(9), 1.0)
    assert torch.equal(first, again) == (make is SOURCES["stream"])


def test_the_systems_noise_comes_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda n: b"\xff" * n)
    assert Noise().uniform(2).tolist() == [1 - 2**-53] * 2
    largest = Noise().normal(torch.empty(1, dtype=torch.float64), 2.0).item()
    assert largest == pytest.approx(2 * sqrt(2 * 53 * log(2)))  # twice √(−2 ln 2⁻⁵³)
    monkeypatch.setattr("os.urandom", lambda n: b"\0" * n)
    assert Noise().normal(torch.empty(3), 1.0).tolist() == [0.0, 0.0, 0.0]
