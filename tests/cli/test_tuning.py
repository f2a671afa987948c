"""`fedtailor tune`, `compare --tune` and `compare --settings`."""

import io
import json
import os
import re
from pathlib import Path

import pytest

from fedtailor._common.text import SafeConsole
from fedtailor.cli import display
from fedtailor.cli.tune import _title
from fedtailor.reporting.tuning_tables import in_lines, plain, tuning_table
from fedtailor.studies.trials import Trial, Tuned
from tests.cli.calling import Call, done, interrupted_in, refusal

SMALL = ("--clients", 4, "--rounds", 3, "--epochs", 1, "--model", "mlp:16", "--engine", "in-process")
FEW = (*SMALL, "--max-train", 60, "--validation", 0.2)


def trials(path: str) -> list[dict]:
    return json.loads(Path(path).read_text())["trials"]


class TestTune:
    def test_a_line_a_method_and_what_comes_next(self, call: Call) -> None:
        text = done(call("tune", "fedavg", "ditto", *FEW, "--trials", 3, "--level", 1))
        assert text.startswith("Settings chosen on validation data, 3 trials a method")
        assert set(os.listdir("tunings/digits-1")) == {"tuning.toml", "trials", "tuned.toml", "runs"}
        for method in ("fedavg", "ditto"):
            best = max(trials(f"tunings/digits-1/trials/{method}.json"), key=lambda trial: trial["values"]["3"])
            row = next(line for line in text.splitlines() if line.strip().startswith(method))
            chosen = ", ".join(f"{name}={value:g}" for name, value in best["settings"].items())
            (run,) = Path("tunings/digits-1/runs").glob(f"{method}-*")
            test = json.loads((run / "result.json").read_text())["accuracy"]
            before = trials(f"tunings/digits-1/trials/{method}.json")[0]["values"]["3"]
            values = f"{100 * best['values']['3']:.2f} {100 * before:.2f}"
            assert re.fullmatch(
                rf"{method} {chosen} {values} (–|\d\.\d+) 3 0 0 {100 * test:.2f}", " ".join(row.split())
            )
        assert "it had no part in the choice." in " ".join(text.split())
        assert "Recorded in tunings/digits-1: tuned.toml, trials, runs\n" in text
        assert text.endswith("Next: fedtailor compare tunings/digits-1/tuned.toml --seeds 0,1,2\n")
        table = done(call("compare", "tunings/digits-1/tuned.toml", "--seeds", "0"))
        assert "Settings chosen on validation data (3 trials a method, seed 0)." in " ".join(table.split())

    def test_for_programs(self, call: Call) -> None:
        answer = call(
            "tune", "ditto", *FEW, "--trials", 2, "--only", "lam", "--range", "lam=0.1|1", "--out", "a", "--json"
        )
        (found,) = json.loads(done(answer))
        assert found["method"] == "ditto"
        assert found["settings"]["lam"] in (0.1, 0.5, 1)
        assert found["trials"] == {"done": 2, "pruned": 0, "failed": 0}
        assert answer.setup == ""

    def test_after_an_interrupt_it_says_how_to_go_on(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = done(call("tune", "fedavg", "ditto", *FEW, "--trials", 3, "--out", "whole"))
        with monkeypatch.context() as patched:
            interrupted_in(patched, "ditto", 2)
            answer = call("tune", "fedavg", "ditto", *FEW, "--trials", 3, "--out", "a")
        assert answer.code == 130
        assert answer.err == "Interrupted. The same command with --out a goes on.\n"
        again = done(call("tune", "fedavg", "ditto", *FEW, "--trials", 3, "--out", "a"))
        assert again == whole.replace("whole", "a")

    def test_a_method_that_always_fails_is_named_and_the_others_stay(self, call: Call) -> None:
        words = ("--set", "outer_lr=1e30", "--only", "lr", "--trials", 1, "--out", "a")
        answer = call("tune", "ditto", "pfedme", *FEW, *words)
        assert answer.code == 1
        assert re.fullmatch(r"Failed: pfedme: PFedMe: no client could do its work in .+\n", answer.err)
        assert "none: all trials failed" in answer.out

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--range", "lr"), "--range takes NAME=RANGE, like lr=0.01..1:log, not 'lr'."),
            (("--range", "lr=1"), "The range of lr is '1', but it must be like"),
            (("--trials", 0), "A method cannot be tuned in 0 trials: give at least 1."),
            (("--seeds", "x"), "--seeds takes whole numbers"),
        ],
    )
    def test_what_is_wrong_is_said_in_one_sentence(self, call: Call, words: tuple, said: str) -> None:
        assert refusal(call, "tune", "ditto", *SMALL, *words).startswith(said)


