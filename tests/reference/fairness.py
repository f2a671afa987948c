"""FedAvg with fair weights on quadratic clients f_i(θ) = ½(θ − c_i)ᵀH_i(θ − c_i), in NumPy, a full step each."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class SlowFair:
    """`q` is the power of q-FFL's weights; with `step` they are AFL's mixture, which climbs with this step."""

    centres: Array
    curvatures: Array
    samples: Array
    lr: float
    q: float = 0.0
    step: float | None = None
    theta: Array = field(init=False)
    mixture: Array = field(init=False)

    def __post_init__(self) -> None:
        self.theta = np.zeros(self.centres.shape[1])
        self.mixture = self.samples / self.samples.sum()

    def round(self, participants: list[int]) -> None:
        losses, ends = [], []
        for i in participants:
            away = self.theta - self.centres[i]
            losses.append(0.5 * away @ self.curvatures[i] @ away)
            ends.append(self.theta - self.lr * self.curvatures[i] @ away)
        weights = [self.samples[i] * f**self.q for i, f in zip(participants, losses, strict=True)]
        if self.step is not None:
            weights = [self.mixture[i] for i in participants]
            climbed = self.mixture.copy()
            for i, f in zip(participants, losses, strict=True):
                climbed[i] += self.step * f * len(self.mixture) / len(participants)
            self.mixture = projected(climbed)
        self.theta = np.average(ends, axis=0, weights=weights)


def projected(point: Array) -> Array:
    """The nearest point of the simplex is max(x − τ, 0), with the τ that makes its sum 1: found by bisection."""
    low, high = point.min() - 1, point.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(point - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(point - high, 0)
