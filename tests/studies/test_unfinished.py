"""Advice and training that is not finished: what counts as a rise, and what is done about it. And the correction of
the best candidate's interval for having been chosen."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import make_experiment
from fedtailor.studies.advice import (
    ALONE,
    GLOBAL,
    LEVEL,
    MOST,
    PILOT,
    RUNGS,
    Advice,
    Decision,
    _budget,
    _decide,
    _experiment,
    _first_rung,
    _interval,
    advise,
)
from fedtailor.studies.candidate import Candidate
from fedtailor.training.metrics import ACCURACY, Metric, find_metric

SMALL: dict[str, Any] = {"data": "digits", "clients": 10, "model": "mlp:32", "validation": 0.25, "epochs": 2,
                         "engine": "in-process"}  # fmt: skip


def curve(values: Any, first: int = 1, metric: Metric = ACCURACY) -> Candidate:
    points = {n: float(value) for n, value in enumerate(values, first)}
    return Candidate("ditto", make_experiment({}), rounds=max(points), curve=points, metric=metric)


class TestRise:
    def test_it_is_the_gain_of_the_last_half_of_the_rounds(self) -> None:
        assert curve([0.1 * n for n in range(1, 9)]).rise() == pytest.approx(0.4)
        bent = curve(
            [*(0.1 * n for n in range(1, 7)), *[0.6] * 7]
        )  # 12 rounds later than the first, flat since the 6th
        assert bent.rise() == pytest.approx(0.0, abs=1e-9)
        assert curve([0.5, 0.62, 0.66], first=6).rise() > 0.05  # three points, and they are not on a line

    def test_a_curve_that_falls_has_none(self) -> None:
        assert curve(np.linspace(0.9, 0.7, 12)).rise() == 0.0

    def test_of_an_error_the_fall_is_the_rise(self) -> None:
        error = find_metric("rmse", "numbers")
        assert curve(np.linspace(60.0, 50.0, 11), 10, error).rise() == pytest.approx(10.0)
        assert curve(np.linspace(50.0, 60.0, 11), 10, error).rise() == 0.0

    def test_one_bad_round_is_none(self) -> None:
        assert curve([0.8, 0.5, 0.8, 0.8, 0.8, 0.8, 0.8], first=6).rise() == 0.0
        assert curve([0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.9], first=6).rise() == pytest.approx(0.0, abs=0.08)
        assert curve([0.2, float("nan"), 0.6, 0.8], first=4).rise() > 0.2  # nor one in which it diverged
        assert curve([0.5], first=4).rise() == curve([float("nan"), 0.5], first=4).rise() == 0.0

    @pytest.mark.parametrize("points", [7, 9])
    def test_noise_is_none_and_a_rise_is_seen_through_it(self, points: int) -> None:
        rng = np.random.default_rng(0)
        noise = [0.8 + rng.normal(0, 0.03, points) for _ in range(500)]
        assert np.mean([curve(values, points).rise() > 0 for values in noise]) < 0.08
        rising = [values + np.linspace(0, 0.1, points) for values in noise]
        assert np.mean([curve(values, points).rise() > 0.01 for values in rising]) > 0.7


def finalist(title: str, mean: float, rise: float, rounds: int = 12, metric: Metric = ACCURACY) -> Candidate:
    """A candidate whose 30 clients differ little and whose curve ended with a straight rise."""
    values = {client: mean + 0.001 * (client % 3 - 1) for client in range(30)}
    points = {n: mean - metric.score(rise) * (rounds - n) / (rounds / 2) for n in range(rounds // 2, rounds + 1)}
    counts = dict.fromkeys(values, 1000)
    return Candidate(
        title, make_experiment({}), rounds=rounds, values=values, n_samples=counts, metric=metric, curve=points
    )


def decided(*candidates: Candidate) -> Decision:
    return _decide(list(candidates), draws=999)


class TestUnfinishedTraining:
    def test_five_points_ahead_while_all_rise_by_ten_decides_nothing(self) -> None:
        """Thirty people's activities: 50 and 55 % after 12 rounds, on a task that ends above 90 %."""
        best, base = finalist("fedrod", 0.55, 0.1), finalist(GLOBAL, 0.5, 0.1)
        answer = decided(best, base)
        assert answer.p < LEVEL  # of the difference there is no doubt
        assert (answer.chosen, answer.unfinished) == (None, True)
        assert answer.rising == pytest.approx({GLOBAL: 0.1, "fedrod": 0.1})
        assert decided(finalist("fedrod", 0.55, 0.0), finalist(GLOBAL, 0.5, 0.0)).chosen == "fedrod"

    def test_whoever_is_behind_may_catch_up(self) -> None:
        flat = finalist("fedrod", 0.9, 0.0)
        assert decided(flat, finalist(GLOBAL, 0.8, 0.06)).chosen is None
        far = decided(flat, finalist(GLOBAL, 0.5, 0.06))
        assert (far.chosen, far.unfinished) == ("fedrod", False)
        assert far.rising == pytest.approx({GLOBAL: 0.06})  # which is said
        behind = finalist(GLOBAL, 0.9, 0.0), finalist("fedrod", 0.8, 0.07)
        assert decided(*behind).chosen is None
        assert decided(finalist(GLOBAL, 0.9, 0.0), finalist("fedrod", 0.5, 0.07)).chosen == GLOBAL

    def test_another_personal_one_may_get_ahead(self) -> None:
        base, first = finalist(GLOBAL, 0.5, 0.0), finalist(ALONE, 0.9, 0.0)
        assert decided(first, finalist("fedper", 0.88, 0.03), base).chosen is None
        assert decided(first, finalist("fedper", 0.88, 0.012), base).chosen == ALONE
        both = finalist(ALONE, 0.9, 0.03), finalist("fedper", 0.88, 0.03), base  # none gets ahead of the other
        assert decided(*both).chosen == ALONE

    def test_less_than_the_margin_is_no_rise(self) -> None:
        assert decided(finalist("fedrod", 0.93, 0.009), finalist(GLOBAL, 0.91, 0.009)).chosen == "fedrod"
        assert decided(finalist("fedrod", 0.93, 0.011), finalist(GLOBAL, 0.91, 0.011)).chosen is None

    def test_of_an_error_the_margin_is_1_percent(self) -> None:
        error = find_metric("rmse", "numbers")
        for rise, chosen in ((0.4, "fedrod"), (6.0, None)):
            best, base = finalist("fedrod", 45.0, rise, metric=error), finalist(GLOBAL, 50.0, rise, metric=error)
            assert decided(best, base).chosen == chosen

    def test_after_as_many_rounds_as_a_run_has_the_answer_stands(self) -> None:
        answer = decided(finalist("fedrod", 0.55, 0.1, MOST), finalist(GLOBAL, 0.5, 0.1, MOST))
        assert (answer.chosen, answer.unfinished) == ("fedrod", False)
        assert set(answer.rising) == {GLOBAL, "fedrod"}

    def test_the_budget_that_it_asks_for_is_that_of_the_longest_race(self) -> None:
        for slower in (1.0, 1.99):
            assert RUNGS[-1] * _first_rung(_budget(3.7), slower * 3.7) == MOST
        assert RUNGS[-1] * _first_rung(_budget(3.7) / 2.5, 3.7) < MOST