class TestNarrowPages:
    def test_a_trial_is_named_without_its_settings_where_there_is_no_room_for_the_bar(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = {"lr": 0.1, "lam": 0.5}
        assert _title("ditto, trial 1 of 2", settings) == "ditto, trial 1 of 2: lr=0.1, lam=0.5"  # in a log
        monkeypatch.setattr(display.out, "_force_terminal", True)
        for width, said in ((80, "ditto, trial 1 of 2"), (120, "ditto, trial 1 of 2: lr=0.1, lam=0.5")):
            monkeypatch.setattr(display.out, "width", width)
            assert _title("ditto, trial 1 of 2", settings) == said

    def test_no_chosen_value_is_cut(self) -> None:
        settings = {"reconstruction_epochs": 10, "reconstruction_lr": 0.000123}
        tuned = [Tuned("fedrecon", (Trial(settings=settings, state="done", values={1: 0.5}),))]
        console = SafeConsole(width=80, file=io.StringIO(), color_system=None)
        with console.capture() as captured:
            console.print(tuning_table(tuned, "1 trials a method"))
        assert "…" not in captured.get()


class TestSignificance:
    def test_a_better_trial_that_is_not_chosen_is_named_with_its_p(self) -> None:
        first = Trial(settings={"lr": 0.1}, state="done", values={1: 0.5})
        better = Trial(settings={"lr": 0.3}, state="done", values={1: 0.6}, p=0.25)
        (line,) = in_lines(Tuned("ditto", (first, better)), 200)
        assert line.startswith(
            "ditto: lr=0.1 (accuracy 50.00 % on validation data, 50.00 before; the best trial, 60.00, has p = 0.250; "
        )
        (line,) = in_lines(Tuned("ditto", (first, better), level=1), 200)
        assert line.startswith("ditto: lr=0.3 (accuracy 60.00 % on validation data, 50.00 before; trials: 2 done")
        (row,) = plain([Tuned("ditto", (first, better))])
        assert row["settings"] == {"lr": 0.1}
        assert row["best"] == {"settings": {"lr": 0.3}, "validation": 0.6, "p": 0.25}

    def test_the_level_is_an_option(self, call: Call) -> None:
        words = ("tune", "ditto", *FEW, "--lr", 0.001, "--range", "lr=0.1..1:log", "--only", "lr", "--trials", 2)
        for level, chosen in ((0.05, "lr=0.001"), (1, "lr=0.129")):
            text = done(call(*words, "--level", level, "--out", "a"))  # the trials are the same
            assert re.search(rf"ditto +{chosen} ", text)
        assert refusal(call, *words, "--level", 0).startswith("The level is a p-value")


class TestCompare:
    def test_tunes_first_and_says_what_was_chosen(self, call: Call) -> None:
        words = ("compare", "fedavg", "ditto", *FEW, "--tune", 3, "--seeds", "0,1", "--out", "a")
        text = done(call(*words))
        for method in ("fedavg", "ditto"):
            best = max(trials(f"a/tuning/trials/{method}.json"), key=lambda trial: trial["values"]["3"])
            chosen = ", ".join(f"{name}={value:g}" for name, value in best["settings"].items())
            assert f"{method}: {chosen} (accuracy {100 * best['values']['3']:.2f} % on validation data, " in text
        assert "trials: 3 done, 0 pruned, 0 failed)" in text
        said = "Settings chosen on validation data (3 trials a method, seed 0)."
        assert said in " ".join(text.split())
        assert said in " ".join(Path("a/table.md").read_text(encoding="utf-8").split())
        assert done(call(*words)) == text
        assert done(call("compare", "a/comparison.toml", "--out", "a")) in text
        done(call("report", "a", "--out", "a.html"))
        assert "Settings chosen on validation data (3 trials" in Path("a.html").read_text(encoding="utf-8")

    def test_what_was_chosen_fits_a_narrow_page(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(display.out, "width", 80)
        text = done(call("compare", "fedrep", *FEW, "--tune", 1, "--seeds", "0", "--out", "a"))
        first, second = text.splitlines()[:2]
        assert first.startswith("fedrep: max_lr=0.02, head_epochs=10, body_epochs=1 (accuracy ")
        assert second.startswith("  ")
        assert max(len(first), len(second)) <= 80
        assert "trials: 1 done, 0 pruned, 0 failed)" in " ".join(f"{first} {second}".split())

    def test_lines_are_named_by_their_method_and_it_is_said_again(self, call: Call) -> None:
        """Each method has a learning rate of its own: it does not tell lines apart."""
        rates = 'methods = ["fedavg", "ditto"]\ntuned = "by hand"\n[settings.fedavg]\nlr = 0.3\n'
        Path("other.toml").write_text(rates)
        text = done(call("compare", "other.toml", *FEW, "--seeds", "0", "--out", "a"))
        assert "lr=" not in text
        assert [line["settings"] for line in json.loads(Path("a/result.json").read_text())["lines"]] == [
            {"lr": 0.3},
            {"lr": 0.1},
        ]
        again = done(call("show", "a"))
        assert "Settings chosen on validation data (by hand)." in " ".join(again.split())

    def test_takes_the_settings_of_a_tuning(self, call: Call) -> None:
        done(call("tune", "fedavg", "ditto", *FEW, "--trials", 3, "--out", "t"))
        done(call("compare", "ditto", *FEW, "--settings", "t", "--seeds", "0", "--out", "a"))
        (mine,), (theirs,) = Path("a/runs").iterdir(), Path("t/runs").glob("ditto-*")
        assert mine.name == theirs.name  # the same experiment
        done(
            call("compare", "ditto", *FEW, "--settings", "t/tuned.toml", "--set", "lam=3", "--seeds", "0", "--out", "b")
        )
        assert "lam = 3" in next(Path("b/runs").iterdir()).joinpath("experiment.toml").read_text()
        said = refusal(call, "compare", "ditto", "local", *FEW, "--settings", "t", "--out", "c")
        assert said == "t has no settings of local: tune it too, or leave it out."
        said = refusal(call, "compare", "ditto", *FEW, "--lr", 0.5, "--settings", "t", "--out", "c")
        assert re.fullmatch(r"lr is \S+ for ditto by its own settings: leave --lr out, or those\.", said)
        assert refusal(call, "compare", "ditto", "--settings", "nowhere").startswith("There is no experiment file")

    def test_an_interrupt_while_it_tunes_loses_nothing(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        words = ("compare", "fedavg", "ditto", *FEW, "--tune", 2, "--seeds", "0", "--out")
        whole = done(call(*words, "whole"))
        with monkeypatch.context() as patched:
            interrupted_in(patched, "ditto", 1)
            answer = call(*words, "a")
        assert (answer.code, answer.err) == (130, "Interrupted. The same command with --out a goes on.\n")
        assert len(trials("a/tuning/trials/fedavg.json")) == 2
        text = done(call(*words, "a"))
        assert text.splitlines()[:2] == whole.splitlines()[:2]

    def test_a_grid_and_tuning_are_two_ways(self, call: Call) -> None:
        Path("grid.toml").write_text('methods = ["ditto"]\n[grid]\nlr = [0.1, 0.01]\n')
        assert "give one of the two" in refusal(call, "compare", "grid.toml", "--tune", 2)

    @pytest.mark.parametrize(
        ("section", "said"),
        [
            (
                "[settings]\nlr = 0.1",
                "The settings of a comparison stand in a section for each method: [settings.METHOD].",
            ),
            ("[settings.local]\nlr = 0.1", "There is no method of this comparison 'local'"),
            ("[settings.ditto]\nclients = 3", "The settings of one method cannot vary clients"),
            ("[settings.ditto]\nlam = 3", "There is no setting or parameter 'lam'"),
            ("[settings.ditto]\nlr = -1", "The setting 'lr' is -1, but it must be above 0."),
        ],
    )
    def test_wrong_settings_of_a_method(self, call: Call, section: str, said: str) -> None:
        Path("one.toml").write_text(f'methods = ["ditto"]\n{section}\n')
        assert refusal(call, "compare", "one.toml").startswith(said)


class TestMethods:
    def test_ranges_stand_behind_the_parameters(self, call: Call) -> None:
        text = " ".join(done(call("methods", "ditto", "pgfed")).split())
        assert "0.01..2:log)" in text
        assert "SCAFFOLD" not in text
        (found,) = json.loads(done(call("methods", "fedrep", "--json")))
        assert found["parameters"]["head_epochs"]["search"] == "1..10"
        assert found["parameters"]["refit"]["search"] is None
        assert "did you mean 'ditto'?" in refusal(call, "methods", "dito")
