"""Rules of aggregation that some hostile clients cannot move, as functions of a matrix with a row for each client.

All of them compute in double precision and work through blocks of columns: beside the matrix and the result they need
memory for a few blocks. The matrix is in the memory of the CPU: not every device has double precision.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 19  # numbers in a block of columns: 4 MiB in double precision
SMOOTHING = 1e-6  # ν of the smoothed Weiszfeld algorithm: the smallest distance that a client counts with
MOST_STEPS = 10_000  # of the Weiszfeld algorithm, each on n numbers
LARGEST = 1e100  # numbers beyond count as this one, so that squares are finite


def median(matrix: Tensor) -> Tensor:
    """Compute the median of each column (of an even number, the mean of the two in the middle): it tolerates any
    hostile clients that are fewer than half."""
    return _mean_without(matrix, (len(matrix) - 1) // 2)


def trimmed_mean(matrix: Tensor, share: float) -> Tensor:
    """Compute the mean of each column without its ⌊share · n⌋ smallest and as many largest numbers (Yin et al. 2018):
    it tolerates ⌊share · n⌋ hostile clients of n."""
    return _mean_without(matrix, trimmed(len(matrix), share))


def krum(matrix: Tensor, hostile: int, buffers: Sequence[slice] = ()) -> Tensor:
    """Return the row that is nearest to its neighbours (Blanchard et al. 2017): it tolerates `hostile` clients = f of
    n ≥ 2f + 3."""
    return multi_krum(matrix, hostile, 1, buffers)


def multi_krum(matrix: Tensor, hostile: int, count: int, buffers: Sequence[slice] = ()) -> Tensor:
    """Compute the mean of the `count` rows that are nearest to their neighbours (Blanchard et al. 2017): it tolerates
    `hostile` clients = f of n ≥ 2f + 3, if it takes no more than n − f rows."""
    return mean_of(matrix, nearest(squared_distances(matrix, buffers), hostile, count))


def geometric_median(matrix: Tensor, buffers: Sequence[slice] = ()) -> Tensor:
    """Compute the point with the smallest sum of distances to all rows, by the smoothed Weiszfeld algorithm (RFA,
    Pillutla et al. 2022): it tolerates any hostile clients that are fewer than half."""
    weights = _weiszfeld(_products(matrix, buffers))
    point = matrix.new_empty(matrix.shape[1])
    for place, block in _blocks(matrix):
        point[place] = weights @ block.clamp(-LARGEST, LARGEST)
    return point


def trimmed(n: int, share: float) -> int:
    """Count what a trimmed mean of n numbers leaves out at either end: ⌊share · n⌋, where 0.29 · 100 is 29."""
    return min(math.floor(share * n + 1e-9), (n - 1) // 2)


def squared_distances(matrix: Tensor, buffers: Sequence[slice] = ()) -> Tensor:
    """Compute the squared distances between all rows, in double precision and without these columns.

    They are sums of squared differences: equal rows have a distance of exactly 0, and a huge row spoils no others'.
    """
    n = len(matrix)
    squares = torch.zeros(n, n, dtype=torch.float64)
    for block in _measured(matrix, buffers):
        for row in range(n - 1):
            squares[row, row + 1 :] += (block[row + 1 :] - block[row]).square_().sum(1)
    return squares + squares.T


def nearest(squares: Tensor, hostile: int, count: int) -> list[int]:
    """Choose the `count` rows with the smallest Krum scores, the first of equals: the score of a row is the sum of its
    squared distances to the n − f − 2 nearest others."""
    n = len(squares)
    if n < 2 * hostile + 3 or count > n:
        raise ValueError(f"Krum needs at least {max(2 * hostile + 3, count)} clients, and there are {n}")
    others = squares.clone().fill_diagonal_(-1.0).sort(dim=1).values[:, 1:]  # a row itself comes first
    scores = others[:, : n - hostile - 2].sum(1)
    return sorted(scores.argsort(stable=True)[:count].tolist())


def mean_of(matrix: Tensor, rows: Sequence[int]) -> Tensor:
    """Compute the mean of these rows."""
    mean = matrix.new_empty(matrix.shape[1])
    for place, block in _blocks(matrix):
        mean[place] = block[rows].mean(0)
    return mean


def _mean_without(matrix: Tensor, ends: int) -> Tensor:
    """Compute the mean of each column without so many of its numbers at either end."""
    mean = matrix.new_empty(matrix.shape[1])
    for place, block in _blocks(matrix):
        mean[place] = _sorted(block)[ends : len(block) - ends].mean(0)
    return mean


def _products(matrix: Tensor, buffers: Sequence[slice]) -> Tensor:
    """Compute the scalar products of all rows, seen from their coordinate-wise median: there huge rows do not cost the
    others their digits."""
    products = torch.zeros(len(matrix), len(matrix), dtype=torch.float64)
    half = (len(matrix) - 1) // 2
    for block in _measured(matrix, buffers):
        block = block.clamp(-LARGEST, LARGEST)
        block -= _sorted(block)[half : len(block) - half].mean(0)
        products += block @ block.T
    return products


def _weiszfeld(products: Tensor) -> Tensor:
    """Compute the weights w of the geometric median z = Σ w_i x_i from the scalar products of the x_i.

    β_i = 1 / max(ν, ‖x_i − z‖), w = β / Σ β, again and again: every z is a weighted mean of the rows, so that their
    products are enough to know its distances.
    """
    n = len(products)
    weights = torch.full((n,), 1 / n, dtype=torch.float64)
    for _ in range(MOST_STEPS):
        towards = products @ weights
        squares = products.diagonal() - 2 * towards + weights @ towards
        beta = 1 / squares.clamp(min=0).sqrt().clamp(min=SMOOTHING)
        change = beta / beta.sum() - weights
        weights = weights + change
        # The step of z against the harmonic mean of the distances, which no distant client can make large.
        if (change @ products @ change).clamp(min=0).sqrt() <= 1e-9 * n / beta.sum():
            break
    return weights


def _blocks(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the columns in blocks of double precision, and their places."""
    columns = matrix.shape[1]
    width = max(1, BLOCK // len(matrix))
    for first in range(0, columns, width):
        place = slice(first, min(first + width, columns))
        yield place, matrix[:, place].double()


def _measured(matrix: Tensor, buffers: Sequence[slice]) -> Iterator[Tensor]:
    """Yield the columns that count in distances."""
    counted = torch.ones(matrix.shape[1], dtype=torch.bool)
    for buffer in buffers:
        counted[buffer] = False
    for place, block in _blocks(matrix):
        yield block if counted[place].all() else block[:, counted[place]]


def _sorted(block: Tensor) -> Tensor:
    """Sort each column; NumPy does it six times as fast as PyTorch."""
    return torch.from_numpy(np.sort(block.numpy(), axis=0))
