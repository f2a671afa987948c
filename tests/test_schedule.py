"""Hyper-parameters that may be schedules over rounds: what may be written, what it means, and that it is kept."""

from math import cos, pi, sqrt
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor.cli.options import parse_assignments
from fedtailor.experiment import experiment_hash, make_experiment
from fedtailor.methods import find_method
from fedtailor.methods.pflego import PFLEGO
from fedtailor.training.schedule import factor_at, value_at
from tests.methods.problems import SMALL


@pytest.mark.parametrize(
    ("written", "values"),
    [
        (0.5, [0.5, 0.5, 0.5]),
        (2, [2.0, 2.0, 2.0]),
        ("0.5", [0.5, 0.5, 0.5]),
        ("3 / t", [3, 1.5, 1]),
        ("3/t", [3, 1.5, 1]),
        ("1e-1 / sqrt(t)", [0.1, 0.1 / sqrt(2), 0.1 / sqrt(3)]),
        ("1.0 / t^0.75", [1, 2**-0.75, 3**-0.75]),
        ("6 / (t + 2)", [2, 1.5, 1.2]),
        ("1 / (t + 1)^2", [1 / 4, 1 / 9, 1 / 16]),
        ("2 * 0.5^t", [1, 0.5, 0.25]),
        (" 2*0.5^T ", [1, 0.5, 0.25]),
    ],
)
def test_a_schedule_is_a_number_or_a_text_over_rounds(written: Any, values: list[float]) -> None:
    schedule = PFLEGO(joint_lr=written).joint_lr
    assert [value_at(schedule, t) for t in (1, 2, 3)] == pytest.approx(values, rel=1e-15)
    assert isinstance(schedule, str) == ("t" in str(written).lower())


@pytest.mark.parametrize(
    "nonsense",
    [
        *("", "t", "1 / x", "1 / (t + 2", "1 + t", "-1 / t", "__import__('os')", "1 / t / t", "2 * 3^t", "1/t^999"),
        *("nan", float("inf"), -0.1, None, []),
    ],
)
def test_nonsense_is_refused_with_examples(nonsense: Any) -> None:
    with pytest.raises(ft.FedtailorError) as refused:
        find_method("pflego", {"joint_lr": nonsense})
    assert str(refused.value).startswith(f"The parameter 'joint_lr' of pflego is {nonsense!r}, but it must be a number")
    assert "'1.0 / t'" in str(refused.value)


@pytest.mark.parametrize(
    ("written", "factors"),
    [
        ("constant", [1, 1, 1, 1, 1, 1]),
        ("step:2,0.5", [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ("STEP : 4, 1e-1", [1, 1, 1, 1, 0.1, 0.1]),
        ("cosine", [(1 + cos(pi * epoch / 6)) / 2 for epoch in range(6)]),
        ("cosine:0.2", [0.2 + 0.4 * (1 + cos(pi * epoch / 6)) for epoch in range(6)]),
        ("cosine:1", [1, 1, 1, 1, 1, 1]),
        ("warmup:4", [0.25, 0.5, 0.75, 1, 1, 1]),
        ("warmup:2,cosine", [0.5, 1, *((1 + cos(pi * epoch / 4)) / 2 for epoch in range(4))]),
        ("warmup:2, step:2,0.5", [0.5, 1, 1, 1, 0.5, 0.5]),
        ("warmup:2, 1 / t", [0.5, 1, 1, 1 / 2, 1 / 3, 1 / 4]),
        ("warmup:12,cosine", [t / 12 for t in range(1, 7)]),
        ("2 * 0.5^t", [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]),
    ],
)
def test_the_factors_of_a_learning_rate(written: str, factors: list[float]) -> None:
    experiment = make_experiment({"schedule": written, "step_schedule": written})
    assert experiment.schedule == experiment.step_schedule == written
    assert [factor_at(experiment.schedule, 6, t) for t in range(1, 7)] == pytest.approx(factors, rel=1e-14)
    assert factor_at(experiment.schedule, 6, 0) == 1.0  # before the first round: fine-tuning


@pytest.mark.parametrize(
    "nonsense",
    [
        *("", "cos", "step", "step:2", "step:0,0.5", "step:2,-1", "step:1,2", "cosine:", "cosine:-1", "warmup:0"),
        *("warmup", "warmup:2,warmup:2", "warmup:2,", "cosine,warmup:2", "0.5", 0.5, None, [], "0 / t", "2^t"),
    ],
)
def test_no_schedule_of_a_learning_rate(nonsense: Any) -> None:
    for name in ("schedule", "step_schedule"):
        with pytest.raises(ft.FedtailorError) as refused:
            make_experiment({name: nonsense})
        assert f"'{name}' is {nonsense!r}, but it must be constant, step:EVERY,FACTOR" in str(refused.value)


@pytest.mark.parametrize("written", [0.25, "1.0 / t", "0.5 / (t + 10)^0.75", "0.5 * 0.99^t"])
def test_a_schedule_is_kept_in_the_experiment_file(written: float | str, tmp_path: Path) -> None:
    ft.run("pflego", joint_lr=written, out=tmp_path / "run", **{**SMALL, "rounds": 2})
    again = ft.load(tmp_path / "run").experiment
    assert again.parameters["joint_lr"] == written
    assert find_method("pflego", again.parameters) == PFLEGO(joint_lr=written)
    longer = ft.resume(tmp_path / "run", rounds=3)
    assert longer.accuracy == ft.run("pflego", joint_lr=written, **{**SMALL, "rounds": 3}).accuracy


def test_two_schedules_are_two_experiments() -> None:
    experiment = make_experiment({"method": "pflego"})
    hashes = {
        experiment_hash(experiment, PFLEGO(joint_lr=written).model_dump()) for written in (1.0, "1.0", "1 / t", "2 / t")
    }
    assert len(hashes) == 3


def test_the_command_line_takes_a_schedule() -> None:
    assert parse_assignments(["joint_lr=1.0 / sqrt(t)", "head_lr=0.1"]) == {"joint_lr": "1.0 / sqrt(t)", "head_lr": 0.1}
