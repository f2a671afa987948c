"""A run that `on_round` stops: in which round, what is recorded, and that it stays stopped."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor._common.files import append, unseal
from fedtailor.cli.run import show
from fedtailor.cli.watch import Watched
from fedtailor.server.records import RoundRecord
from fedtailor.studies.runner import done
from tests.helpers import assert_same, final, numbers

SMALL: dict[str, Any] = {"clients": 3, "model": "mlp:4", "epochs": 1, "max_train": 20, "engine": "in-process"}
WHY = "stopped after round 3: good enough"


def at(round: int, said: Any = "good enough") -> Any:
    """A function that asks to stop after this round."""
    return lambda record: said if record.round == round else None


def test_a_text_stops_a_run_and_stays_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = ft.run("ditto", rounds=3, **SMALL)
    result = ft.run("ditto", rounds=8, out=tmp_path / "run", on_round=at(3), **SMALL)
    assert numbers([*result.rounds[:2], replace(result.rounds[2], stop="")]) == numbers(whole.rounds)
    assert_same(final(result), final(whole))
    again = ft.resume(tmp_path / "run")
    for found in (result, ft.load(tmp_path / "run"), again):
        assert (found.stopped, found.finished, len(found.rounds)) == (WHY, True, 3)
    assert json.loads((tmp_path / "run/result.json").read_text())["stopped"] == WHY
    assert done(tmp_path / "run") is not None
    assert ft.resume(tmp_path / "run", rounds=9).stopped == WHY  # it has stopped, however long it might be
    show(tmp_path / "run")
    assert f"ditto: {WHY}." in " ".join(capsys.readouterr().out.split())
    watched = Watched(tmp_path / "run")
    watched.look()
    assert watched.finished


def test_the_record_is_sealed_like_one_that_was_written_once(tmp_path: Path) -> None:
    ft.run("ditto", rounds=8, out=tmp_path / "run", on_round=at(3), **SMALL)
    lines, before = (tmp_path / "run/rounds.jsonl").read_bytes().splitlines(keepends=True), ""
    assert [json.loads(line)["stop"] for line in lines] == ["", "", "good enough"]
    for line in lines:
        before = unseal(line, before)


@pytest.mark.parametrize(("said", "reason"), [(True, "on_round said so"), ("two\n lines ", "two lines")])
def test_true_and_any_text_stop(said: Any, reason: str) -> None:
    assert ft.run("ditto", rounds=8, on_round=at(3, said), **SMALL).stopped == f"stopped after round 3: {reason}"


@pytest.mark.parametrize("said", [None, False, "", " ", 0.0, 1, [3]])
def test_anything_else_goes_on(said: Any) -> None:
    result = ft.run("local", rounds=4, on_round=at(3, said), **SMALL)
    assert (len(result.rounds), result.stopped) == (4, None)


def test_a_run_that_did_all_its_rounds_was_not_stopped() -> None:
    result = ft.run("local", rounds=3, on_round=at(3), **SMALL)
    assert (result.stopped, result.finished) == (None, True)


def test_the_first_reason_stays(tmp_path: Path) -> None:
    settings = {**SMALL, "patience": 1, "validation": 0.3, "lr": 0.5, "rounds": 40}
    by_patience = ft.run("fedavg", **settings)
    rounds = len(by_patience.rounds)
    assert rounds < 40
    assert by_patience.stopped is not None
    both = ft.run("fedavg", on_round=at(rounds), out=tmp_path / "run", **settings)
    assert both.stopped == ft.load(tmp_path / "run").stopped == by_patience.stopped


@pytest.mark.parametrize("written", [False, True])
def test_a_run_killed_while_the_reason_is_written_repeats_the_round(
    written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, content: bytes, end: int) -> None:
        if b"good enough" not in content or written:
            append(path, content, end)
        if b"good enough" in content:
            raise KeyboardInterrupt

    monkeypatch.setattr("fedtailor.server.run_directory.append", killed)
    with pytest.raises(KeyboardInterrupt):
        ft.run("ditto", rounds=8, out=tmp_path / "run", on_round=at(3), **SMALL)
    monkeypatch.undo()
    assert len(ft.load(tmp_path / "run").rounds) == 2 + written
    resumed = ft.resume(tmp_path / "run", on_round=at(3))
    assert resumed.stopped == ft.load(tmp_path / "run").stopped == WHY


def test_a_comparison_names_the_run_and_goes_on_with_the_others(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def stop(title: str, record: RoundRecord) -> str | None:
        seen.append((title, record.round))
        return "good enough" if title == "ditto, seed 0" and record.round == 2 else None

    for out in (None, tmp_path / "out"):
        seen.clear()
        table = ft.compare(["local", "ditto"], seeds=[0], rounds=3, out=out, on_round=stop, **SMALL)
        assert seen == [*(("local, seed 0", n) for n in (1, 2, 3)), *(("ditto, seed 0", n) for n in (1, 2))]
        assert [len(line.results[0].rounds) for line in table.lines] == [3, 2]
        assert "1 of 2 runs stopped early, after 2 to 2 rounds: good enough." in table.summary.caption
    again = ft.compare(["local", "ditto"], seeds=[0], rounds=3, out=tmp_path / "out", **SMALL)
    assert [len(line.results[0].rounds) for line in again.lines] == [3, 2]  # a run that stopped is finished


def test_tuning_stops_the_runs_of_the_chosen_settings() -> None:
    pytest.importorskip("optuna")
    seen: list[tuple[str, int]] = []

    def stop(title: str, record: RoundRecord) -> bool:
        seen.append((title, record.round))
        return record.round == 2

    tuning = ft.tune(["fedavg"], trials=1, validation=0.3, rounds=3, on_round=stop, **SMALL)
    assert seen == [("fedavg, seed 0", 1), ("fedavg, seed 0", 2)]
    assert tuning["fedavg"].results[0].stopped == "stopped after round 2: on_round said so"


def test_a_run_that_is_made_longer_keeps_its_privacy_budget(tmp_path: Path) -> None:
    """Its last round may be the last one that is affordable, which only a longer run makes a reason to stop."""
    settings = {**SMALL, "privacy": "client, clip=1.0, noise=2.0, delta=1e-3"}
    spent = [record.epsilon for record in ft.run("fedavg", rounds=3, **settings).rounds]
    limit = (spent[1] + spent[2]) / 2  # two rounds fit
    result = ft.run("fedavg", rounds=2, epsilon=limit, out=tmp_path / "run", **settings)
    assert (len(result.rounds), result.stopped) == (2, None)
    longer = ft.resume(tmp_path / "run", rounds=5)
    assert (len(longer.rounds), longer.epsilon) == (2, spent[1])
    assert "stopped after round 2: one more would cost" in str(longer.stopped)
