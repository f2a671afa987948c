"""Robust rules against slow versions that follow the papers' definitions, number by number."""

import math
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtailor.server.aggregation import rules as robust_rules
from fedtailor.server.aggregation.rules import (
    geometric_median,
    krum,
    median,
    multi_krum,
    nearest,
    squared_distances,
    trimmed,
    trimmed_mean,
)

Rows = list[list[float]]
SIZES = (1, 2, 3, 4, 5, 8, 11, 12)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
KINDS = pytest.mark.parametrize("kind", ["random", "ties", "equal", "huge"])


def matrix(n: int, kind: str = "random", dtype: torch.dtype = torch.float64, columns: int = 7, seed: int = 0) -> Tensor:
    """A row a client: normal numbers, a few whole numbers, all rows equal, or rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed + n)
    normal = torch.randn(n, columns, generator=generator, dtype=dtype)
    if kind == "ties":
        return (2 * normal).round()
    if kind == "equal":
        return normal[:1].repeat(n, 1)
    return normal * 10.0 ** torch.arange(n, dtype=dtype)[:, None] if kind == "huge" else normal


def close(found: Tensor, expected: list[float], dtype: torch.dtype) -> None:
    """Equal up to the rounding of the result's type."""
    assert found.dtype == dtype
    rounding = 4 * torch.finfo(dtype).eps
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=rounding, atol=rounding)


