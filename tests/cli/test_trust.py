"""Looking runs no code that a directory names; going on with a run, and taking its models, asks for trust first."""

import shutil
import sys
from pathlib import Path

import pytest

import fedtailor as ft
from tests.cli.calling import Call, done, refusal

SMALL = ("--data", "digits", "--clients", 4, "--new-clients", 1, "--rounds", 2, "--epochs", 1, "--engine", "in-process")
CODE = """
from pathlib import Path
import torch
from torch import nn
from fedtailor import Method

Path("it-ran").touch()


class Mine(Method):
    share: float = 1.0
    decay: float | None = None

    def train(self, client, message):
        return {"theta": client.descend(message["theta"])}


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
"""
NAMED = "method tests_foreign:Mine, model tests_foreign:Net, loss tests_foreign:loss"


def forget() -> None:
    """Make the module one that was never imported."""
    sys.modules.pop("tests_foreign", None)
    Path("it-ran").unlink(missing_ok=True)


@pytest.fixture
def foreign(call: Call) -> Call:
    """In the current directory: a run and a comparison, both unfinished, of code that was never imported here."""
    Path("tests_foreign.py").write_text(CODE)
    mine = ("tests_foreign:Mine", "--model", "tests_foreign:Net", "--loss", "tests_foreign:loss", *SMALL)
    done(call("run", *mine, "--out", "run"))
    done(call("compare", mine[0], "fedavg", *mine[1:], "--seeds", "0,1", "--set", "decay=0.5", "--out", "compared"))
    shutil.rmtree("compared/runs/fedavg-seed0-" + next(Path("compared/runs").glob("fedavg-seed0-*")).name[-8:])
    forget()
    return call


@pytest.mark.parametrize(
    "words",
    [
        ("watch", "run"),
        ("watch", "compared"),
        ("watch", "compared/runs"),
        ("show", "run"),
        ("show", "run", "--json"),
        ("report", "run", "--out", "page.html"),
        ("report", "compared", "--out", "page.html"),
    ],
)
def test_looking_runs_nothing(words: tuple[str, ...], foreign: Call) -> None:
    assert "Mine" in done(foreign(*words)) or words[0] == "report"
    assert not Path("it-ran").exists()


def test_watching_names_the_runs_to_come(foreign: Call) -> None:
    text = done(foreign("watch", "compared"))
    assert "fedavg, seed 0" in text
    assert "3 of 4 runs finished" in text


def test_loading_in_python_runs_nothing(foreign: Call) -> None:
    result = ft.load("run")
    assert result.accuracy is not None
    assert result.per_client
    assert result.partition["clients"]
    assert result.observed(1) == {}
    assert "tests_foreign" not in sys.modules


@pytest.mark.parametrize(
    "words",
    [
        ("resume", "run", "--rounds", "3"),
        ("export", "run", "--to", "models"),
        ("adapt", "run", "--to", "adapted", "--engine", "in-process"),
    ],
)
def test_what_needs_the_code_asks_for_trust(words: tuple[str, ...], foreign: Call) -> None:
    said = refusal(foreign, *words)
    assert said == (
        f"The run in run names code of its own ({NAMED}): if you trust it, say --trust (trust=True in Python), or pass "
        "the object."
    )
    assert not Path("it-ran").exists()
    done(foreign(*words, "--trust"))
    assert Path("it-ran").exists()


def test_in_python_trust_or_the_objects_will_do(foreign: Call) -> None:
    for ask in (
        lambda: ft.resume("run", rounds=3),
        lambda: ft.export("run", to="models"),
        lambda: ft.adapt("run"),
        lambda: ft.load("run").personal(0),
        lambda: ft.load("run").data,
    ):
        with pytest.raises(ft.FedtailorError, match="names code of its own"):
            ask()
    assert "tests_foreign" not in sys.modules
    assert ft.export("run", to="trusted", client=0, trust=True)
    assert ft.adapt("run", engine="in-process", trust=True).models
    module = sys.modules["tests_foreign"]
    objects = {"method": module.Mine(), "model": module.Net, "loss": module.loss}
    some = ft.load("run", method=objects["method"])
    with pytest.raises(ft.FedtailorError, match=r"\(model tests_foreign:Net, loss tests_foreign:loss\)"):
        some.personal(0)
    result = ft.load("run", **objects)
    assert ft.export(result, to="passed", client=0)
    assert Path("passed/client-0.safetensors").read_bytes() == Path("trusted/client-0.safetensors").read_bytes()
    assert ft.resume("run", rounds=3, **objects).finished


def test_only_what_was_asked_for_goes_on_in_a_comparison(foreign: Call) -> None:
    """Neither another question that lies there, nor another run in place of one of the comparison's."""
    said = refusal(foreign, "compare", "local", "--out", "compared", *SMALL)
    assert "compared has tests_foreign:Mine among its methods" in said
    assert not Path("it-ran").exists()
    done(foreign("compare", "local", *SMALL, "--seeds", "0", "--out", "plain"))
    path = next(Path("plain/runs").iterdir())
    file = path / "experiment.toml"
    file.write_text(file.read_text().replace('"local"', '"tests_foreign:Mine"').replace("rounds = 2", "rounds = 3"))
    answer = foreign("compare", "local", *SMALL, "--seeds", "0", "--out", "plain")
    assert "experiment.toml was edited: method is tests_foreign:Mine, but the run was made with local" in answer.err
    assert not Path("it-ran").exists()


def test_a_comparison_goes_on_with_the_code_that_it_was_asked_for(foreign: Call) -> None:
    done(foreign("compare", "compared/comparison.toml", "--out", "compared"))
    assert "4 of 4 runs finished" in done(foreign("watch", "compared"))
