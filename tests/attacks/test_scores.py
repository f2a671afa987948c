"""Scores of reconstructions, against loops over pixels."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtailor.attacks.scores import BEST_PSNR, Score, assigned, score, ssim, verdict


def images(count: int, seed: int, shape: tuple[int, ...] = (1, 9, 8)) -> Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_identical_images() -> None:
    x = images(3, 0)
    assert score(x, x.clone(), 1.0) == [Score(0.0, BEST_PSNR, 1.0)] * 3


def test_squared_error_and_psnr_by_hand() -> None:
    x = torch.full((1, 1, 8, 8), 0.5)
    (found,) = score(x, x + 0.1, 1.0)
    assert found.mse == pytest.approx(0.01)
    assert found.psnr == pytest.approx(20.0, abs=1e-5)
    (signed,) = score(x, x + 0.1, 2.0)
    assert signed.psnr == pytest.approx(20.0 + 20 * math.log10(2), abs=1e-5)


def slow_ssim(one: np.ndarray, other: np.ndarray, span: float, side: int) -> float:
    values = []
    for channel in range(one.shape[0]):
        for top in range(one.shape[1] - side + 1):
            for left in range(one.shape[2] - side + 1):
                x = one[channel, top : top + side, left : left + side].ravel()
                y = other[channel, top : top + side, left : left + side].ravel()
                covariance = np.cov(x, y, bias=True)
                c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
                above = (2 * x.mean() * y.mean() + c1) * (2 * covariance[0, 1] + c2)
                below = (x.mean() ** 2 + y.mean() ** 2 + c1) * (covariance[0, 0] + covariance[1, 1] + c2)
                values.append(above / below)
    return float(np.mean(values))


@pytest.mark.parametrize(("shape", "side"), [((1, 9, 8), 7), ((3, 10, 7), 7), ((1, 5, 9), 5)])
@pytest.mark.parametrize("span", [1.0, 2.0])
def test_ssim_is_that_of_a_loop_over_windows(shape: tuple[int, ...], side: int, span: float) -> None:
    one, other = images(2, 1, shape)
    assert ssim(one, other, span) == pytest.approx(slow_ssim(one.numpy(), other.numpy(), span, side), abs=1e-9)


def test_reconstructions_are_assigned_to_their_samples() -> None:
    x, order = images(5, 2), [3, 0, 4, 1, 2]
    assert [order[place] for place in assigned(x, x[order] + 0.01)] == [0, 1, 2, 3, 4]


def test_the_assignment_has_the_smallest_sum() -> None:
    """The nearest guess is that of another sample: 0 is guessed as 0.4, so that 0.5 need not be guessed as −1."""
    true, guessed = torch.tensor([[0.0], [0.5]]), torch.tensor([[-1.0], [0.4]])
    assert assigned(true, guessed) == [0, 1]
    assert assigned(true, guessed.flip(0)) == [1, 0]


def test_verdicts() -> None:
    mean = Score(0.1, 10.0, 0.2)
    assert verdict(mean, mean) == "nothing"
    assert verdict(Score(0.001, 30.0, 0.99), mean) == "copy"
    assert verdict(Score(0.0011, 30.0, 0.61), mean) == "recognisable"  # 0.2 + half of 0.8
    assert verdict(Score(0.0011, 30.0, 0.59), mean) == "nothing"
    numbers = Score(2.0, None, None)
    assert [verdict(Score(mse, None, None), numbers) for mse in (0.02, 1.0, 1.01)] == [
        "copy",
        "recognisable",
        "nothing",
    ]