@pytest.fixture(params=[20, 1 << 19], ids=["small blocks", "one block"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust_rules, "BLOCK", request.param)


# --- each column by itself ---


def slow_trimmed(rows: Rows, ends: int) -> list[float]:
    found = []
    for column in zip(*rows, strict=True):
        left = sorted(column)
        for _ in range(ends):
            left.remove(min(left))
            left.remove(max(left))
        found.append(math.fsum(left) / len(left))
    return found


def slow_median(rows: Rows) -> list[float]:
    found = []
    for column in zip(*rows, strict=True):
        ordered, middle = sorted(column), len(column) // 2
        found.append(ordered[middle] if len(column) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)
    return found


@TYPES
@KINDS
@pytest.mark.usefixtures("blocks")
def test_the_median_of_each_column(dtype: torch.dtype, kind: str) -> None:
    for n in SIZES:
        rows = matrix(n, kind, dtype)
        close(median(rows), slow_median(rows.tolist()), dtype)


@TYPES
@KINDS
@pytest.mark.usefixtures("blocks")
def test_the_trimmed_mean_of_each_column(dtype: torch.dtype, kind: str) -> None:
    for n, share in product(SIZES, [0.0, 0.1, 0.2, 0.25, 1 / 3, 0.4, 0.49]):
        rows = matrix(n, kind, dtype)
        rows /= rows.abs().max()  # a sum of huge numbers rounds by their size
        close(trimmed_mean(rows, share), slow_trimmed(rows.tolist(), math.floor(share * n + 1e-12)), dtype)


def test_so_many_are_trimmed_as_the_share_says_in_decimals() -> None:
    assert [trimmed(n, 0.2) for n in (1, 4, 5, 9, 10, 20)] == [0, 0, 1, 1, 2, 4]
    assert trimmed(100, 0.29) == 29  # 28.999… in floating point
    assert trimmed(10, 0.3) == 3
    assert [trimmed(2, 0.4999999999), trimmed(4, 0.4999999999)] == [0, 1]  # something is always left


@pytest.mark.parametrize("n", [1, 2, 7])
@TYPES
def test_a_mean_that_trims_nothing_is_the_mean(n: int, dtype: torch.dtype) -> None:
    rows = matrix(n, dtype=dtype)
    close(trimmed_mean(rows, 0.0), rows.double().mean(0).tolist(), dtype)


# --- Krum ---


def slow_krum(rows: Rows, f: int, m: int) -> list[int]:
    """The m clients with the smallest scores (Blanchard et al. 2017, Section 4), smaller numbers first among equals."""
    n, scores = len(rows), []
    for i in range(n):
        away = sorted(
            math.fsum((a - b) ** 2 for a, b in zip(rows[i], rows[j], strict=True)) for j in range(n) if j != i
        )
        scores.append((math.fsum(away[: n - f - 2]), i))
    return [i for _, i in sorted(scores)[:m]]


FITTING = [(3, 0), (4, 0), (5, 1), (8, 0), (8, 2), (11, 4), (12, 3)]  # n ≥ 2f + 3


@TYPES
@KINDS
@pytest.mark.usefixtures("blocks")
def test_krum_returns_the_row_with_the_smallest_score(dtype: torch.dtype, kind: str) -> None:
    for n, f in FITTING:
        rows = matrix(n, kind, dtype)
        (chosen,) = slow_krum(rows.tolist(), f, 1)
        assert torch.equal(krum(rows, f), rows[chosen])


@KINDS
@pytest.mark.usefixtures("blocks")
def test_multi_krum_averages_the_best(kind: str) -> None:
    for (n, f), m, seed in product(FITTING, (1, 2, 3), range(3)):
        rows = matrix(n, kind, seed=100 * seed)
        chosen = slow_krum(rows.tolist(), f, m)
        assert nearest(squared_distances(rows), f, m) == sorted(chosen)
        expected = [math.fsum(column) / m for column in zip(*(rows[i].tolist() for i in chosen), strict=True)]
        np.testing.assert_allclose(multi_krum(rows, f, m).numpy(), expected, rtol=1e-12)


def test_ties_go_to_the_smaller_number() -> None:
    squares = squared_distances(torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]]))  # scores with f = 1: 5, 2, 2, 2, 5
    assert [nearest(squares, 1, m) for m in (1, 2, 4)] == [[1], [1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("n", [3, 4, 9])
def test_multi_krum_of_all_without_hostile_clients_is_the_mean(n: int) -> None:
    rows = matrix(n)
    np.testing.assert_allclose(multi_krum(rows, 0, n).numpy(), rows.mean(0).numpy(), rtol=1e-12)


@pytest.mark.parametrize(("n", "f", "m"), [(2, 0, 1), (4, 1, 1), (6, 2, 1), (3, 0, 4)])
def test_krum_of_too_few_is_refused(n: int, f: int, m: int) -> None:
    with pytest.raises(ValueError, match=f"Krum needs at least {max(2 * f + 3, m)} clients, and there are {n}"):
        multi_krum(matrix(n), f, m)


def test_distances_of_equal_rows_are_zero_and_of_huge_ones_infinite() -> None:
    rows = torch.cat([matrix(3, "equal"), torch.full((1, 7), 1e300, dtype=torch.float64)])
    squares = squared_distances(rows)
    assert squares[:3, :3].tolist() == [[0.0] * 3] * 3
    assert squares[3, :3].tolist() == [math.inf] * 3
    assert squares[3, 3] == 0


# --- the geometric median ---


def slow_geometric_median(rows: Rows, steps: int, start: list[float] | None = None) -> list[float]:
    """Weiszfeld's algorithm on the points themselves, from their mean (Pillutla et al. 2022, Algorithm 2)."""
    point = start or [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    for _ in range(steps):
        beta = [1 / max(1e-6, math.dist(row, point)) for row in rows]
        point = [
            math.fsum(b * x for b, x in zip(beta, column, strict=True)) / math.fsum(beta)
            for column in zip(*rows, strict=True)
        ]
    return point


def objective(rows: Rows, point: list[float]) -> float:
    return math.fsum(math.dist(row, point) for row in rows)


@TYPES
@pytest.mark.usefixtures("blocks")
def test_the_geometric_median_is_that_of_the_slow_algorithm(dtype: torch.dtype) -> None:
    for n in SIZES:
        rows = matrix(n, dtype=dtype)
        expected = slow_geometric_median(rows.tolist(), 500)
        atol = 1e-6 if dtype == torch.float32 else 1e-7
        np.testing.assert_allclose(geometric_median(rows).double().numpy(), expected, rtol=0, atol=atol)


@KINDS
def test_no_point_has_a_smaller_sum_of_distances(kind: str) -> None:
    for n in SIZES:
        rows = matrix(n, kind)
        least = objective(rows.tolist(), geometric_median(rows).tolist())
        others = torch.cat([rows, median(rows)[None], rows.mean(0)[None]]).tolist()
        slack = n * 1e-6  # ν for each client (Pillutla et al. 2022, Section 3)
        for point in [*others, slow_geometric_median(rows.tolist(), 300)]:
            assert least <= objective(rows.tolist(), point) * (1 + 1e-9) + slack


def test_corners_of_a_square_a_majority_and_points_on_a_line() -> None:
    square = torch.tensor([[0.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 2.0]], dtype=torch.float64)
    assert geometric_median(square).tolist() == pytest.approx([1.0, 1.0], abs=1e-12)
    majority = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [9.0, -4.0], [0.0, 70.0]], dtype=torch.float64)
    assert geometric_median(majority).tolist() == pytest.approx([1.0, 2.0], abs=1e-5)
    line = torch.tensor([[-7.0], [1.0], [3.0], [4.0], [100.0]], dtype=torch.float64)
    assert geometric_median(line).tolist() == pytest.approx([3.0], abs=1e-5)


def test_a_huge_row_costs_the_others_no_digits_wherever_it_is() -> None:
    rows = matrix(7)
    rows[0] = 1e30 * rows[0]
    last = rows[[1, 2, 3, 4, 5, 6, 0]]
    start = median(rows).tolist()
    np.testing.assert_allclose(
        geometric_median(rows).numpy(), slow_geometric_median(rows.tolist(), 500, start), atol=1e-7
    )
    np.testing.assert_allclose(geometric_median(last).numpy(), geometric_median(rows).numpy(), atol=1e-7)


# --- what holds for all ---

RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "median": median,
    "trimmed": lambda rows: trimmed_mean(rows, 0.3),
    "krum": lambda rows: krum(rows, 3),
    "multi-krum": lambda rows: multi_krum(rows, 3, 4),
    "geometric-median": geometric_median,
}
EVERY = pytest.mark.parametrize("rule", RULES)


