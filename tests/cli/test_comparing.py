"""`fedtailor compare` and `watch`, and what TensorBoard gets."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedtailor._common.extras import install_command
from fedtailor.cli import watch as watching
from tests.cli.calling import Call, contents, done, interrupted_in, refusal, usage_error

SMALL = ("--clients", 4, "--rounds", 3, "--epochs", 1, "--model", "mlp:16", "--engine", "in-process")
METHODS = ("local", "fedavg", "ditto")
FILES = {
    *("comparison.toml", "runs.json", "runs", "result.json"),
    *("table.txt", "table.md", "table.tex", "table.csv", "clients.csv"),
}


def tables(directory: str) -> list[Any]:
    """Everything of the four tables but the speed, which is never the same."""
    text = {
        ending: (Path(directory) / f"table.{ending}").read_text(encoding="utf-8") for ending in ("txt", "md", "tex")
    }
    csv_rows = list(csv.DictReader(io.StringIO((Path(directory) / "table.csv").read_text(encoding="utf-8"))))
    for row in csv_rows:
        assert float(row.pop("samples_per_second")) > 0
    ends = {"txt": None, "md": "|", "tex": "&"}
    return [csv_rows, *(_without_speed(text[ending], end) for ending, end in ends.items())]


def _without_speed(text: str, end: str | None) -> list[list[str]]:
    rows = [line.strip(" |\\").split(end) for line in text.splitlines() if any(f"{m} " in line for m in METHODS)]
    return [row[:-1] for row in rows]


class TestCompare:
    def test_the_table_is_printed_and_saved_in_four_formats(self, call: Call) -> None:
        text = done(call("compare", *METHODS, *SMALL, "--seeds", "0,1"))
        assert "Recorded in comparisons/digits-1: table.txt, .md, .tex, .csv, clients.csv, result.json, runs\n" in text
        assert "digits, 4 clients, 3 rounds, seeds 0, 1" in text
        assert set(os.listdir("comparisons/digits-1")) == FILES
        *_, said, recorded = text.splitlines()
        assert recorded.startswith("Recorded in ")
        assert re.fullmatch(r"\w+ has the highest accuracy, [\d.]+ %; .+ \(a mean over 2 seeds\)\. .+\.", said)
        assert done(call("show", "comparisons/digits-1")).splitlines()[-1] == said
        assert len(os.listdir("comparisons/digits-1/runs")) == 6
        record = json.loads(Path("comparisons/digits-1/result.json").read_text())
        for line in record["lines"]:
            assert f"{100 * line['accuracy']:.2f} ± {100 * line['accuracy_std']:.2f}" in text
        saved = Path("comparisons/digits-1/table.txt").read_text(encoding="utf-8")
        rows = [" ".join(line.split()) for line in saved.splitlines()]
        shown = [" ".join(line.split()) for line in text.splitlines()]
        assert [row for row in rows if row.startswith(METHODS)] == [row for row in shown if row.startswith(METHODS)]
        done(call("compare", "local", *SMALL, "--rounds", 1, "--seeds", "0"))
        assert sorted(os.listdir("comparisons")) == ["digits-1", "digits-2"]

    def test_interrupted_and_started_again_it_ends_with_the_same_table(
        self, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        words = ("compare", *METHODS, *SMALL, "--seeds", "0,1", "--out")
        done(call(*words, "whole"))
        with monkeypatch.context() as interrupted:
            interrupted_in(interrupted, "fedavg", 2)
            answer = call(*words, "here")
        assert answer.code == 130
        assert answer.out == ""
        said = "Interrupted. Continue with: fedtailor compare here/comparison.toml --out here\n"
        assert answer.err == said
        assert set(os.listdir("here")) == {"comparison.toml", "runs.json", "runs"}
        done(call("compare", "here/comparison.toml", "--out", "here"))
        assert tables("here") == tables("whole")
        assert set(os.listdir("here/runs")) == set(os.listdir("whole/runs"))

    def test_killed_and_started_again_it_ends_with_the_same_table(self, call: Call, tmp_path: Path) -> None:
        words = ["compare", *METHODS, *map(str, SMALL), "--rounds", "8", "--seeds", "0", "--out"]
        process = subprocess.Popen(
            [sys.executable, "-m", "fedtailor", *words, "here"], cwd=tmp_path, stdout=subprocess.PIPE
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            records = {path: path.read_text().count("\n") for path in Path("here").glob("runs/fedavg-*/rounds.jsonl")}
            if any(count >= 3 for count in records.values()):
                break
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert process.stdout is not None
        process.stdout.close()
        assert len(os.listdir("here/runs")) < 3
        (stopped,) = Path("here").glob("runs/fedavg-*")
        kept = json.loads((stopped / "checkpoint/manifest.json").read_text())["round"]
        assert kept >= (stopped / "rounds.jsonl").read_text().count("\n") - 1  # the crash cost one round
        done(call(*words, "here"))
        done(call(*words, "whole"))
        assert tables("here") == tables("whole")

    def test_a_file_with_a_grid(self, call: Call) -> None:
        Path("grid.toml").write_text(
            'methods = ["local", "ditto"]\nseeds = [0]\nclients = 4\nrounds = 1\nmodel = "mlp:16"\n'
            '[grid]\nlr = [0.1, 0.01]\nlam = [0.5, 2.0]\n[evaluation]\naverage = "sample"\n'
        )
        text = done(call("compare", "grid.toml", "--engine", "in-process", "--epochs", 1, "--out", "here"))
        for title in ("Local, lr=0.1 ", "Local, lr=0.01 ", "Ditto, lam=0.5, lr=0.1 ", "Ditto, lam=2, lr=0.01 "):
            assert f" {title}" in text
        assert "mean over test samples" in " ".join(text.split())
        assert len(os.listdir("here/runs")) == 6

    def test_set_reaches_the_methods_that_have_the_parameter(self, call: Call) -> None:
        words = ("--set", "lam=3", "--set", "lr=0.5", "--set", "evaluation.choose=best-test", "--seeds", "1")
        done(call("compare", "local", "ditto", *SMALL, *words, "--out", "here"))
        (path,) = Path("here/runs").glob("ditto-seed1-*")
        shown = json.loads(done(call("show", path, "--json")))
        assert shown["evaluation"]["choose"] == "best-test"
        text = Path("here/comparison.toml").read_text()
        assert "[parameters.ditto]\nlam = 3.0\n" in text
        assert "\nlr = 0.5\n" in text

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["local", "local"], "'local' is named twice among the methods of the comparison."),
            (["local,ditto"], "put spaces between methods"),
            (["local", "--seeds", "0;1"], "like 0,1,2, not '0;1'"),
            (["local", "--set", "lam=3"], "no parameter or setting 'lam'"),
            (["local", "--rounds", "0"], "'rounds' is '0', but it must be at least 1"),
            (["local", "nowhere.toml"], "methods or one file, not both"),
            (["nowhere.toml"], "There is no experiment file nowhere.toml"),
        ],
    )
    def test_bad_input_is_refused_before_anything_is_written(self, call: Call, words: list[str], said: str) -> None:
        assert said in refusal(call, "compare", *words)

    def test_files_and_directories_of_something_else_are_refused(self, call: Call) -> None:
        Path("run.toml").write_text('method = "ditto"\n')
        assert refusal(call, "compare", "run.toml") == "run.toml is no comparison: it has no methods = [...]."
        done(call("compare", "local", *SMALL, "--seeds", "0", "--out", "here"))
        assert "go on with `fedtailor compare here/comparison.toml --out here`" in refusal(call, "compare", "here")
        said = refusal(call, "compare", "local", *SMALL, "--seeds", "0", "--lr", 0.5, "--out", "here")
        assert said == "here is another comparison, where lr is 0.1 and not 0.5: choose another --out."
        (path,) = Path("here/runs").iterdir()
        assert "is not a comparison" in refusal(call, "compare", "local", "--out", path)
        assert "--seeds" in usage_error(call, "compare", "local", "--seed", 3)

    def test_a_run_that_fails_is_named_and_the_rest_is_shown(self, call: Call) -> None:
        Path("grid.toml").write_text('methods = ["fedavg"]\nseeds = [0]\n[grid]\nlr = [0.1, 1e30]\n')
        answer = call("compare", "grid.toml", *SMALL, "--out", "here")
        assert answer.code == 1
        assert "Failed: fedavg, lr=1e+30, seed 0: FedAvg: no client could do its work" in answer.err
        assert " FedAvg " in answer.out
        assert list(json.loads(Path("here/result.json").read_text())["failed"]) == ["fedavg, lr=1e+30, seed 0"]


class TestWatch:
    def test_a_snapshot_of_runs_and_comparisons_where_there_is_no_terminal(self, call: Call) -> None:
        done(call("compare", "local", "ditto", *SMALL, "--seeds", "0", "--out", "here"))
        (ditto,) = Path("here/runs").glob("ditto-*")
        before = contents(Path())
        shown = json.loads(done(call("show", ditto, "--json")))
        text = done(call("watch", "here"))
        assert "2 of 2 runs finished. Finished. The table is in here/table.txt." in text
        row = next(line.split() for line in text.splitlines() if line.strip().startswith("ditto, seed 0"))
        assert "3/3" in row
        assert f"{100 * shown['last']['accuracy']:.2f}" in row
        one = done(call("watch", ditto))
        assert "Accuracy of ditto, seed 0 in %" in one
        assert one.endswith("\nFinished.\n")
        assert "local, seed 0" in done(call("watch", "here/runs"))
        assert contents(Path()) == before

    def test_an_interrupted_comparison_shows_how_far_it_came(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as interrupted:
            interrupted_in(interrupted, "fedavg", 2)
            call("compare", *METHODS, *SMALL, "--seeds", "0", "--out", "here")
        text = done(call("watch", "here"))
        rows = {line.strip().split(",")[0]: line for line in text.splitlines() if ", seed 0 " in line}
        assert [f"{count}/3" in rows[name] for name, count in (("local", 3), ("fedavg", 1), ("ditto", 0))] == [True] * 3
        assert "1 of 3 runs finished. About " in text
        assert "No news" not in text
        for path in Path("here").glob("runs/*/rounds.jsonl"):
            os.utime(path, (0, time.time() - 1000))
        assert "No news for 17 min: if it was stopped, start it again to go on." in done(call("watch", "here"))

    def terminal(self, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
        screen = io.StringIO()
        monkeypatch.setattr(watching, "out", Console(file=screen, force_terminal=True, width=100, height=40))
        return screen

    def test_on_a_terminal_it_follows_until_the_run_is_finished(
        self, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done(call("run", "ditto", *SMALL, "--out", "here"))
        lines = Path("here/rounds.jsonl").read_text().splitlines(keepends=True)
        Path("here/rounds.jsonl").write_text("".join(lines[:1]))
        screen = self.terminal(monkeypatch)
        waits = []

        def wait(seconds: float) -> None:
            waits.append(seconds)
            Path("here/rounds.jsonl").write_text("".join(lines[: 1 + len(waits)]) + '{"round": 9')

        monkeypatch.setattr(watching.time, "sleep", wait)
        done(call("watch", "here"))
        assert len(waits) == 2
        shown = screen.getvalue()
        assert all(f"{number}/3" in shown for number in (1, 2, 3))
        assert shown.rstrip().removesuffix("\x1b[?25h").rstrip().endswith("Finished.")

    def test_ctrl_c_ends_it_in_peace(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as interrupted:
            interrupted_in(interrupted, "ditto", 2)
            call("run", "ditto", *SMALL, "--out", "here")
        self.terminal(monkeypatch)

        def interrupt(seconds: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(watching.time, "sleep", interrupt)
        assert call("watch", "here").code == 0

    def test_nothing_to_watch_is_said(self, call: Call) -> None:
        assert refusal(call, "watch", "nowhere") == "nowhere is no run and no comparison: there is nothing to watch."


class TestShow:
    def test_the_tables_as_compare_printed_them(self, call: Call) -> None:
        printed = done(call("compare", *METHODS, *SMALL, "--seeds", "0,1", "--target", 0.3, "--out", "here"))
        before = contents(Path("here"))
        assert done(call("show", "here")) == printed.partition("Recorded in")[0]
        assert contents(Path("here")) == before
        shown, record = (
            json.loads(done(call("show", "here", "--json"))),
            json.loads(Path("here/result.json").read_text()),
        )
        assert shown["lines"] == record["lines"]
        assert shown["clients"] == record["clients"]
        assert (shown["unfinished"], shown["failed"]) == ({}, {})
        for run in Path("here/runs").iterdir():
            assert "Clients, the worst 4 of 4 first" in done(call("show", run))

    def test_the_values_of_a_grid_keep_their_order(self, call: Call) -> None:
        Path("grid.toml").write_text("methods = ['ditto']\nseeds = [0]\n[grid]\nlam = [0.1, 3.0, 1.0, 2.0, 0.5]\n")
        printed = done(call("compare", "grid.toml", *SMALL, "--rounds", 1, "--out", "here"))
        assert done(call("show", "here")) == printed.partition("Recorded in")[0]

    def test_unfinished_runs_are_named(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as interrupted:
            interrupted_in(interrupted, "fedavg", 2)
            assert call("compare", *METHODS, *SMALL, "--seeds", "0", "--out", "here").code == 130
        text = done(call("show", "here"))
        assert "Not finished: fedavg, seed 0, 1 of 3 rounds.\n" in text
        assert "Not finished: ditto, seed 0, 0 of 3 rounds.\n" in text
        assert "Continue with: fedtailor compare here/comparison.toml --out here\n" in text
        shown = json.loads(done(call("show", "here", "--json")))
        assert [line["title"] for line in shown["lines"]] == ["local"]
        assert shown["unfinished"] == {
            "fedavg, seed 0": {"rounds": 1, "of": 3},
            "ditto, seed 0": {"rounds": 0, "of": 3},
        }
        for path in Path("here/runs").glob("local*"):
            shutil.rmtree(path)
        assert "Not finished: local, seed 0, 0 of 3 rounds.\n" in done(call("show", "here"))

    def test_a_run_that_failed_with_its_reason(self, call: Call) -> None:
        Path("bad.py").write_text(
            "import fedtailor as ft\n\nclass Bad(ft.Method):\n    def train(self, client, message):\n"
            "        raise ValueError('no luck')\n"
        )
        assert call("compare", "local", "bad:Bad", *SMALL, "--seeds", "0", "--out", "here").code == 1
        Path("bad.py").write_text("raise SystemExit('looking runs no code')")
        text = done(call("show", "here"))
        assert "Not finished: bad:Bad, seed 0, 2 of 3 rounds: Bad: no client could do its work" in text
        assert "no luck" in text

    def test_a_directory_of_runs(self, call: Call) -> None:
        done(call("run", "local", "fedavg", *SMALL, "--rounds", 1, "--out", "several"))
        said = refusal(call, "show", "several")
        assert said.startswith("several has runs inside: show one of them, like several/fedavg, or make a page")
        done(call("show", "several/fedavg"))

    def test_a_damaged_one(self, call: Call) -> None:
        done(call("compare", "local", *SMALL, "--rounds", 1, "--seeds", "0", "--out", "here"))
        Path("here/result.json").write_text('{"failed": 3')
        done(call("show", "here"))
        Path("here/runs.json").write_text("{}")
        assert "here/runs.json is damaged" in refusal(call, "show", "here")
        Path("here/runs.json").unlink()
        assert "was stopped before it began" in refusal(call, "show", "here")


class TestTensorBoard:
    def scalars(self, run: Path) -> dict[str, list[tuple[int, float]]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run / "tensorboard"))
        events.Reload()
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    def test_every_round_of_every_run_also_after_a_crash(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("tensorboard")
        with monkeypatch.context() as interrupted:
            interrupted_in(interrupted, "ditto", 3)
            assert call("run", "ditto", *SMALL, "--track", "tensorboard", "--out", "run").code == 130
        done(call("resume", "run"))
        done(call("compare", "local", *SMALL, "--track", "tensorboard", "--seeds", "0", "--out", "here"))
        for path in (Path("run"), *Path("here/runs").iterdir()):
            written = self.scalars(path)
            records = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
            for name in ("accuracy", "loss", "validation_accuracy", "bytes_up", "bytes_down", "seconds"):
                assert written[name] == [(r["round"], pytest.approx(r[name])) for r in records], name

    def test_rounds_that_a_crash_has_undone_are_void(self, call: Call) -> None:
        pytest.importorskip("tensorboard")
        done(call("run", "ditto", *SMALL, "--rounds", 2, "--track", "tensorboard", "--out", "run"))
        shutil.copytree("run/checkpoint", "kept")
        done(call("resume", "run", "--rounds", 3))
        shutil.rmtree("run/checkpoint")
        Path("kept").rename("run/checkpoint")  # as if the process had been killed before its last checkpoint
        done(call("resume", "run"))
        assert [step for step, _ in self.scalars(Path("run"))["accuracy"]] == [1, 2, 3]

    def test_without_the_package_it_is_refused_before_the_run(
        self, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        for words in (["run", "local"], ["compare", "local", "ditto"]):
            said = refusal(call, *words, *SMALL, "--track", "tensorboard")
            how = install_command("tensorboard")
            assert said == f"The tracker tensorboard is not installed: {how}, or leave it out."

    def test_it_is_not_needed_to_look_into_a_run(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("tensorboard")
        import fedtailor as ft

        done(call("run", "ditto", *SMALL, "--track", "tensorboard", "--out", "run"))
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        assert ft.load("run").personal(0)
