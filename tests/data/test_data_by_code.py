"""Data that code of the user's own returns: `module:function` in Python, in files and on the command line."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import fedtailor as ft
from fedtailor.data import from_list
from fedtailor.data.sources import names_code
from tests.cli.calling import Call, call, done, refusal
from tests.helpers import numbers

__all__ = ["call"]

HERE = __name__
CLIENTS = [(np.random.default_rng(k).random((20, 4)), np.arange(20) % 2) for k in range(3)]
SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "mlp:8", "engine": "in-process"}
WORDS = ("--rounds", 2, "--epochs", 1, "--model", "mlp:8", "--engine", "in-process")
CODE = """
from pathlib import Path
import numpy as np

Path("it-ran").touch()


def hospitals():
    x = np.random.default_rng(0).random((60, 4))
    return {name: (x[k::3], np.arange(20) % 2) for k, name in enumerate(("south", "north", "west"))}


def broken():
    return hospitals()["no such hospital"]
"""


def clients() -> list[tuple[Any, Any]]:
    return CLIENTS


def data_set() -> ft.Dataset:
    return from_list(CLIENTS, "mine")


def table() -> pandas.DataFrame:
    return pandas.DataFrame({"a": np.arange(30.0) % 7, "ward": ["n", "s"] * 15, "ill": ["no", "yes", "no"] * 10})


def wrong() -> str:
    return "clients"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("clients", {}),
        ("CLIENTS", {}),
        ("data_set", {}),
        ("table", {"label_column": "ill", "client_column": "ward"}),
    ],
)
def test_by_name_and_as_an_object_it_is_the_data(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    made = getattr(sys.modules[HERE], name)
    given = made() if callable(made) else made
    by_name = ft.run("ditto", data=f"{HERE}:{name}", out=tmp_path / "run", **settings, **SMALL)
    assert by_name.experiment.data == f"{HERE}:{name}"
    expected = numbers(ft.run("ditto", data=given, **settings, **SMALL).rounds)
    assert numbers(by_name.rounds) == numbers(ft.run("ditto", data=made, **settings, **SMALL).rounds) == expected
    with pytest.raises(ft.FedtailorError, match=rf"names code of its own \(data {HERE}:{name}\): if you trust it"):
        ft.resume(tmp_path / "run", rounds=3)
    longer = ft.resume(tmp_path / "run", rounds=3, **({"data": made} if callable(made) else {"trust": True}))
    assert len(longer.rounds) == 3


def test_what_is_wrong_with_it_is_said(tmp_path: Path) -> None:
    def fails() -> None:
        raise ValueError("no disk today")

    for data, said in (
        (f"{HERE}:wrong", "The data are a str, not a list of clients"),
        (f"{HERE}:nothing", f"There is no 'nothing' in the module '{HERE}' .for the data '{HERE}:nothing'"),
        ("no_such_module:data", "The data 'no_such_module:data' cannot be imported: ModuleNotFoundError"),
        (fails, r"The data object:.*fails cannot be made: ValueError: no disk today .test_data_by_code.py, line \d+"),
    ):
        with pytest.raises(ft.FedtailorError, match=said):
            ft.run("fedavg", data=data, **SMALL)
    ft.run("fedavg", data=clients, out=tmp_path / "run", **SMALL)
    with pytest.raises(ft.FedtailorError, match=f"This is not the run's data: that is {HERE}:clients"):
        ft.resume(tmp_path / "run", rounds=3, data=table)
    with pytest.raises(ft.FedtailorError, match=r"The run's data have a name .*: leave data= out"):
        ft.resume(tmp_path / "run", rounds=3, data=CLIENTS)


def test_names_of_data_sets_and_of_files_are_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "synthetic:0.5:0.5", "emnist:letters", "mine.csv", "a/b:c", "C:\\data.csv"):
        assert not names_code(name)
    assert names_code("mine:clients")
    Path("mine:clients").mkdir()
    assert not names_code("mine:clients")
    assert names_code("mine:others", tmp_path)


# --- on the command line ---


@pytest.fixture
def hospitals(call: Call) -> Call:
    """In the current directory: a module that was never imported."""
    Path("tests_hospitals.py").write_text(CODE)
    return call


DATA = "tests_hospitals:hospitals"


@pytest.mark.slow
def test_commands_and_files_have_it(hospitals: Call) -> None:
    text = done(hospitals("run", "ditto", "--data", DATA, *WORDS, "--out", "run"))
    assert text.splitlines()[0].strip() == f"{DATA}, 2 of 2 rounds, seed 0"
    Path("mine.toml").write_text(
        f'method = "ditto"\ndata = "{DATA}"\nrounds = 2\nepochs = 1\nmodel = "mlp:8"\nengine = "in-process"\n'
    )
    done(hospitals("run", "mine.toml", "--out", "again"))
    assert numbers(ft.load("run").rounds) == numbers(ft.load("again").rounds)
    assert ft.load("run").names == ("south", "north", "west")
    assert "south" in done(hospitals("data", DATA))
    text = done(hospitals("compare", "local", "ditto", "--data", DATA, *WORDS, "--seeds", "0", "--out", "cmp"))
    assert f"{DATA}, 3 clients, 2 rounds, seed 0" in text
    assert not list(Path("cmp").glob("own-data*"))  # whoever has the module can make them again
    said = refusal(hospitals, "run", "ditto", "--data", "tests_hospitals:broken", *WORDS)
    assert said.startswith("The data tests_hospitals:broken cannot be made: KeyError: 'no such hospital'")


@pytest.mark.slow
def test_whose_code_it_is_is_asked_first(hospitals: Call) -> None:
    done(hospitals("run", "fedavg", "--data", DATA, *WORDS, "--out", "run"))
    done(hospitals("export", "run", "--trust", "--global", "--to", "models"))
    sys.modules.pop("tests_hospitals")
    Path("it-ran").unlink()
    for words in (("show", "run"), ("report", "run", "--out", "page.html"), ("watch", "run")):
        done(hospitals(*words))
    for words in (("resume", "run", "--rounds", 3), ("export", "run", "--to", "others")):
        assert refusal(hospitals, *words).startswith(
            f"The run in run names code of its own (data {DATA}): if you trust"
        )
    (model,) = Path("models").glob("*.safetensors")
    assert refusal(hospitals, "predict", model, "--run", "run") == (
        f"The samples of the run in run are made or partitioned by code of its own ({DATA}), which is not run here: "
        "give the samples with --data."
    )
    assert not Path("it-ran").exists()
    done(hospitals("resume", "run", "--rounds", 3, "--trust"))
    assert Path("it-ran").exists()


@pytest.mark.slow
def test_nobody_joins_by_code(hospitals: Call) -> None:
    done(hospitals("run", "fedavg", "--data", "digits", "--clients", 3, *WORDS, "--out", "run"))
    said = refusal(hospitals, "resume", "run", "--rounds", 3, "--add-client", DATA)
    assert said == f"The new client '{DATA}' would be code, which is not run to join: pass what it returns, by a name."
    assert not Path("it-ran").exists()