def test_the_race_that_it_asks_for_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real race on digits, the shortest one, and then the one that it asks for. In between, 33 points become 7."""
    experiment = make_experiment({**SMALL, "partition": "classes:2"})

    def race(first_rung: int) -> Advice:
        monkeypatch.setattr("fedtailor.studies.advice._first_rung", lambda budget, seconds: first_rung)
        return advise(experiment, 0.01, (GLOBAL, ALONE))

    early = race(PILOT + 1)
    assert (early.chosen, early.unfinished) == (None, True)
    assert GLOBAL in early.rising
    assert early.budget is not None
    late = race(MOST // RUNGS[-1])
    assert (late.chosen, late.unfinished, late.budget) == (ALONE, False, None)
    assert late.gain < early.gain / 2


def test_to_measure_along_the_way_changes_nothing() -> None:
    found = []
    for along in (False, True):
        experiment = make_experiment({**SMALL, "clients": 4, "model": "mlp:8"})
        its = prepare(_experiment(experiment, "fedavg, fine-tuned"), Objects())
        one = Candidate("fedavg, fine-tuned", experiment, Simulation(its), metric=its.terms.metric)
        assert one.simulation is not None
        one.simulation.start()
        one.advance(3, lambda *_: None, along)
        one.advance(20, lambda *_: None, along)
        one.simulation.close()
        found.append(one)
    assert found[0].values == found[1].values
    assert list(found[0].curve) == [3, 20]
    assert list(found[1].curve) == [1, 2, 3, 5, 7, 9, 11, 13, 15, 17, 19, 20]
    assert found[1].curve[20] == found[1].mean


# --- the interval of the best of several ---


def equal(rng: np.random.Generator, clients: int, rivals: int, metric: Metric) -> list[Candidate]:
    """Candidates that are equally good, and differ by each client's luck alone."""
    values = rng.normal(0.7, 0.05, clients) + rng.normal(0, 0.03, (rivals + 1, clients))
    counts = dict.fromkeys(range(clients), 100)
    return [
        Candidate(title, make_experiment({}), None, 0.0, 8, dict(enumerate(of_clients)), counts, metric=metric)
        for title, of_clients in zip([GLOBAL, *(f"m{k}" for k in range(rivals))], values, strict=True)
    ]


