"""`--settings tuned:NAME`, and where such settings are listed."""

import json
import tomllib
from pathlib import Path

import pytest

from fedtailor.cli import display
from fedtailor.experiment.tuned import A_START, names, shipped
from tests.cli.calling import Call, done, refusal

SMALL = ("--clients", 4, "--rounds", 1, "--epochs", 1, "--model", "mlp:16", "--engine", "in-process")
TUNED = """\
methods = ["ditto", "local"]
tuned = "7 trials a method, seed 3"
rounds = 99
clients = 77

[settings.ditto]
lr = 0.0123

[settings.local]
lr = 0.321
fine_tune = 2

[parameters.ditto]
lam = 1.75
"""


def experiment(run: str) -> dict:
    return tomllib.loads(Path(run, "experiment.toml").read_text())


@pytest.fixture
def tuned(call: Call) -> str:
    Path("tuned.toml").write_text(TUNED)
    return "tuned.toml"


class TestRun:
    def test_the_experiment_has_exactly_these_settings(self, call: Call) -> None:
        text = done(call("run", "fedavg", *SMALL, "--settings", "tuned:digits", "--out", "a"))
        assert f"Settings: tuned on digits ({shipped('digits').how}). {A_START}" in text
        own = shipped("digits").of("fedavg")
        assert own["lr"] != 0.1  # what ships differs from the default
        explicit = [word for name, value in own.items() for word in ("--set", f"{name}={value}")]
        done(call("run", "fedavg", *SMALL, *explicit, "--out", "b"))
        assert experiment("a") == experiment("b")
        assert {**experiment("a"), **experiment("a").get("parameters", {})}.items() >= own.items()

    def test_several_methods_have_their_own(self, call: Call, tuned: str) -> None:
        text = done(call("run", "ditto", "local", *SMALL, "--settings", tuned, "--out", "a"))
        assert "Settings chosen on validation data (7 trials a method, seed 3)." in text
        ditto, local = experiment("a/ditto"), experiment("a/local")
        assert (ditto["lr"], ditto["parameters"]["lam"], ditto["evaluation"]["fine_tune"]) == (0.0123, 1.75, 0)
        assert (local["lr"], local["evaluation"]["fine_tune"], local["rounds"], local["clients"]) == (0.321, 2, 1, 4)

    @pytest.mark.parametrize("words", [("--lr", 0.5), ("--set", "lr=0.5")])
    def test_a_tuned_setting_is_refused_and_a_parameter_comes_first(self, call: Call, tuned: str, words: tuple) -> None:
        for command in ("run", "compare"):
            said = refusal(call, command, "ditto", *SMALL, "--settings", tuned, *words, "--out", "a")
            assert said == "lr is 0.0123 for ditto by its own settings: leave --lr out, or those."
        done(call("run", "ditto", *SMALL, "--settings", tuned, "--set", "lam=0.25", "--out", "b"))
        assert (experiment("b")["lr"], experiment("b")["parameters"]["lam"]) == (0.0123, 0.25)

    @pytest.mark.parametrize("words", [("--fine-tune", 1), ("--set", "fine_tune=1")])
    def test_so_is_fine_tuning(self, call: Call, tuned: str, words: tuple) -> None:
        for command in ("run", "compare"):
            said = refusal(call, command, "local", *SMALL, "--settings", tuned, *words, "--out", "a")
            assert said.startswith("fine_tune is 2 for local by its own settings")

    @pytest.mark.parametrize("command", ["run", "compare"])
    def test_what_is_not_there_is_said(self, call: Call, tuned: str, command: str) -> None:
        said = refusal(call, command, "ditto", *SMALL, "--settings", "tuned:digts")
        assert said == "There is no tuning that comes with fedtailor 'digts': did you mean 'digits'?"
        said = refusal(call, command, "pgfed", *SMALL, "--settings", tuned)
        assert said == "tuned.toml has no settings of pgfed: tune it too, or leave it out."
        said = refusal(call, command, "ditto", *SMALL, "--settings", tuned, "--optimizer", "adam")
        assert said.startswith("tuned.toml has learning rates of --optimizer sgd")
        assert refusal(call, command, "ditto", *SMALL, "--settings", "digits").endswith("did you mean tuned:digits?")


class TestCompare:
    def test_the_table_says_where_the_settings_came_from_also_when_it_is_shown_again(self, call: Call) -> None:
        text = done(call("compare", "fedavg", *SMALL, "--settings", "tuned:digits", "--seeds", "0", "--out", "a"))
        said = f"Settings: tuned on digits ({shipped('digits').how}). {A_START}"
        assert said in " ".join(text.split())
        for file in ("table.txt", "table.md", "table.tex", "result.json"):
            assert said in " ".join(Path("a", file).read_text(encoding="utf-8").split())
        assert said in " ".join(done(call("show", "a")).split())
        done(call("report", "a", "--out", "a.html"))
        assert "Settings: tuned on digits" in Path("a.html").read_text(encoding="utf-8")
        (run,) = Path("a/runs").iterdir()
        found = {**experiment(str(run)), **experiment(str(run)).get("parameters", {})}
        assert found.items() >= shipped("digits").of("fedavg").items()

    def test_the_option_replaces_what_a_file_names(self, call: Call, tuned: str) -> None:
        Path("one.toml").write_text('methods = ["ditto"]\nsettings = "tuned:digits"\nseeds = [0]\n')
        done(call("compare", "one.toml", *SMALL, "--settings", tuned, "--out", "a"))
        (run,) = Path("a/runs").iterdir()
        assert experiment(str(run))["lr"] == 0.0123


class TestLists:
    def test_settings(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = json.loads(done(call("settings", "--json")))
        assert [row["name"] for row in rows] == [f"tuned:{name}" for name in names()]
        assert rows[0]["methods"] == shipped(names()[0]).methods
        monkeypatch.setattr(display.out, "width", 80)
        text = done(call("settings"))
        assert all(row["name"] in text for row in rows)
        assert max(map(len, text.splitlines())) <= 80

    def test_methods_show_what_was_chosen_for_them(self, call: Call) -> None:
        own = shipped("digits").of("fedavg")
        text = " ".join(done(call("methods", "fedavg")).split())
        assert f"fedavg tuned:digits lr={own['lr']:g}" in text
        (row,) = json.loads(done(call("methods", "fedavg", "--json")))
        assert row["tuned"]["tuned:digits"] == {"lr": own["lr"]}
        assert "tuned:digits" not in done(call("methods"))  # of all it would be a page
