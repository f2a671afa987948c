"""Early stopping: the round in which it happens, against a slow version; and that nothing else changes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor.server.evaluation import early_stop
from fedtailor.server.records import RoundRecord
from fedtailor.studies.runner import done
from fedtailor.training.metrics import ACCURACY, METRICS
from tests.helpers import numbers

RMSE = METRICS["rmse"]
SMALL: dict[str, Any] = {"clients": 4, "model": "mlp:8", "epochs": 1, "lr": 0.5, "validation": 0.3, "seed": 3}
SMALL |= {"engine": "in-process", "rounds": 40}


def rounds_of(values: list[float | None], field: str = "validation_accuracy", every: int = 1) -> list[RoundRecord]:
    """Rounds with these validation values; with `every`, rounds in between that are not evaluated."""
    records = []
    for number in range(1, len(values) * every + 1):
        evaluated = number % every == 0
        given: dict[str, Any] = {field: values[number // every - 1]} if evaluated else {}
        records.append(
            RoundRecord(
                round=number, participants=[0], bytes_down=0, bytes_up=0, seconds=0, evaluated=int(evaluated), **given
            )
        )
    return records


@pytest.mark.parametrize(
    ("values", "patience", "stop"),
    [
        ([0.1, 0.2, 0.3], 1, None),
        ([0.1, 0.2, 0.2], 1, (3, 2)),  # as good is not better
        ([0.3, 0.2, 0.1], 2, (3, 1)),
        ([0.3, 0.2, 0.4, 0.3, 0.3, 0.3], 2, (5, 3)),
        ([0.3, 0.2, 0.4, 0.3], 3, None),
        ([0.3, 0.2, None, 0.4], 2, (3, 1)),  # a round without a value is not better
        ([None, None, 0.1, 0.2], 2, None),  # there must be something to be better than
        ([0.3, 0.2, 0.1, 0.9], None, None),
        ([], 1, None),
    ],
)
def test_a_run_stops_after_so_many_rounds_without_a_better_one(
    values: list[float | None], patience: int | None, stop: tuple[int, int] | None
) -> None:
    assert early_stop(rounds_of(values), patience, ACCURACY) == stop
    falling = [None if value is None else 1 - value for value in values]
    assert early_stop(rounds_of(falling, "validation_rmse"), patience, RMSE) == stop
    twice = early_stop(rounds_of(values, every=2), patience, ACCURACY)
    assert twice == (stop and (2 * stop[0], 2 * stop[1]))


def slow_stop(values: list[float], patience: int) -> int:
    """The first round of which none of the last `patience` rounds is better than all before them."""
    for round in range(patience + 1, len(values) + 1):
        if max(values[round - patience : round]) <= max(values[: round - patience]):
            return round
    return len(values)


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_it_is_the_beginning_of_the_run_without_it(patience: int) -> None:
    whole = ft.run("fedavg", **SMALL)
    values = [record.validation_accuracy for record in whole.rounds]
    short = ft.run("fedavg", **SMALL, patience=patience)
    stop = slow_stop([value for value in values if value is not None], patience)
    assert len(short.rounds) == stop < 40
    last = short.rounds[-1]
    assert short.stopped == f"stopped after round {stop}: {last.stop}"
    assert numbers([*short.rounds[:-1], replace(last, stop="")]) == numbers(whole.rounds[:stop])
    assert short.finished
    best = max(range(stop), key=lambda place: values[place] or 0)
    assert short.stopped == f"stopped after round {stop}: no better validation accuracy since round {best + 1}"
    assert short.experiment.evaluation.choose == "best-validation"
    assert short.accuracy == short.rounds[best].accuracy
    assert short.validation == values[best]


def test_the_rule_of_choosing_can_be_another() -> None:
    short = ft.run("fedavg", **SMALL, patience=1, choose="last")
    assert short.accuracy == short.rounds[-1].accuracy


@pytest.mark.parametrize("at", [2, 3, 4, 5])
def test_a_run_that_was_interrupted_stops_in_the_same_round(at: int, tmp_path: Path) -> None:
    def stop(record: RoundRecord) -> None:
        if record.round == at:
            raise KeyboardInterrupt

    settings = {**SMALL, "patience": 2, "checkpoint_every": 2}
    whole = ft.run("fedavg", **settings, out=tmp_path / "whole")
    assert len(whole.rounds) >= 5
    with pytest.raises(KeyboardInterrupt):
        ft.run("fedavg", **settings, out=tmp_path / "run", on_round=stop)
    resumed = ft.resume(tmp_path / "run")
    assert numbers(resumed.rounds) == numbers(whole.rounds)
    for result in (ft.load(tmp_path / "run"), ft.load(tmp_path / "whole")):
        assert result.finished
        assert result.stopped == whole.stopped
        written = json.loads((result.path / "result.json").read_text())  # type: ignore[operator]
        assert written["stopped"] == whole.stopped
    again = ft.resume(tmp_path / "run", rounds=60)  # it has stopped, however long it might be
    assert numbers(again.rounds) == numbers(whole.rounds)
    assert done(tmp_path / "run") is not None


def test_a_comparison_says_which_runs_stopped(tmp_path: Path) -> None:
    settings = {name: value for name, value in SMALL.items() if name != "seed"}
    table = ft.compare(["local", "fedavg"], seeds=[0], patience=2, out=tmp_path / "out", **settings)
    rounds = [len(line.results[0].rounds) for line in table.lines]
    assert all(count < 40 for count in rounds)
    assert table.lines[0].results[0].experiment.evaluation.choose == "best-validation"
    said = f"2 of 2 runs stopped early, after {min(rounds)} to {max(rounds)} rounds: no better validation accuracy in 2"
    assert said in table.summary.caption
    assert "Not finished" not in table.summary.caption
    again: list[str] = []
    ft.compare(
        ["local", "fedavg"],
        seeds=[0],
        patience=2,
        out=tmp_path / "out",
        on_run=lambda t, r: again.append(t),
        **settings,
    )
    assert again == []  # a run that stopped is finished


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"validation": 0.0}, "No client has validation samples to stop early by"),
        ({"evaluate_every": 0}, "Nothing is evaluated to stop early by"),
        ({"patience": 0}, "'evaluation.patience' is 0, but it must be at least 1"),
    ],
)
def test_patience_needs_something_to_wait_for(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ft.FedtailorError, match=said):
        ft.run("fedavg", **{**SMALL, "patience": 2, **settings}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