@EVERY
@TYPES
def test_the_order_of_the_clients_does_not_matter(rule: str, dtype: torch.dtype) -> None:
    rows = matrix(10, dtype=dtype)
    expected = RULES[rule](rows)
    for seed in range(10):
        order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(RULES[rule](rows[order]), expected, rtol=1e-6, atol=1e-6)


@EVERY
@TYPES
@pytest.mark.parametrize("lie", [1e9, -1e9, 3e38, "spread", "1e300"])
@pytest.mark.parametrize("where", [(0, 1, 2), (1, 4, 8)])
def test_hostile_clients_do_not_move_it_out_of_the_honest_range(
    rule: str, dtype: torch.dtype, lie: float | str, where: tuple[int, ...]
) -> None:
    rows = matrix(10, dtype=dtype)
    honest = rows[[row for row in range(10) if row not in where]]
    for number, row in enumerate(where):
        if lie == "spread":
            rows[row] = 10.0 ** (3 + 5 * number) * torch.randn(7, generator=torch.Generator().manual_seed(row))
        else:
            rows[row] = lie if isinstance(lie, float) else (1e300 if dtype == torch.float64 else 1e30)
    found = RULES[rule](rows)
    # The geometric median is no coordinate-wise rule: it is within 2 (n − f) / (n − 2f) of the honest ones' farthest.
    margin = 3.5 * (honest - honest.mean(0)).norm(dim=1).max() if rule == "geometric-median" else 0.0
    assert (found >= honest.amin(0) - margin).all()
    assert (found <= honest.amax(0) + margin).all()
    if rule in ("krum", "multi-krum"):
        assert found.abs().max() <= honest.abs().max()


@EVERY
@TYPES
def test_equal_clients_have_one_result(rule: str, dtype: torch.dtype) -> None:
    rows = matrix(10, "equal", dtype)
    close(RULES[rule](rows), rows[0].tolist(), dtype)


@EVERY
def test_rows_are_left_as_they_were_and_may_be_empty(rule: str) -> None:
    rows = matrix(10)
    before = rows.clone()
    RULES[rule](rows)
    assert torch.equal(rows, before)
    assert RULES[rule](rows[:, :0]).shape == (0,)


@pytest.mark.parametrize("rule", ["krum", "geometric-median"])
def test_buffers_count_in_no_distance(rule: str) -> None:
    """Columns 2 to 3 and 6 are absurd in the clients that are nearest to all others, and come along as they are."""
    rows = matrix(10)
    absurd = rows.clone()
    absurd[:, [2, 3, 6]] *= 1e6 * torch.arange(1, 11)[:, None]
    buffers = [slice(2, 4), slice(6, 7)]
    rest = [0, 1, 4, 5]
    if rule == "krum":
        (chosen,) = slow_krum(rows[:, rest].tolist(), 2, 1)
        assert slow_krum(absurd.tolist(), 2, 1) != [chosen]
        assert torch.equal(krum(absurd, 2, buffers), absurd[chosen])
    else:
        found = geometric_median(absurd, buffers)
        np.testing.assert_allclose(found[rest].numpy(), slow_geometric_median(rows[:, rest].tolist(), 500), atol=1e-7)
        beta = [1 / math.dist(row, found[rest].tolist()) for row in rows[:, rest].tolist()]
        expected = [math.fsum(b * x for b, x in zip(beta, c, strict=True)) / sum(beta) for c in absurd[:, [2, 3, 6]].T]
        np.testing.assert_allclose(found[[2, 3, 6]].numpy(), expected, rtol=1e-6)


@EVERY
def test_temporary_memory_does_not_grow_with_the_columns(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    blocks = robust_rules._blocks

    def noted(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for place, block in blocks(rows):
            sizes.append(block.numel())
            yield place, block

    monkeypatch.setattr(robust_rules, "_blocks", noted)
    monkeypatch.setattr(robust_rules, "BLOCK", 1000)
    RULES[rule](matrix(10, columns=5003))
    assert max(sizes) <= 1000
    assert len(sizes) >= 51
