"""Settings that come with fedtailor: the files are valid, and exactly what they have for a method is taken."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor.experiment import make_experiment
from fedtailor.experiment.tuned import A_START, find_settings, names, shipped, tuned_in_words
from fedtailor.methods import CATALOGUE, find_method
from fedtailor.methods.ditto import Ditto
from fedtailor.studies.comparison import make_comparison
from fedtailor.studies.ranges import search_ranges

SMALL: dict[str, Any] = {"clients": 4, "rounds": 1, "epochs": 1, "model": "mlp:16", "engine": "in-process"}
FILE = """\
methods = ["ditto", "fedavg", "pflego"]
tuned = "7 trials a method, seed 3"
rounds = 99
clients = 77
data = "mnist"

[settings.ditto]
lr = 0.0123

[settings.fedavg]
lr = 0.321

[parameters.ditto]
lam = 1.75

[parameters.pflego]
head_lr = 0.5
"""


@pytest.fixture
def tuning(tmp_path: Path) -> str:
    (tmp_path / "tuned.toml").write_text(FILE)
    return str(tmp_path)


class TestFiles:
    @pytest.mark.parametrize("name", names())
    def test_every_method_is_known_and_its_settings_are_allowed(self, name: str) -> None:
        found = shipped(name)
        assert found.methods
        assert set(found.methods) <= set(CATALOGUE)
        assert set(found.content.get("parameters", {})) | set(found.content.get("settings", {})) <= set(found.methods)
        for method in found.methods:
            own = find_method(method, found.section("parameters", method))
            make_experiment({"method": method, **found.section("settings", method), "parameters": own.model_dump()})
        assert make_comparison(found.content).methods == tuple(found.methods)  # the whole file is one

    @pytest.mark.parametrize("name", names())
    def test_what_was_searched_is_in_its_range_or_as_it_was_before(self, name: str) -> None:
        found = shipped(name)
        for method in found.methods:
            ranges = search_ranges(method)
            before = {"lr": found.content.get("lr"), **find_method(method).model_dump()}
            for setting, value in found.of(method).items():
                if setting in ranges:
                    assert value in ranges[setting] or value == before[setting], (method, setting)
            assert set(found.section("settings", method)) <= set(ranges)

    @pytest.mark.parametrize("name", names())
    def test_it_says_on_what_and_how_it_was_tuned(self, name: str) -> None:
        found = shipped(name)
        assert found.how
        assert "trials a method, seed" in found.how
        assert found.about
        assert "/" not in str(found.content["data"])  # nobody's directory
        assert found.content.get("data_dir") is None


class TestFinding:
    def test_a_directory_or_file_is_read_in_the_same_way(self, tuning: str) -> None:
        for source in (tuning, Path(tuning), f"{tuning}/tuned.toml"):
            assert find_settings(source).of("ditto") == {"lr": 0.0123, "lam": 1.75}
        assert find_settings(tuning).tuned == "7 trials a method, seed 3"

    @pytest.mark.parametrize("lines", ["settings = 3", "[settings]\nditto = 3"])
    def test_a_file_of_something_else_is_refused(self, tmp_path: Path, lines: str) -> None:
        (tmp_path / "a.toml").write_text(f'methods = ["ditto"]\n{lines}')
        with pytest.raises(FedtailorError, match=r"is no tuning: its settings must stand in sections"):
            find_settings(tmp_path / "a.toml").of("ditto")

    def test_the_words(self) -> None:
        assert tuned_in_words(str(shipped("digits").tuned)) == (
            f"Settings: tuned on digits ({shipped('digits').how}). {A_START}"
        )
        assert tuned_in_words("3 trials") == "Settings chosen on validation data (3 trials)."

    def test_all_are_of_few_trials_on_one_seed_as_the_words_say(self) -> None:
        assert {shipped(name).how for name in names()} == {"8 trials a method, seed 0"}


class TestRun:
    @pytest.mark.parametrize("method", ["ditto", Ditto])
    def test_a_method_has_its_settings_and_nothing_else_of_the_file(self, tuning: str, method: Any) -> None:
        mine = ft.run(method, method_settings=tuning, **SMALL).experiment
        expected = ft.run(method, lr=0.0123, lam=1.75, **SMALL).experiment
        assert mine == expected
        assert (mine.rounds, mine.clients, mine.data) == (1, 4, "digits")

    def test_those_that_come_with_fedtailor_say_on_how_much_they_rest(self) -> None:
        with pytest.warns(
            UserWarning, match=r"tuned on digits \(8 trials a method, seed 0\)\. So few trials, on one seed"
        ):
            ft.run("fedavg", method_settings="tuned:digits", **SMALL)

    def test_parameters_that_are_given_come_first(self, tuning: str) -> None:
        assert ft.run("ditto", method_settings=tuning, lam=0.25, **SMALL).experiment.parameters["lam"] == 0.25

    def test_a_tuned_setting_that_is_given_is_refused(self, tuning: str) -> None:
        with pytest.raises(FedtailorError, match=r"lr is 0\.0123 for ditto by its own settings: leave --lr out, or"):
            ft.run("ditto", method_settings=tuning, lr=0.5, **SMALL)
        assert ft.run("pflego", method_settings=tuning, lr=0.5, **SMALL).experiment.lr == 0.5  # it has no rate there

    def test_a_complete_experiment_takes_none(self, tuning: str) -> None:
        with pytest.raises(FedtailorError, match="An Experiment is complete"):
            ft.run(make_experiment(SMALL), method_settings=tuning)


class TestCompare:
    def test_every_method_has_its_own(self, tuning: str) -> None:
        table = ft.compare(["fedavg", Ditto], seeds=[0], method_settings=tuning, **SMALL)
        runs = {line.method: line.results[0].experiment for line in table.lines}
        assert (runs["fedavg"].lr, runs["ditto"].lr, runs["ditto"].parameters) == (0.321, 0.0123, {"lam": 1.75})
        assert "Settings chosen on validation data (7 trials a method, seed 3)." in table.summary.caption
        assert [line.title for line in table.lines] == ["fedavg", "ditto"]  # each has a rate of its own
        assert table.lines[1].settings == {"lr": 0.0123}

    def test_a_file_may_name_them(self, tuning: str) -> None:
        asked = {"methods": ["ditto"], "settings": tuning, **SMALL}
        comparison = make_comparison(asked)
        assert comparison.own == {"ditto": {"lr": 0.0123}}
        assert comparison.parameters == {"ditto": {"lam": 1.75}}
        with pytest.raises(FedtailorError, match=r"lr is 0\.0123 for ditto by its own settings"):
            make_comparison({**asked, "lr": 0.1})
        with pytest.raises(FedtailorError, match="has no settings of local"):
            make_comparison({**asked, "methods": ["local"]})
        first = make_comparison({**asked, "parameters": {"ditto": {"lam": 0.5}}})
        assert first.parameters == {"ditto": {"lam": 0.5}}

    def test_they_are_written_down_with_the_comparison(self, tmp_path: Path) -> None:
        ft.compare(["fedavg"], seeds=[0], method_settings="tuned:digits", out=tmp_path / "a", **SMALL)
        written = tomllib.loads((tmp_path / "a/comparison.toml").read_text())
        assert written["settings"] == {"fedavg": shipped("digits").section("settings", "fedavg")}
        assert written["tuned"] == f"tuned:digits ({shipped('digits').how})"
