"""Scores of reconstructions: squared error, PSNR and SSIM against the true samples, after the best assignment."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import avg_pool2d

WINDOW = 7  # pixels on a side in which SSIM compares images
BEST_PSNR = 100.0  # of equal images, in dB: infinity is no number for a file
HALF = 0.5  # of the way from the mean image to the true one: from there on, a reconstruction is recognisable
COPY = 0.01  # of the mean image's squared error: below it, a reconstruction is a copy

Verdict = Literal["copy", "recognisable", "nothing"]


@dataclass(frozen=True)
class Score:
    """One sample's reconstruction. PSNR and SSIM are of images alone; the label was recovered or not."""

    mse: float
    psnr: float | None
    ssim: float | None
    label: bool | None = None


def assigned(true: Tensor, guessed: Tensor) -> list[int]:
    """The number of the guess for each true sample, by the assignment with the smallest sum of squared errors."""
    errors = torch.cdist(true.flatten(1).double(), guessed.flatten(1).double()).square() / true[0].numel()
    return [int(column) for column in linear_sum_assignment(errors.cpu().numpy())[1]]


def score(
    true: Tensor, guessed: Tensor, span: float | None, labels: Sequence[bool | None] | None = None
) -> list[Score]:
    """Score reconstructions of samples in the same order. `span` is the range of an image's pixels; None: no images."""
    found = []
    for number, (one, other) in enumerate(zip(true.double(), guessed.double(), strict=True)):
        mse = float((one - other).square().mean())
        label = labels[number] if labels else None
        if span is None:
            found.append(Score(mse, None, None, label))
        else:
            psnr = 10 * math.log10(span**2 / mse) if mse > 0 else BEST_PSNR
            found.append(Score(mse, min(psnr, BEST_PSNR), ssim(one, other, span), label))
    return found


def ssim(one: Tensor, other: Tensor, span: float) -> float:
    """The mean structural similarity of two images (channels × height × width) over windows (Wang et al. 2004).

    (2 μ_x μ_y + c₁)(2 σ_xy + c₂) / ((μ_x² + μ_y² + c₁)(σ_x² + σ_y² + c₂)) with c = (0.01 L)², (0.03 L)², in uniform
    windows of 7 × 7, or of the image's smaller side.
    """
    side = min(WINDOW, *one.shape[-2:])
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2

    def mean(images: Tensor) -> Tensor:
        return avg_pool2d(images[None], side, stride=1)[0]

    x, y = mean(one), mean(other)
    xx, yy, xy = mean(one * one) - x * x, mean(other * other) - y * y, mean(one * other) - x * y
    value = (2 * x * y + c1) * (2 * xy + c2) / ((x * x + y * y + c1) * (xx + yy + c2))
    return float(value.mean())


def verdict(found: Score, mean: Score) -> Verdict:
    """Judge a reconstruction against the mean image of the data set, which is no leak.

    It is a copy if its squared error is at most 1 % of the mean image's. It is recognisable if it is at least half of
    the way from the mean image to the true one: by SSIM for images, and by the squared error for other samples.
    """
    if found.mse <= COPY * mean.mse:
        return "copy"
    if found.ssim is not None and mean.ssim is not None:
        return "recognisable" if found.ssim - mean.ssim >= HALF * (1 - mean.ssim) else "nothing"
    return "recognisable" if found.mse <= (1 - HALF) * mean.mse else "nothing"
