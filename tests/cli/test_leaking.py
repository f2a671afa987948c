"""`fedtailor leak` on the command line."""

import json
from pathlib import Path

import pytest

from fedtailor.attacks.leakage import Row
from fedtailor.attacks.study import Study
from fedtailor.engines.preparation import Prepared
from tests.cli.calling import Call, contents, done, refusal

QUICK = ("--clients", 3, "--max-train", 20, "--model", "mlp:20", "--inversion", "analytic")


def test_the_table_and_the_record(call: Call) -> None:
    text = done(call("leak", "fedavg", "pflego", *QUICK, "--victims", 2, "--set", "inner_steps=5", "--out", "leaks"))
    lines = [line.split() for line in text.splitlines() if line.strip()]
    rows = {line[0]: line for line in lines}
    assert rows["fedavg"][-3:] == ["all", "2", "copied"]
    assert rows["pflego"][-3:] == ["all", "2", "copied"]
    assert rows["noise"][-2:] == ["no", "leak"]
    assert "mean image" in text
    assert "1 % of its squared error" in text
    assert "Recorded in leaks: leakage.json, leakage.md, leakage.png" in text


def test_json_is_the_record(call: Call) -> None:
    plain = json.loads(done(call("leak", "fedavg", *QUICK, "--out", "leaks", "--json")))
    assert plain == json.loads(Path("leaks/leakage.json").read_text("utf-8"))
    assert plain["question"]["attack"]["kind"] == "analytic"


def test_parameters_go_to_the_methods_that_have_them(call: Call) -> None:
    """With one inner step, a new client's head is known."""
    plain = json.loads(done(call("leak", "fedavg", "pflego", *QUICK, "--set", "inner_steps=1", "--json")))
    assert [row["matched"] for row in plain["methods"]] == ["the model's change over 5 steps", "the body's gradient"]


def test_refusals(call: Call) -> None:
    assert refusal(call, "leak", "local") == "Local uploads nothing: there is nothing to invert."
    assert refusal(call, "leak", "fedavg", "local") == "Local uploads nothing: there is nothing to invert."
    assert "no inversion 'best'" in refusal(call, "leak", "fedavg", "--inversion", "best")
    assert "not a file" in refusal(call, "leak", "experiment.toml")
    assert "'mu'" in refusal(call, "leak", "fedavg", "--set", "mu=1")


def test_an_interrupt_shows_what_is_done_and_records_nothing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Study.attack

    def stopped(made: Study, prepared: Prepared, on_step: object) -> Row:
        if prepared.experiment.method == "pgfed":
            raise KeyboardInterrupt
        return whole(made, prepared)

    monkeypatch.setattr(Study, "attack", stopped)
    before = contents(Path.cwd())
    answer = call("leak", "fedavg", "pgfed", *QUICK, "--out", "leaks")
    assert answer.code == 130
    assert answer.err == "Interrupted: nothing is recorded.\n"
    assert "fedavg" in answer.out
    assert "pgfed" not in answer.out
    assert contents(Path.cwd()) == before
