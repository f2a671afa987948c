"""kNN-Per with loops over samples and neighbours (Marfoq et al. 2022)."""

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]


def prediction(
    z: Sequence[float], softmax: Sequence[float], known: Rows, labels: Sequence[int], k: int, scale: float, lam: float
) -> list[float]:
    """The probability of each class for a sample with these features."""
    away = [sum((a - b) ** 2 for a, b in zip(z, other, strict=True)) for other in known]
    nearest = sorted(range(len(known)), key=lambda place: away[place])[:k]
    votes = [0.0] * len(softmax)
    for place in nearest:
        votes[labels[place]] += math.exp(-away[place] / (scale * len(z)))
    return [lam * vote / sum(votes) + (1 - lam) * p for vote, p in zip(votes, softmax, strict=True)]


def best_share(samples: Sequence[tuple[Sequence[float], Sequence[float], int]], known: Rows, labels: Sequence[int],
               k: int, scale: float) -> float:  # fmt: skip
    """The λ of 0, 0.1, … 1 with the highest likelihood of samples: features, softmax and class of each."""

    def likelihood(lam: float) -> float:
        found = [(prediction(z, softmax, known, labels, k, scale, lam), y) for z, softmax, y in samples]
        return sum(math.log(max(p[y], 1e-300)) for p, y in found)

    return max((tenth / 10 for tenth in range(11)), key=likelihood)
