"""pFedFDA in NumPy: Gaussians by loops over samples, densities in the place of linear heads, β on a grid."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Gaussians = tuple[Array, Array]


def estimated(z: Array, labels: Sequence[int], common: Array, ridge: float) -> Gaussians:
    """The class means (of three samples at least, else the common one), and the covariance around them."""
    means = common.copy()
    for c in set(labels):
        rows = [row for row, label in zip(z, labels, strict=True) if label == c]
        if len(rows) > 2:
            means[c] = sum(rows[1:], rows[0]) / len(rows)
    covariance = np.zeros((z.shape[1], z.shape[1]))
    for row, label in zip(z, labels, strict=True):
        covariance += np.outer(row - means[label], row - means[label])
    return means, covariance / max(1, len(z) - 1) + ridge * np.eye(z.shape[1])


def mixed(beta: tuple[float, float], own: Gaussians, common: Gaussians) -> Gaussians:
    means, covariance = (b * one + (1 - b) * other for b, one, other in zip(beta, own, common, strict=True))
    return means, covariance


def log_posteriors(z: Array, gaussians: Gaussians, counts: Sequence[int]) -> Array:
    """The logarithm of every class's probability for every sample, by Bayes' rule from Gaussian densities."""
    means, covariance = gaussians
    covariance = 0.9999 * covariance + 1e-4 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    inverse = np.linalg.inv(covariance)
    frequencies = np.array(counts) / sum(counts) + 1e-4
    frequencies = frequencies / frequencies.sum()
    scores = np.empty((len(z), len(means)))
    for k, row in enumerate(z):
        for c, mean in enumerate(means):
            scores[k, c] = np.log(frequencies[c]) - (row - mean) @ inverse @ (row - mean) / 2
    scores -= scores.max(1, keepdims=True)
    found: Array = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return found


def cross_validation(
    beta: tuple[float, float],
    z: Array,
    labels: Sequence[int],
    halves: Sequence[Sequence[int]],
    common: Gaussians,
    ridge: float,
    counts: Sequence[int],
) -> float:
    """The cross-entropy of each half under Gaussians of the other."""
    loss = 0.0
    for one, other in (halves, halves[::-1]):
        own = estimated(z[list(one)], [labels[k] for k in one], common[0], ridge)
        scores = log_posteriors(z[list(other)], mixed(beta, own, common), counts)
        loss -= sum(scores[place, labels[k]] for place, k in enumerate(other)) / len(other)
    return loss
