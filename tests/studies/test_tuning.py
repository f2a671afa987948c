"""Tuning: what is chosen and by what, when trials end, and how it goes on."""

import os
import re
import signal
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor._common.extras import install_command
from fedtailor._common.files import seal
from fedtailor.engines.preparation import Objects, partition_data
from fedtailor.experiment import make_experiment, read_experiment
from fedtailor.messages.transport import Transport
from fedtailor.server.loop import Loop
from fedtailor.server.records import RoundRecord
from fedtailor.studies.comparison import make_comparison
from fedtailor.studies.trials import Budget, Trial, Tuned, p_of_more
from fedtailor.studies.tuner import LATE, WORSE, Tuner
from tests.helpers import Quadratic, mean_output
from tests.kills.engine import in_a_process, killed_while_writing

SMALL: dict[str, Any] = {
    **{"clients": 4, "rounds": 4, "epochs": 1, "model": "mlp:16", "engine": "in-process"},
    **{"max_train": 60, "validation": 0.2, "lr": 0.1},
}


def tuner(out: Path | None = None, trials: int | None = 3, **asked: Any) -> Tuner:
    how = {name: asked.pop(name) for name in ("ranges", "only", "objects") if name in asked}
    budget, level = Budget(trials, asked.pop("seconds", None)), asked.pop("level", 1)
    comparison = make_comparison({"methods": ["ditto"], "seeds": [0], **SMALL, **asked})
    return Tuner(comparison, budget, out=out, level=level, **how)


def tried(work: Tuner, **callbacks: Any) -> dict[str, list[Trial]]:
    """The trials of all methods, without their times."""
    work.begin()
    methods = [work.tune(method, **callbacks) for method in work.comparison.methods]
    return {tuned.method: [replace(trial, seconds=0.0) for trial in tuned.trials] for tuned in methods}


# --- a quadratic, of which everything is known ---

CURVATURE, ROUNDS = 0.8, 6
CENTRE = torch.tensor([3.0, -1.0], dtype=torch.float64)


def quadratic() -> list[tuple[Tensor, Tensor]]:
    """Three clients with ten samples of the same quadratic ½ h ‖θ − c‖²."""
    row = torch.cat([CENTRE, (CURVATURE * torch.eye(2, dtype=torch.float64)).flatten()])
    return [(row.repeat(10, 1), torch.zeros(10, dtype=torch.float64))] * 3


def loss_after(lr: float, rounds: int) -> float:
    """Gradient descent from 0 brings θ − c down by the factor 1 − lr h in each step."""
    return float(0.5 * CURVATURE * (1 - lr * CURVATURE) ** (2 * rounds) * (CENTRE @ CENTRE))


def tune_quadratic(**how: Any) -> Any:
    settings = {"steps": 1, "batch": "full", "dtype": "float64", "rounds": ROUNDS, "choose": "last", "validation": 0.2}
    settings |= {"engine": "in-process", "level": 1, "data": quadratic(), "model": Quadratic(2), "loss": mean_output}
    return ft.tune(["fedavg"], **{**settings, **how})


class TestClosedForm:
    def test_the_better_of_two_settings_is_found(self) -> None:
        found = tune_quadratic(lr=0.1, ranges={"lr": "0.1|1.2"}, trials=6)["fedavg"]
        assert found.settings == {"lr": 1.2}
        assert {trial.settings["lr"] for trial in found.trials} == {0.1, 1.2}
        assert found.before == pytest.approx(loss_after(0.1, ROUNDS), rel=1e-9)
        assert found.validation == pytest.approx(loss_after(1.2, ROUNDS), rel=1e-9)

    def test_every_trial_has_the_value_that_follows_from_its_rate(self) -> None:
        found = tune_quadratic(lr=0.1, trials=14)["fedavg"]
        for trial in found.trials:
            for number, value in trial.values.items():
                assert value == pytest.approx(-loss_after(trial.settings["lr"], number), rel=1e-6)
        done = [trial for trial in found.trials if trial.state == "done"]
        assert found.settings == min(done, key=lambda trial: abs(1 - trial.settings["lr"] * CURVATURE)).settings
        assert found.settings["lr"] > 0.5  # the best is 1, at the end of the range
        assert found.count("pruned") + found.count("done") == 14
        assert found.results[0].loss == pytest.approx(loss_after(found.settings["lr"], ROUNDS), rel=1e-9)