def coverage(decide: Callable[[list[Candidate]], tuple[float, float]]) -> float:
    """How often the interval of the best of eight equal candidates has zero, their gain, in it."""
    rng, metric = np.random.default_rng(3), find_metric("auc", "classes")
    ends = [decide(equal(rng, 20, 8, metric)) for _ in range(600)]
    return float(np.mean([low <= 0 <= high for low, high in ends]))


def test_the_interval_of_the_best_of_equal_candidates_covers_their_gain() -> None:
    """In 95 % of all races, up to three standard errors of 600 of them; without the correction, in 80 %."""
    error = 3 * (0.05 * 0.95 / 600) ** 0.5
    assert 0.95 - error <= coverage(lambda candidates: _decide(candidates, draws=999).interval) <= 0.95 + 1.5 * error

    def uncorrected(candidates: list[Candidate]) -> tuple[float, float]:
        base = candidates[0]
        best = max(candidates[1:], key=lambda one: one.mean)
        return _interval(best, base, 1.0 if abs(best.gain(base)) < 0.01 else 0.0)

    assert coverage(uncorrected) < 0.9


def test_those_that_left_the_race_early_count_too() -> None:
    """The finalists are the best of all, by the same samples."""
    candidates = equal(np.random.default_rng(0), 20, 8, ACCURACY)
    candidates[1].values = {client: value + 0.03 for client, value in candidates[1].values.items()}
    all_of_them = _decide(candidates, draws=9_999)
    best = next(one for one in candidates if one.title == all_of_them.best)
    rest = [one for one in candidates if one not in (best, candidates[0])]
    for one in rest:
        one.rounds = 4
    finalists = _decide([candidates[0], best, *rest], draws=9_999)
    assert (finalists.p, finalists.interval) == (all_of_them.p, all_of_them.interval)
    alone = _decide([candidates[0], best], draws=9_999)
    assert 0 < alone.p == pytest.approx(all_of_them.p / 8)
    assert alone.interval[1] - alone.interval[0] < 0.8 * (all_of_them.interval[1] - all_of_them.interval[0])


def test_the_interval_excludes_zero_if_and_only_if_the_p_value_is_below_the_level() -> None:
    rng, found = np.random.default_rng(1), []
    for _ in range(300):
        one, base = equal(rng, int(rng.integers(3, 25)), 1, ACCURACY)[::-1]
        shift = rng.normal(0, 0.03)
        one.values = {client: value + shift for client, value in one.values.items()}
        number = int(rng.integers(1, 9))
        others = [Candidate(f"out {k}", one.experiment, rounds=1, values=one.values) for k in range(number - 1)]
        answer = _decide([one, base, *others], draws=999)
        low, high = answer.interval
        assert (low > 0 or high < 0) == (answer.p < LEVEL)
        assert low <= answer.gain <= high
        found.append(answer.p < LEVEL)
    assert 0.2 < np.mean(found) < 0.8