# --- real runs ---


class TestTrials:
    def test_a_trials_value_is_that_of_its_last_round_and_not_its_best(self) -> None:
        assert Trial(settings={}, state="done", values={10: 0.5, 2: 0.9}).value == 0.5
        assert Trial(settings={}, state="pruned", values={2: 0.9}).value is None

    def test_the_first_has_the_settings_as_they_are_and_is_never_chosen_over_a_better_one(self) -> None:
        work = tuner(trials=4, lr=0.03, parameters={"ditto": {"lam": 0.7}})
        (trials,) = tried(work).values()
        assert trials[0].settings == {"lr": 0.03, "lam": 0.7}
        assert trials[0].values[4] == work.tuned("ditto").before
        assert work.tuned("ditto").validation == max(trial.values[4] for trial in trials if trial.state == "done")

    def test_a_trial_is_the_run_of_its_settings_to_the_bit(self) -> None:
        (trials,) = tried(tuner(trials=2, choose="last")).values()
        settings: dict[str, Any] = {**SMALL, **trials[1].settings}
        result = ft.run("ditto", **settings)
        assert trials[1].values == {record.round: record.validation_accuracy for record in result.rounds}

    def test_with_several_seeds_their_mean_counts(self) -> None:
        both = tried(tuner(trials=2, seeds=[0, 1], choose="last"))["ditto"][1]
        single = [ft.run("ditto", **{**SMALL, **both.settings}, seed=seed) for seed in (0, 1)]
        for number in range(SMALL["rounds"]):
            mean = fmean(result.rounds[number].validation_accuracy or 0.0 for result in single)
            assert both.values[number + 1] == pytest.approx(mean, rel=1e-12)

    def test_the_engine_makes_no_difference(self) -> None:
        assert tried(tuner()) == tried(tuner(engine="processes", workers=2))

    def test_every_method_has_the_same_budget_and_tries_the_same_rates_first(self) -> None:
        found = tried(tuner(trials=4, methods=["fedavg", "ditto", "local"]))
        assert {len(trials) for trials in found.values()} == {4}
        rates = {method: [trial.settings["lr"] for trial in trials] for method, trials in found.items()}
        assert rates["fedavg"] == rates["ditto"] == rates["local"]
        assert len(set(rates["fedavg"])) == 4

    def test_a_method_without_a_searched_setting_has_one_trial(self) -> None:
        found = tried(tuner(trials=3, methods=["fedavg", "ditto"], only=["lam"]))
        assert [len(trials) for trials in found.values()] == [1, 3]
        assert found["fedavg"][0].settings == {}

    def test_pruned_trials_stop_where_the_median_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An independent reading of the rule, and a count of the rounds that were really done."""
        counted, whole = 0, Loop.round

        def count(loop: Loop, number: int, transport: Transport) -> RoundRecord:
            nonlocal counted
            counted += 1
            return whole(loop, number, transport)

        monkeypatch.setattr(Loop, "round", count)
        (trials,) = tried(tuner(trials=14, rounds=8)).values()
        assert counted == sum(trial.rounds for trial in trials)
        pruned = [trial for trial in trials if trial.state == "pruned"]
        assert pruned
        for place, trial in enumerate(trials):
            before = [other for other in trials[:place] if other.state == "done"]
            below = [
                number
                for number in range(2, 8)
                if len(before) >= 4
                and number in trial.values
                and max(value for at, value in trial.values.items() if at <= number)
                < median(other.values[number] for other in before)
            ]
            assert below == ([trial.rounds] if trial.state == "pruned" else [])
            assert trial.reason == (WORSE if trial.state == "pruned" else "")

    def test_a_diverging_or_refused_choice_is_a_failed_trial_and_the_others_go_on(self) -> None:
        (trials,) = tried(tuner(trials=6, ranges={"lr": "0.1|1e30"}, only=["lr"])).values()
        by_rate = {trial.settings["lr"]: trial for trial in trials}
        assert by_rate[0.1].state == "done"
        assert by_rate[1e30].state == "failed"
        assert "Ditto: no client could do its work in" in by_rate[1e30].reason

    def test_all_failing_is_one_sentence(self) -> None:
        work = tuner(trials=2, lr=1e30, ranges={"lr": "1e30..1e31"}, only=["lr"])
        tried(work)
        with pytest.raises(
            FedtailorError, match=r"All 2 trials of ditto failed; the first one: Ditto: no client could"
        ):
            work.apply(work.comparison)

    def test_a_method_that_fails_is_left_out_of_what_is_chosen(self, tmp_path: Path) -> None:
        parameters = {"pfedme": {"outer_lr": 1e30}}
        work = tuner(tmp_path / "a", 1, methods=["ditto", "pfedme"], parameters=parameters, only=["lr"])
        tried(work)
        assert work.write().methods == ("ditto",)
        assert make_comparison(read_experiment(tmp_path / "a" / "tuned.toml")).methods == ("ditto",)
        assert work.finish("pfedme").results == ()


class TestSignificance:
    """The best of many trials is no choice if it is the best by chance alone."""

    FAST: ClassVar[dict[str, Any]] = {"lr": 0.001, "only": ["lr"], "ranges": {"lr": "0.1..1:log"}}  # all but the first
    FIRST = Trial(settings={"lr": 0.1}, state="done", values={1: 0.5})

    def later(self, value: float, p: float | None) -> Trial:
        return Trial(settings={"lr": value}, state="done", values={1: value}, p=p)

    def chosen(self, *trials: Trial, level: float = 0.05) -> Trial | None:
        return Tuned("fedavg", trials, level=level).chosen

    def test_the_settings_stay_where_the_best_is_not_significantly_better(self) -> None:
        better, best = self.later(0.6, 0.04), self.later(0.7, 0.06)
        assert self.chosen(self.FIRST, best) is self.FIRST
        assert self.chosen(self.FIRST, better) is better
        assert self.chosen(self.FIRST, better, best) is self.FIRST  # of two trials: 2 · 0.04
        assert self.chosen(self.FIRST, replace(better, p=0.02), best) is not best
        assert self.chosen(self.FIRST, better, best, level=1) is best
        assert self.chosen(self.FIRST, self.later(0.7, None)) is self.FIRST  # of an older version: nothing is known

    def test_of_several_that_are_better_the_best_is_chosen(self) -> None:
        better, best, worse = self.later(0.6, 0.001), self.later(0.7, 0.001), self.later(0.4, 0.001)
        assert self.chosen(self.FIRST, better, best, worse) is best
        assert self.chosen(self.FIRST, worse) is self.FIRST  # its mean is worse, though most clients do better

    def test_where_the_first_fails_the_best_is_chosen(self) -> None:
        failed, better = Trial(settings={}, state="failed"), self.later(0.6, None)
        assert self.chosen(failed, self.later(0.4, None), better) is better
        assert Tuned("fedavg", (failed, better)).p is None

    @pytest.mark.parametrize(
        ("better", "worse", "p"),
        [(6, 0, 2 / 2**6), (10, 0, 2 / 2**10), (0, 6, 1.0), (3, 3, 1.0), (1, 0, 1.0), (0, 0, 1.0)],
    )
    def test_p_is_wilcoxons_where_more_clients_do_better(self, better: int, worse: int, p: float) -> None:
        """Exact: all of n signs are the same in 2 of 2ⁿ cases."""
        first = {f"0/{client}": 0.5 for client in range(20)}
        moved = {
            c: 0.5 + (0.01 * (n + 1) if n < better else -0.01 * n) for n, c in enumerate(first) if n < better + worse
        }
        assert p_of_more({**first, **moved}, first) == pytest.approx(p)

    def test_a_recorded_p_is_of_the_clients_of_all_seeds(self) -> None:
        (trials,) = tried(tuner(trials=2, seeds=[0, 1], choose="last", **self.FAST)).values()
        assert set(trials[0].clients) == {f"{seed}/{client}" for seed in (0, 1) for client in range(4)}
        assert fmean(trials[0].clients.values()) == pytest.approx(trials[0].value)
        values = []
        for settings in (trials[0].settings, trials[1].settings):
            runs = [ft.run("ditto", **{**SMALL, **settings, "choose": "last"}, seed=seed) for seed in (0, 1)]
            values.append([of["validation"].accuracy for run in runs for of in run.clients[-1].results.values()])
        first, second = values
        assert list(trials[0].clients.values()) == first
        differences = [a - b for a, b in zip(second, first, strict=True)]
        assert sum(d > 0 for d in differences) > sum(d < 0 for d in differences)
        assert trials[1].p == pytest.approx(exact_p(differences))
        assert trials[1].clients == {}

    def test_with_few_clients_nothing_is_significant(self) -> None:
        work = tuner(trials=4, level=0.05, **self.FAST)
        (trials,) = tried(work).values()
        tuned = work.tuned("ditto")
        assert max(trial.values[4] for trial in trials[1:]) > trials[0].values[4] == tuned.validation
        assert tuned.settings == trials[0].settings
        assert (tuned.p or 0) > 0.05  # 2 / 2⁴ at best

    @pytest.mark.parametrize("level", [0.0, -1.0, 1.5, float("nan")])
    def test_a_level_that_is_no_p_is_refused(self, level: float) -> None:
        with pytest.raises(FedtailorError, match="The level is a p-value"):
            tuner(level=level)


def exact_p(differences: list[float]) -> float:
    """Two-sided p of the signed ranks by going through all signs, with mean ranks of ties."""
    sizes = sorted(abs(d) for d in differences if d)
    rank = {size: fmean(place + 1 for place, other in enumerate(sizes) if other == size) for size in sizes}
    ranks = [rank[abs(d)] for d in differences if d]
    seen = sum(rank[abs(d)] for d in differences if d > 0)
    middle = sum(ranks) / 2
    sums = [
        sum(r for r, sign in zip(ranks, signs, strict=True) if sign) for signs in product((0, 1), repeat=len(ranks))
    ]
    return fmean(abs(total - middle) >= abs(seen - middle) - 1e-9 for total in sums)


class TestTime:
    def test_the_first_trial_comes_to_its_end_whatever_it_takes(self) -> None:
        found = tried(tuner(trials=None, seconds=1e-9, methods=["fedavg", "ditto"]))
        assert [[trial.state for trial in trials] for trials in found.values()] == [["done"], ["done"]]

    def test_another_one_ends_with_the_time(self, tmp_path: Path) -> None:
        work = tuner(tmp_path / "a", trials=1, seconds=1000.0)
        tried(work)
        work = tuner(tmp_path / "a", trials=None, seconds=1000.0)
        work.trials["ditto"][0].seconds = 1000.0 - 1e-9
        last = work.tune("ditto").trials[-1]
        assert (last.state, last.rounds, last.reason) == ("pruned", 1, LATE)
        assert len(work.trials["ditto"]) == 2

    @pytest.mark.parametrize("budget", [{"trials": 0}, {"seconds": 0.0}, {"seconds": float("nan")}])
    def test_a_budget_of_nothing_is_refused(self, budget: dict[str, Any]) -> None:
        with pytest.raises(FedtailorError, match="A method cannot be tuned in"):
            Budget(**budget)


class TestTestData:
    def test_the_choice_does_not_depend_on_test_labels(self) -> None:
        experiment = make_experiment({"method": "ditto", **SMALL})
        found = []
        for shift in (0, 1):
            data = partition_data(experiment)
            for _, _, begin, end in data.places:
                data.y[begin:end] = (data.y[begin:end] + shift) % 10
            work = tuner(trials=6, objects=Objects(data=data))
            found.append((tried(work), work.tuned("ditto").settings, work.finish("ditto").results[0].accuracy))
        assert found[0][:2] == found[1][:2]
        assert found[0][2] != found[1][2]

    def test_a_tuning_of_an_older_version_without_a_setting_goes_on(self, tmp_path: Path) -> None:
        tuner(tmp_path).begin()
        written = tmp_path / "tuning.toml"
        lines = written.read_text().splitlines(keepends=True)
        older = [line for line in lines if not line.startswith("drop_unlabelled")]
        assert len(older) < len(lines)
        written.write_text("".join(older))
        tuner(tmp_path).begin()
        assert written.read_text() == "".join(lines)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"validation": 0}, "chosen on validation data, and there are none: give --validation"),
            ({"choose": "best-test"}, "best-test looks at test data, and tuning must not"),
            ({"evaluate_every": 0}, "Tuning needs rounds that are evaluated"),
            ({"grid": {"lr": [0.1]}}, "A grid lists the values that tuning looks for"),
            ({"ranges": {"clients": "2..4"}}, "Tuning cannot vary clients"),
            ({"ranges": {"workers": "2..4"}}, "Tuning cannot vary workers, as it does not change the numbers"),
            ({"ranges": {"lm": "2..4"}}, "no setting or parameter 'lm'"),
            ({"ranges": {"lr": "0..1"}}, "The setting 'lr' is 0.0, but it must be above 0"),
            ({"ranges": {"lam": "-1..1"}}, "The parameter 'lam' of ditto is -1.0, but it must be at least 0"),
            ({"only": ["mu"]}, "no setting that is searched 'mu'"),
        ],
    )
    def test_what_cannot_be_tuned_is_refused_before_any_work(self, change: dict[str, Any], said: str) -> None:
        with pytest.raises(FedtailorError, match=said):
            tuner(**change)

    def test_clients_without_validation_samples_are_refused(self) -> None:
        data = [(torch.rand(2, 3), torch.tensor([0, 1]))] * 3  # one for training, one for testing
        with pytest.raises(FedtailorError, match="and no client has any"):
            tuner(objects=Objects(data=data), clients=None, min_samples=1, max_train=None).begin()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trial]]:
    return tried(tuner(tmp_path_factory.mktemp("tuning") / "whole", 10))


class TestGoingOn:
    def test_interrupted_anywhere_it_comes_to_the_same_trials(
        self, tmp_path: Path, whole: dict[str, list[Trial]]
    ) -> None:
        rounds = 0

        def stop(number: int, value: float | None) -> None:
            nonlocal rounds
            rounds += 1
            if rounds in (3, 14, 30):
                raise KeyboardInterrupt

        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                tried(tuner(tmp_path / "a", 10), on_round=stop)
        assert tried(tuner(tmp_path / "a", 10), on_round=stop) == whole

    def test_killed_while_it_writes_it_comes_to_the_same_trials(
        self, tmp_path: Path, whole: dict[str, list[Trial]]
    ) -> None:
        tried(tuner(tmp_path / "a", 3))
        killed_while_writing("ditto.json", lambda: tried(tuner(tmp_path / "a", 10)))
        made = list[Trial]()
        assert tried(tuner(tmp_path / "a", 10), on_trial=made.append) == whole
        assert len(made) == 7

    def test_killed_before_its_question_is_written_down_it_begins_again(self, tmp_path: Path) -> None:
        killed_while_writing("tuning.toml", lambda: tried(tuner(tmp_path / "a", 1)))
        assert len(tried(tuner(tmp_path / "a", 1))["ditto"]) == 1

    def test_finished_trials_are_not_run_again(self, tmp_path: Path) -> None:
        first = tried(tuner(tmp_path / "a", 3))
        made = list[Trial]()
        assert tried(tuner(tmp_path / "a", 3), on_trial=made.append) == first
        assert made == []
        assert tried(tuner(tmp_path / "a", 2))["ditto"] == first["ditto"][:2]

    def test_more_trials_and_more_methods_are_added(self, tmp_path: Path) -> None:
        first = tried(tuner(tmp_path / "a", 2))["ditto"]
        found = tried(tuner(tmp_path / "a", 3, methods=["ditto", "fedavg"]))
        assert found["ditto"][:2] == first
        assert {len(trials) for trials in found.values()} == {3}

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"lr": 0.2}, "where lr is 0.1 and not 0.2"),
            ({"seeds": [1]}, r"where seeds is \[0\] and not \[1\]"),
            ({"ranges": {"lr": "0.1..1"}}, r"where ranges.ditto.lr is 0.001..1:log and not 0.1..1"),
            ({"only": ["lr"]}, "where ranges.ditto.lam is 0.01..2:log and not not set"),
            ({"parameters": {"ditto": {"lam": 3.0}}}, "where parameters.ditto.lam is 0.5 and not 3.0"),
        ],
    )
    def test_trials_under_other_settings_are_refused(self, tmp_path: Path, change: dict[str, Any], said: str) -> None:
        tuner(tmp_path / "a").begin()
        with pytest.raises(FedtailorError, match=f"is another tuning, {said}: choose another --out"):
            tuner(tmp_path / "a", **change)
        tuner(tmp_path / "a", workers=2)  # this may differ

    def test_a_directory_of_something_else_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").touch()
        with pytest.raises(FedtailorError, match="is not a tuning"):
            tuner(tmp_path)

    def test_a_damaged_file_is_named(self, tmp_path: Path) -> None:
        tried(tuner(tmp_path / "a", 1))
        file = tmp_path / "a" / "trials" / "ditto.json"
        for content in (file.read_bytes().replace(b"0.1", b"0.2", 1), seal({"trials": [{"state": "won"}]})):
            file.write_bytes(content)
            with pytest.raises(FedtailorError, match=r"ditto\.json is damaged"):
                tuner(tmp_path / "a", 1)


class TestOutcome:
    def test_the_chosen_settings_make_a_comparison(self, tmp_path: Path) -> None:
        work = tuner(tmp_path / "a", 3, methods=["ditto", "pflego"], ranges={"fine_tune": "0..2"})
        tried(work)
        chosen = work.write()
        again = make_comparison(read_experiment(tmp_path / "a" / "tuned.toml"))
        assert again == chosen
        assert again.tuned == "3 trials a method, seed 0"
        for method in ("ditto", "pflego"):
            tuned = work.finish(method)
            (run,) = [run for run in again.runs().values() if run.method == method]
            expected = tuned.results[0].experiment
            assert run.model_copy(update={"parameters": expected.parameters}) == expected
            assert expected.parameters.items() >= run.parameters.items()
            assert tuned.results[0].path == tmp_path / "a" / "runs" / tuned.results[0].path.name
            assert tuned.validation == tuned.results[0].chosen().validation_accuracy  # the same run to the bit

    def test_in_python(self) -> None:
        seen = []
        tuning = ft.tune(
            ["ditto"], trials=2, level=1, on_trial=lambda method, trial: seen.append((method, trial)), **SMALL
        )
        assert [method for method, _ in seen] == ["ditto"] * 2
        best = tuning["ditto"]
        assert [trial for _, trial in seen] == list(best.trials)
        assert [tuned.method for tuned in tuning] == ["ditto"]
        text = repr(tuning)
        assert text.startswith("Settings chosen on validation data, 2 trials a method\n")
        assert f"lr={best.settings['lr']:g}, lam={best.settings['lam']:g}" in text
        assert f"{100 * (best.validation or 0):.2f}" in text
        assert f"{100 * (best.results[0].accuracy or 0):.2f}" in text
        table = ft.compare(
            ["ditto"], seeds=[0], method_parameters=tuning.parameters, method_settings=tuning.settings, **SMALL
        )
        assert table.lines[0].accuracy == best.results[0].accuracy

    def test_a_comparison_tunes_first(self, tmp_path: Path) -> None:
        slow, methods = {**SMALL, "clients": 10, "lr": 0.001}, ["local", "ditto"]  # the fifth trial has lr 0.243
        inside = ft.compare(methods, seeds=[0, 1], tune=5, **slow)
        assert "Settings chosen on validation data (5 trials a method, seed 0)." in inside.summary.caption
        found = tried(tuner(trials=5, methods=methods, clients=10, lr=0.001))
        for line in inside.lines:
            best = max(found[line.method], key=lambda trial: trial.values.get(4, 0))
            assert best.settings["lr"] == 0.243
            assert {result.experiment.lr for result in line.results} == {0.243}
        recorded = ft.compare(methods, seeds=[0, 1], tune=5, out=tmp_path / "a", **slow)
        assert [line.accuracy for line in recorded.lines] == [line.accuracy for line in inside.lines]
        again = ft.compare(methods, seeds=[0, 1], tune=5, out=tmp_path / "a", **slow)
        assert str(again) == str(recorded)

    def test_a_comparison_that_was_not_tuned_is_left_alone(self, tmp_path: Path) -> None:
        ft.compare(["local"], seeds=[0], out=tmp_path / "a", **SMALL)
        with pytest.raises(FedtailorError, match="is a comparison whose settings were not tuned"):
            ft.compare(["local"], seeds=[0], tune=2, out=tmp_path / "a", **SMALL)

    def test_objects_are_recorded_and_gone_on_with(self, tmp_path: Path) -> None:
        """Of six trials four are there when it is killed."""
        whole, asked = tmp_path / "whole", {"trials": 6, "ranges": {"lr": "0.1|0.5|1.2"}}
        seen: list[int] = []

        def die(method: str, trial: Trial) -> None:
            seen.append(1)
            if len(seen) == 4:
                os.kill(os.getpid(), signal.SIGKILL)

        expected = tune_quadratic(out=whole, **asked)["fedavg"]
        in_a_process(lambda: tune_quadratic(out=tmp_path / "here", on_trial=die, **asked), -signal.SIGKILL)
        found = tune_quadratic(out=tmp_path / "here", **asked, on_trial=lambda method, trial: seen.append(1))["fedavg"]
        assert len(seen) == 2
        assert [replace(t, seconds=0.0) for t in found.trials] == [replace(t, seconds=0.0) for t in expected.trials]
        assert found.results[0].loss == expected.results[0].loss == tune_quadratic(**asked)["fedavg"].results[0].loss
        assert len(list(whole.glob("own-data-*.npz"))) == 1
        for name in ("tuning.toml", "tuned.toml"):
            first = (whole / name).read_text().splitlines()[0]
            assert first.endswith("by the same call: no import finds the model object:Quadratic.")
        with pytest.raises(
            FedtailorError, match=r"another tuning, where data is own-data-\w+.npz and not own-data-\w+"
        ):
            tune_quadratic(out=whole, data=quadratic()[:2], **asked)

    def test_without_optuna_it_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "optuna", None)
        with pytest.raises(FedtailorError, match=re.escape(f"Optuna is not installed: {install_command('tune')}.")):
            ft.tune(["ditto"], **SMALL)
