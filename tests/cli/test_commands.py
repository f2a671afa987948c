"""What the commands do when all is well."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtailor
from fedtailor.cli import COMMANDS, display
from fedtailor.experiment import Evaluation, Experiment
from fedtailor.methods.ditto import Ditto
from tests.cli.calling import PROGRESS, Answer, Call, contents, done, interrupted_in, refusal
from tests.helpers import files

SMALL = ("--clients", 3, "--rounds", 2, "--engine", "in-process")
MODULES = sorted({f"fedtailor.cli.{module}" for module, _ in COMMANDS.values()})
DEFAULTS = {"--data": "digits", "--data-dir": "FEDTAILOR_DATA, else ./data",
            "--clients": "20, or as many as the data names",
            "--partition": "dirichlet:0.3, or natural where the data names clients", "--test": "0.2", "--model": "mlp",
            "--loss": "cross-entropy", "--rounds": "20", "--participation": "all", "--lr": "0.1", "--batch": "10",
            "--seed": "0", "--dtype": "float32", "--device": "cpu", "--engine": "auto",
            "--workers": "as many as cores, or as the cluster has CPUs", "--states": "memory",
            "--checkpoint-every": "10", "--evaluate-model": "personal", "--evaluate-choose": "last",
            "--out": "runs/METHOD-DATA-1, -2, …"}  # fmt: skip


def cells(line: str) -> list[str]:
    """What stands in a row of a table, whatever is drawn between its columns."""
    return re.split(r"[\s│┃]+", line.strip(" │┃"))


def settings_of(directory: str | Path) -> dict[str, Any]:
    return tomllib.loads((Path(directory) / "experiment.toml").read_text(encoding="utf-8"))


def rounds_of(directory: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(directory) / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]


def numbers(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without their times, and the checksums that cover these."""
    left_out = ("seconds", "checksum")
    return [{name: value for name, value in record.items() if name not in left_out} for record in records]


def write(path: str, text: str) -> str:
    Path(path).write_text(text, encoding="utf-8")
    return path


def own_data(path: str, *, classes: int = 3, clients: tuple[str, ...] = ()) -> str:
    """An npz of 60 samples, of named clients if there are any."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {"x": rng.normal(size=(60, 4)), "y": np.arange(60) % classes}
    if clients:
        arrays["client"] = np.array([clients[i % len(clients)] for i in range(60)])
    np.savez(path, **arrays)
    return path


def subprocess_answer(*words: str, cwd: Path, columns: int = 80) -> Answer:
    """A command in a process of its own, its output going into a pipe."""
    environment = {**os.environ, "COLUMNS": str(columns)}
    ended = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    progress = tuple(line.rstrip("\n") for line in PROGRESS.findall(ended.stderr))
    return Answer(ended.returncode, ended.stdout, PROGRESS.sub("", ended.stderr), progress=progress)


class TestRun:
    def test_one_method_is_recorded_in_a_numbered_directory(self, call: Call) -> None:
        for number in (1, 2):
            text = done(call("run", "fedavg", *SMALL))
            assert f"Recorded in runs/fedavg-digits-{number}\n" in text
            assert "fedavg" in text.partition("Recorded")[0]
            assert "digits, 2 of 2 rounds, seed 0" in text
        assert sorted(os.listdir("runs")) == ["fedavg-digits-1", "fedavg-digits-2"]

    def test_several_methods_are_shown_side_by_side_in_the_order_given(self, call: Call) -> None:
        Path("three").mkdir()  # an empty directory will do
        text = done(call("run", "local", "fedavg", "ditto", *SMALL, "--out", "three"))
        table, _, recorded = text.partition("Recorded in")
        places = [table.index(name) for name in ("local", "fedavg", "ditto")]
        assert places == sorted(places)
        assert re.findall(r"three/\w+", recorded) == ["three/local", "three/fedavg", "three/ditto"]
        assert set(os.listdir("three")) == {"local", "fedavg", "ditto"}
        assert rounds_of("three/local") != rounds_of("three/fedavg")

    def test_the_table_says_what_its_metrics_mean(self, call: Call) -> None:
        text = " ".join(done(call("run", "fedavg", *SMALL, "--fine-tune", 2, "--evaluate-average", "sample")).split())
        meaning = "Test accuracy in % of personal models, fine-tuned for 2 epochs, all clients, mean over test samples"
        assert meaning in text

    def test_the_profile_says_where_the_time_went(self, call: Call) -> None:
        assert "Where the time went" not in done(call("run", "fedavg", *SMALL))
        text = done(call("run", "local", "fedavg", *SMALL, "--profile")).partition("Where the time went")[2]
        for method in ("local", "fedavg"):
            line = next(line for line in text.splitlines() if line.strip().startswith(method))
            sending, training, aggregation, evaluation, _, rest, speed = line.split()[1:]
            assert float(training) > 0
            assert float(speed.replace(",", "")) > 0
            parts = [float(cell) for cell in (sending, training, aggregation, evaluation, rest)]
            run = fedtailor.load(f"runs/{method}-digits-{1 + (method == 'fedavg')}")
            seconds = sum(record.seconds for record in run.rounds)
            assert sum(parts) == pytest.approx(seconds, abs=0.05)

    @pytest.mark.parametrize("columns", [80, 200])
    def test_the_table_names_every_method_in_full_even_on_a_narrow_page(
        self, call: Call, monkeypatch: pytest.MonkeyPatch, columns: int
    ) -> None:
        monkeypatch.setattr(display.out, "width", columns)
        text = done(call("run", "fedprox", "fedavg", *SMALL))
        table = text.partition("Recorded in")[0]
        assert "fedprox" in table
        assert "fedavg" in table
        assert "…" not in table

    def test_command_line_settings_go_over_those_of_the_file(self, call: Call) -> None:
        file = write("mine.toml", 'method = "ditto"\nclients = 3\nrounds = 1\nlr = 0.5\n[parameters]\nlam = 0.7\n')
        done(call("run", file, "--lr", "0.25", "--seed", 4, "--engine", "in-process", "--out", "here"))
        settings = settings_of("here")
        assert settings["parameters"] == {"lam": 0.7}
        assert (settings["lr"], settings["seed"], settings["rounds"]) == (0.25, 4, 1)

    def test_command_line_evaluation_goes_over_the_files_and_keeps_the_rest_of_it(self, call: Call) -> None:
        file = write("mine.toml", 'clients = 3\nrounds = 1\n[evaluation]\nmodel = "global"\naverage = "sample"\n')
        done(call("run", file, "--evaluate-model", "local", "--engine", "in-process", "--out", "here"))
        assert settings_of("here")["evaluation"]["model"] == "local"
        assert settings_of("here")["evaluation"]["average"] == "sample"

    def test_set_reaches_parameters_settings_and_the_evaluation(self, call: Call) -> None:
        assignments = ("lam=0.5", "lr=0.02", "evaluation.model=global", "data = digits")
        words = [word for assignment in assignments for word in ("--set", assignment)]
        done(call("run", "ditto", *SMALL, *words, "--out", "here"))
        settings = settings_of("here")
        assert settings["parameters"] == {"lam": 0.5}
        assert settings["lr"] == 0.02
        assert settings["evaluation"]["model"] == "global"
        assert settings["data"] == "digits"

    def test_set_goes_over_the_parameters_of_the_file(self, call: Call) -> None:
        file = write("mine.toml", 'method = "ditto"\n[parameters]\nlam = 0.7\n')
        done(call("run", file, *SMALL, "--set", "parameters.lam=0.3", "--out", "here"))
        assert settings_of("here")["parameters"] == {"lam": 0.3}

    def test_a_method_and_a_model_of_ones_own_are_named_by_module(self, call: Call) -> None:
        write(
            "tests_cli_mine.py",
            "import torch\n"
            "from torch import nn\n"
            "from fedtailor import Method\n"
            "class Half(Method):\n"
            "    '''Half of what FedAvg does.'''\n"
            "    share: float = 0.5\n"
            "    def train(self, client, message):\n"
            "        old = message['theta']\n"
            "        return {'theta': old + self.share * (client.descend(old) - old)}\n"
            "class Net(nn.Sequential):\n"
            "    def __init__(self):\n"
            "        super().__init__(nn.Flatten(), nn.Linear(64, 10))\n",
        )
        mine = ("tests_cli_mine:Half", "--model", "tests_cli_mine:Net", *SMALL)
        done(call("run", *mine, "--out", "half"))
        done(call("run", *mine, "--set", "share=1", "--out", "whole"))
        done(call("run", "fedavg", "--model", "tests_cli_mine:Net", *SMALL, "--out", "fedavg"))
        assert settings_of("half")["parameters"] == {"share": 0.5}
        assert rounds_of("half")[-1]["loss"] != rounds_of("whole")[-1]["loss"]
        assert rounds_of("whole")[-1]["loss"] == pytest.approx(rounds_of("fedavg")[-1]["loss"], rel=1e-4)

    def test_own_data_name_the_numbered_directory(self, call: Call) -> None:
        own_data("scans.npz", clients=("a", "b"))
        done(call("run", "fedavg", "--data", "scans.npz", "--rounds", 1, "--engine", "in-process"))
        assert os.listdir("runs") == ["fedavg-scans-1"]

    def test_a_client_that_fails_is_named_on_stderr_and_the_run_goes_on(self, call: Call) -> None:
        write(
            "tests_cli_failing.py",
            "from fedtailor.methods.fedavg import FedAvg\n"
            "class Failing(FedAvg):\n"
            "    def train(self, client, message):\n"
            "        if client.id == 1:\n"
            "            raise RuntimeError('[no] battery')\n"
            "        return super().train(client, message)\n",
        )
        answer = call("run", "tests_cli_failing:Failing", *SMALL, "--out", "here")
        assert answer.code == 0
        lines = answer.err.splitlines()
        assert len(lines) == 2
        fault = "RuntimeError: [no] battery (tests_cli_failing.py, line 5)"
        assert lines[0] == f"Warning: Failing, round 1: client 1 left out: {fault}."
        assert lines[1] == "Warning: Failing: 1 of 3 clients failed in every round that they took part in."
        assert "1 of 3 clients failed in every round that they took part in" in " ".join(answer.out.split())
        assert [record["failed"] for record in rounds_of("here")] == [[1], [1]]


class TestResume:
    def test_a_finished_run_stays_as_it_is(self, call: Call) -> None:
        first = done(call("run", "fedavg", *SMALL, "--out", "here"))
        before = contents(Path("here"))
        again = done(call("resume", "here"))
        assert contents(Path("here")) == before
        assert again == first.partition("Recorded in")[0]

    def test_more_rounds_give_the_numbers_of_a_longer_run(self, call: Call) -> None:
        done(call("run", "ditto", *SMALL, "--out", "short"))
        text = done(call("resume", "short", "--rounds", 4))
        assert "4 of 4 rounds" in text
        done(call("run", "ditto", "--clients", 3, "--rounds", 4, "--engine", "in-process", "--out", "long"))
        assert numbers(rounds_of("short")) == numbers(rounds_of("long"))
        assert files(Path("short/checkpoint")) == files(Path("long/checkpoint"))
        assert settings_of("short") == settings_of("long")
        assert json.loads(Path("short/result.json").read_text())["rounds"] == 4

    def test_a_run_without_its_last_rounds_goes_on_from_the_checkpoint(self, call: Call) -> None:
        words = ("--clients", 3, "--rounds", 4, "--engine", "in-process")
        done(call("run", "fedavg", *words, "--out", "whole"))
        done(call("run", "fedavg", "--clients", 3, "--rounds", 2, "--engine", "in-process", "--out", "cut"))
        for name in ("experiment.toml", "about.json"):
            (Path("cut") / name).write_bytes((Path("whole") / name).read_bytes())
        (Path("cut") / "result.json").unlink()
        with (Path("cut") / "rounds.jsonl").open("a") as file:
            file.write('{"round": 3, "accur')  # the line that a crash cut off
        assert "2 of 4 rounds" in done(call("show", "cut"))
        assert "Not finished. Continue with: fedtailor resume cut\n" in done(call("show", "cut"))
        done(call("resume", "cut"))
        assert numbers(rounds_of("cut")) == numbers(rounds_of("whole"))
        assert files(Path("cut/checkpoint")) == files(Path("whole/checkpoint"))


class TestInterruption:
    def test_in_the_middle_it_leaves_a_run_that_resumes_to_the_same_numbers(
        self, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        words = ("--clients", 3, "--rounds", 4, "--engine", "in-process")
        done(call("run", "ditto", *words, "--out", "whole"))
        with monkeypatch.context() as interrupted:
            interrupted_in(interrupted, "ditto", 3)
            answer = call("run", "ditto", *words, "--out", "here")
        assert answer == Answer(130, "", "Interrupted. Continue with: fedtailor resume here\n")
        assert [record["round"] for record in rounds_of("here")] == [1, 2]
        done(call("resume", "here"))
        assert numbers(rounds_of("here")) == numbers(rounds_of("whole"))
        assert files(Path("here/checkpoint")) == files(Path("whole/checkpoint"))

    def test_before_there_is_a_run_directory_nothing_is_said_of_resuming(
        self, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("fedtailor.engines.runs.prepare", interrupted)
        answer = call("run", "fedavg", *SMALL)
        assert answer.code == 130
        assert "Traceback" not in answer.err
        assert "resume" not in answer.err
        assert contents(Path()) == {}


class TestShow:
    def test_the_metrics_the_rounds_and_the_clients(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        """With headers that are whole at 80 columns, and as a summary with every client. It writes nothing."""
        done(call("run", "fedavg", *SMALL, "--out", "here"))
        before = contents(Path())
        text = done(call("show", "here"))
        last = rounds_of("here")[-1]
        assert f"{100 * last['accuracy']:.2f}" in text
        assert f"{last['loss']:.4f}" in text
        assert "Rounds" in text
        assert "Clients, the worst 3 of 3 first" in text
        assert "Not finished" not in text
        monkeypatch.setattr(display.out, "width", 80)
        clients = done(call("show", "here")).partition("Clients, the worst")[2]
        words = ("client", "balanced", "accuracy", "AUC", "F1", "log", "loss", "train", "test", "rounds")
        assert [word for word in words if not re.search(rf"\b{word}\b", clients)] == []
        assert "…" not in clients
        shown = json.loads(done(call("show", "here", "--json")))
        assert shown["accuracy"] == last["accuracy"]
        assert shown["finished"] is True
        assert shown["evaluation"]["model"] == "personal"
        assert shown["last"]["round"] == 2
        assert {"best-validation", "best-test", "bytes_up", "bytes_down", "seconds"} <= shown.keys()
        accuracies = [client["accuracy"] for client in shown["per_client"]]
        assert [(client["client"], client["name"]) for client in shown["per_client"]] == [(0, "0"), (1, "1"), (2, "2")]
        assert np.mean(accuracies) == pytest.approx(last["accuracy"])
        assert contents(Path()) == before

    def test_clients_are_shown_by_their_names(self, call: Call) -> None:
        own_data("scans.npz", clients=("Aachen", "Bonn", "Chemnitz"))
        done(call("run", "fedavg", "--data", "scans.npz", "--rounds", 1, "--engine", "in-process", "--out", "here"))
        text = done(call("show", "here"))
        for name in ("Aachen", "Bonn", "Chemnitz"):
            assert name in text

    def test_the_worst_client_comes_first(self, call: Call) -> None:
        done(call("run", "local", *SMALL, "--out", "here"))
        table = done(call("show", "here")).partition("Clients, ")[2]
        shown = [float(row[1]) for row in map(cells, table.splitlines()) if row and row[0] in ("0", "1", "2")]
        assert len(shown) == 3
        assert shown == sorted(shown)

    def test_a_run_without_a_finished_round(self, call: Call) -> None:
        done(call("run", "fedavg", *SMALL, "--out", "here"))
        (Path("here") / "rounds.jsonl").unlink()
        (Path("here") / "clients.jsonl").unlink()
        (Path("here") / "result.json").unlink()
        assert done(call("show", "here")) == ("here: no round is finished yet. Continue with: fedtailor resume here\n")
        assert json.loads(done(call("show", "here", "--json")))["finished"] is False


class TestCatalogues:
    def test_methods(self, call: Call) -> None:
        rows = json.loads(done(call("methods", "--json")))
        assert all(row.keys() == {"name", "summary", "parameters", "uploads", "paper", "tuned"} for row in rows)
        by_name = {row["name"]: row for row in rows}
        assert len(rows) == len(by_name) == 48
        assert by_name["pgfedmo"]["parameters"]["beta"]["default"] == 0.5
        assert by_name["ditto"]["parameters"]["lam"]["default"] == Ditto().lam
        assert by_name["ditto"]["parameters"]["lam"]["description"]
        assert all(row["summary"].endswith(".") for row in rows)
        text = done(call("methods"))
        assert all(name in text for name in by_name)
        assert f"lam={Ditto().lam}" in text

    @pytest.mark.parametrize("columns", [80, 200])
    def test_methods_say_what_leaves_a_client(self, call: Call, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
        monkeypatch.setattr(display.out, "width", columns)
        uploads = {row["name"]: row["uploads"] for row in json.loads(done(call("methods", "--json")))}
        assert uploads["local"] == {}
        assert uploads["scaffold"] == {"theta": "plain mean", "change": "plain mean"}
        assert uploads["apfl"] == {"theta": "mean by samples", "alpha": "each client's own"}
        lines = done(call("methods")).splitlines()
        assert "what leaves a client" in "\n".join(lines[:5])
        first = {name: next(at for at, line in enumerate(lines) if line.startswith(f" {name} ")) for name in uploads}
        ends = dict(zip(first, [*list(first.values())[1:], len(lines)], strict=True))
        shown = {name: "\n".join(lines[first[name] : ends[name]]) for name in first}
        assert "nothing" in shown["local"]
        assert "theta, change: plain mean" in shown["scaffold"]
        for said in ("theta: mean by samples", "alpha: each client's own"):
            assert said in shown["apfl"]
        assert "…" not in "".join(lines)

    def test_models(self, call: Call) -> None:
        rows = json.loads(done(call("models", "--json")))
        by_name = {row["name"]: row for row in rows}
        assert all(row.keys() == {"name", "description", "parameters"} for row in rows)
        assert by_name["cnn"]["parameters"]["32×32 colour"] == 878_538
        text = done(call("models"))
        assert all(name in text for name in by_name)
        assert "878,538" in text

    def test_data(self, call: Call) -> None:
        shown = json.loads(done(call("data", "--json")))
        assert shown.keys() == {"data", "partitions"}
        keys = {"name", "description", "classes", "found", "files", "source"}
        assert all(keys <= row.keys() for row in shown["data"])
        found = {row["name"]: row["found"] for row in shown["data"]}
        assert found["digits"] is True
        assert found["mnist"] is False
        assert any(name.startswith("dirichlet") for name in shown["partitions"])
        text = done(call("data"))
        assert all(name in text for name in [*found, *shown["partitions"]])
        sources = {row["name"]: row["source"] for row in shown["data"]}
        assert sources["fashion-mnist"] == "https://github.com/zalandoresearch/fashion-mnist"

    def test_data_that_are_there_are_found(self, call: Call) -> None:
        for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
            path = Path("elsewhere/mnist") / f"{name}-ubyte.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        shown = json.loads(done(call("data", "--data-dir", "elsewhere", "--json")))
        assert {row["name"]: row["found"] for row in shown["data"]}["mnist"] is True


class TestPartitions:
    def test_the_table_counts_every_sample_of_every_client(self, call: Call) -> None:
        words = ("data", "digits", "--clients", 4, "--partition", "classes:2", "--seed", 3)
        partition = json.loads(done(call(*words, "--json")))
        assert partition["clients"] == ["0", "1", "2", "3"]
        assert partition["classes"] == [str(digit) for digit in range(10)]
        table = np.array([partition["train"], partition["validation"], partition["test"]])
        assert table.shape == (3, 4, 10)
        assert ((table.sum(0) > 0).sum(1) == 2).all()
        lines = [line for line in done(call(*words)).splitlines() if re.match(r"\W*\d+ ", line)]
        assert len(lines) == 4
        for client, line in enumerate(lines):
            counts = [0 if cell == "·" else int(cell) for cell in re.findall(r"\d+|·", line)]
            assert counts == [client, *table[:, client].sum(1).tolist(), *table[:, client].sum(0).tolist()]
            assert {"░", "▒", "▓", "█"} & set(line)

    def test_what_the_most_frequent_classes_give(self, call: Call) -> None:
        words = ("data", "digits", "--clients", 4, "--partition", "dirichlet:0.3")
        partition = json.loads(done(call(*words, "--json")))
        train, test = np.array(partition["train"]), np.array(partition["test"])
        mean = np.mean([tested[trained.argmax()] / tested.sum() for trained, tested in zip(train, test, strict=True)])
        said = f"A client's most frequent training class is right for {100 * mean:.1f} % of its test samples"
        assert said in done(call(*words))

    def test_it_is_the_partition_of_a_run(self, call: Call) -> None:
        words = ("--clients", 3, "--partition", "quantity:0.5", "--seed", 2)
        partition = json.loads(done(call("data", "digits", *words, "--json")))
        done(call("run", "fedavg", "--rounds", 1, "--engine", "in-process", *words, "--out", "here"))
        recorded = json.loads(Path("here/partition.json").read_text())
        assert recorded.pop("network")  # the run's own: a checksum of the first vector
        assert recorded.pop("checksum")
        assert recorded == partition

    def test_natural_clients_keep_their_names(self, call: Call) -> None:
        own_data("scans.npz", clients=("Aachen", "Bonn [west]", "[/]"))
        partition = json.loads(done(call("data", "scans.npz", "--json")))
        assert sorted(partition["clients"]) == ["Aachen", "Bonn [west]", "[/]"]
        text = done(call("data", "scans.npz"))
        assert "scans.npz: 60 samples, 3 clients" in text
        assert all(name in text for name in ("Aachen", "Bonn [west]", "[/]"))

    def test_classes_may_have_any_name(self, call: Call) -> None:
        np.savez("odd.npz", x=np.ones((40, 2)), y=np.array(["[bold]", "[/]"] * 20))
        text = done(call("data", "odd.npz", "--clients", 2, "--partition", "iid"))
        assert "[bold]" in text
        assert "[/]" in text

    def test_new_clients_are_marked(self, call: Call) -> None:
        words = ("data", "digits", "--clients", 5, "--new-clients", 2)
        new = json.loads(done(call(*words, "--json")))["new"]
        assert len(new) == 2
        text = done(call(*words))
        assert {int(number) for number in re.findall(r"(\d+) \(new\)", text)} == set(new)

    def test_many_classes_get_shades_in_place_of_columns(self, call: Call) -> None:
        own_data("many.npz", classes=45)
        words = ("data", "many.npz", "--clients", 2, "--partition", "iid", "--min-samples", 1)
        partition = json.loads(done(call(*words, "--json")))
        counts = np.array([partition["train"], partition["validation"], partition["test"]]).sum(0)
        lines = [line for line in done(call(*words)).splitlines() if re.match(r"\W*\d+ ", line)]
        assert len(lines) == 2
        for line, row in zip(lines, counts, strict=True):
            assert len(re.findall(r"\d+", line)) == 4  # the client, train, validation, test
            assert len(re.findall("[░▒▓█]", line)) == np.count_nonzero(row)

    def test_the_table_can_be_read_on_a_page_of_80_columns(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(display.out, "width", 80)
        text = done(call("data", "digits", "--clients", 4))
        assert "…" not in text
        assert "train" in text
        assert max(map(len, text.splitlines())) <= 80


class TestHelp:
    def test_version(self, call: Call) -> None:
        assert done(call("--version")) == f"fedtailor {fedtailor.__version__}\n"

    def test_no_command_at_all_shows_the_help(self, call: Call) -> None:
        answer = call()
        assert answer.err == ""
        assert "Usage:" in answer.out
        assert "\n  methods " in answer.out

    def test_run_help_names_every_setting(self, call: Call) -> None:
        text = done(call("run", "--help"))
        plain = [name for name in Experiment.model_fields if name not in ("method", "parameters", "evaluation")]
        names = [*plain, *(f"evaluate_{name}" for name in Evaluation.model_fields), "set", "out"]
        flags = ["--" + name.replace("_", "-") for name in names]
        assert [flag for flag in flags if not re.search(rf"{flag}(?![\w-])", text)] == []

    def test_run_help_gives_the_defaults(self, call: Call) -> None:
        text = re.sub(r"\s+", " ", done(call("run", "--help")).partition("\nData\n")[2])
        missing = []
        for flag, default in DEFAULTS.items():
            about = re.split(rf"[ ,]{flag}[ ,]", text)[1].split(" --")[0]
            if f"[{default}]" not in about:
                missing.append((flag, default))
        assert missing == []

    @pytest.mark.parametrize(
        ("calls", "without"),
        [
            ([["--help"]], ["torch", "sklearn", "numpy", "pydantic", "fedtailor.cli.options", *MODULES]),
            ([["run", "--help"], ["data", "--help"], ["--version"]], ["torch", "sklearn", "numpy"]),
        ],
    )
    def test_help_waits_for_nothing_that_it_does_not_need(
        self, calls: list[list[str]], without: list[str], tmp_path: Path
    ) -> None:
        program = (
            "import sys\n"
            "from fedtailor.cli import main\n"
            f"for words in {calls}:\n"
            "    sys.argv = ['fedtailor', *words]\n"
            "    try:\n"
            "        main()\n"
            "    except SystemExit as exit:\n"
            "        assert not exit.code, exit.code\n"
            f"imported = set({without}) & set(sys.modules)\n"
            "assert not imported, imported\n"
        )
        shown = done(subprocess_answer("-c", program, cwd=tmp_path)).count("Usage: fedtailor")
        assert shown == sum("--help" in words for words in calls)

    def test_help_has_the_first_line_of_every_command(self, call: Call) -> None:
        text = " ".join(done(call("--help")).split())
        for name, (module, summary) in COMMANDS.items():
            command = getattr(importlib.import_module(f"fedtailor.cli.{module}"), name)
            assert command.__doc__.splitlines()[0] == summary
            assert f" {name} {summary} " in text

    def test_what_a_file_turns_on_can_be_turned_off(self, call: Call) -> None:
        file = write("mine.toml", "clients = 3\nrounds = 1\ndrop_last = true\n[evaluation]\ntrain = true\n")
        done(call("run", file, "--engine", "in-process", "--out", "on"))
        done(call("run", file, "--engine", "in-process", "--no-drop-last", "--no-evaluate-train", "--out", "off"))
        done(call("run", "fedavg", *SMALL, "--drop-last", "--evaluate-train", "--out", "given"))
        for name, there in (("on", True), ("off", False), ("given", True)):
            settings = settings_of(name)
            assert (settings["drop_last"], settings["evaluation"]["train"]) == (there, there)

    def test_options_of_the_evaluation_are_lines_of_a_file_and_can_be_set(self, call: Call) -> None:
        lines = 'clients = 3\nrounds = 1\nengine = "in-process"\nfine_tune = 2\nevaluate_clients = "participants"\n'
        file = write("mine.toml", lines)
        done(call("run", file, "--out", "file"))
        done(call("run", file, "--fine-tune", 1, "--out", "option"))  # the command line's is over the file's
        done(call("run", file, "--set", "fine_tune=3", "--set", "evaluate_average=sample", "--out", "set"))
        found = {name: settings_of(name)["evaluation"] for name in ("file", "option", "set")}
        assert [found[name]["fine_tune"] for name in found] == [2, 1, 3]
        assert [found[name]["clients"] for name in found] == ["participants"] * 3
        assert found["set"]["average"] == "sample"
        grid = write("grid.toml", f'methods = ["fedavg"]\nseeds = [0]\n{lines}')
        done(call("compare", grid, "--set", "choose=best-test", "--out", "comparison"))
        (run,) = Path("comparison/runs").iterdir()
        assert settings_of(str(run))["evaluation"] == {**found["file"], "choose": "best-test"}


class TestPipes:
    def test_output_into_a_pipe_is_the_setup_and_the_table_alone(self, tmp_path: Path) -> None:
        """Progress goes to stderr, as lines."""
        words = ("-m", "fedtailor", "run", "fedavg", *map(str, SMALL))
        answer = subprocess_answer(*words, cwd=tmp_path)
        assert [line.partition(",")[0] for line in answer.progress] == ["fedavg: 2 rounds", "fedavg: round 2 of 2"]
        text = done(answer)
        assert "\x1b" not in text
        assert "\r" not in text
        assert text.startswith("Network mlp: body 1 (Linear), ")
        assert text.splitlines()[2].startswith("digits, 2 of 2 rounds, seed 0")
        assert text.endswith("Recorded in runs/fedavg-digits-1\n")


def test_a_run_begins_with_body_head_and_what_leaves_a_client(call: Call) -> None:
    said = call("run", "local", "pgfed", *SMALL).setup
    assert "Network mlp: body 1 (Linear), 13,000 numbers; head 3 (Linear), 2,010 numbers.\n" in said
    assert "\nlocal: a client uploads nothing.\n" in said
    assert "\npgfed: a client uploads theta (mean by samples), alpha (each client's own), gradient (each" in said
    compared = call("compare", "local", "fedper", *SMALL, "--head", "1", "--seeds", "0", "--out", "compared").setup
    assert "\nfedper: a client uploads body (mean by samples): 13,000 numbers, 52 kB a round.\n" in compared
    whole = call("run", "fedper", *SMALL, "--head", "2").setup
    assert "Network mlp: body empty, 0 numbers; head 1 (Linear), 3 (Linear), 15,010 numbers.\n" in whole


class TestAddClient:
    SHORT = ("--rounds", 2, "--epochs", 1, "--model", "mlp:4", "--engine", "in-process", "--out", "here")

    def begun(self, call: Call) -> None:
        own_data("scans.npz", clients=("Aachen", "Bonn", "Chemnitz"))
        own_data("more.npz", clients=("Dresden",))
        done(call("run", "fedavg", "--data", "scans.npz", *self.SHORT))

    def test_a_client_joins_and_is_known_by_name(self, call: Call) -> None:
        self.begun(call)
        text = done(call("resume", "here", "--rounds", 4, "--add-client", "more.npz", "--add-client", "Essen=more.npz"))
        assert "2 clients joined after round 2 (Dresden, Essen)." in " ".join(text.split())
        shown = done(call("show", "here"))
        assert "Dresden" in shown
        assert "joined after round 2" in " ".join(shown.split())
        clients = json.loads(done(call("show", "here", "--json")))["per_client"]
        assert [client["name"] for client in clients] == ["Aachen", "Bonn", "Chemnitz", "Dresden", "Essen"]
        assert "The model of client Essen" in done(call("export", "here", "--client", "Essen", "--to", "models"))
        (model,) = Path("models").glob("*.safetensors")
        done(call("predict", model, "--run", "here", "--client", "Essen", "--part", "test"))
        assert "4/4" in done(call("watch", "here"))
        done(call("report", "here"))

    def test_refusals_are_one_sentence(self, call: Call) -> None:
        self.begun(call)
        assert "has done all its 2 rounds" in refusal(call, "resume", "here", "--add-client", "more.npz")
        words = ("resume", "here", "--rounds", 4, "--add-client")
        assert "There is no file x.npz" in refusal(call, *words, "x.npz")
        assert "The run has a client 'Bonn' already" in refusal(call, *words, "Bonn=more.npz")
        assert "The run has a client 'Bonn' already" in refusal(call, *words, "Bonn")


def test_show_says_it_again_and_imports_nothing(call: Call) -> None:
    lines = ["from torch import nn", "print('imported')", "def make(num_classes):"]
    body = "    return nn.Sequential(nn.Flatten(), *(nn.Linear(64, 64) for _ in range(5)), nn.Linear(64, num_classes))"
    write("tests_cli_deep.py", "\n".join([*lines, body, ""]))
    ran = call("run", "fedper", *SMALL, "--model", "tests_cli_deep:make", "--lora", "2", "--out", "here")
    assert ran.out.startswith("imported\n")
    said = ran.out.removeprefix("imported\n")[: -len("Recorded in here\n")]
    shown = call("show", "here")
    assert shown.setup == (
        "Network tests_cli_deep:make: body 5 layers, 1 (LoRALinear), …, 5 (LoRALinear), 1,280 numbers; head 6 "
        "(Linear), 650 numbers; frozen 5 layers, 1 (LoRALinear), …, 5 (LoRALinear), 20,800 numbers.\n"
        "LoRA: rank 2, alpha 2, in 5 layers: 1 … 5.\n"
        "fedper: a client uploads body (mean by samples): 1,280 numbers, 5.12 kB a round.\n"
    )
    assert said.startswith(shown.setup)
    assert "imported" not in shown.out
    Path("here/network.json").unlink()  # as in a run of an older version
    assert call("show", "here").setup == ""


def test_models_shows_the_layers_of_one(call: Call) -> None:
    said = done(call("models", "mlp:9", "--clients", 3, "--frozen", "1"))
    rows = [line.split() for line in said.splitlines()]
    assert ["3", "Linear", "head", "100"] in rows
    assert ["1", "Linear", "frozen", "585"] in rows
    found = json.loads(done(call("models", "logistic", "--json")))
    assert found["layers"] == [{"name": "1", "kind": "Linear", "part": "head", "numbers": 650}]
    assert "name one, as in `fedtailor models lenet`" in refusal(call, "models", "--lora", "8")


def test_a_head_in_doubt_is_told_once(call: Call) -> None:
    lines = ["from torch import nn", "class Sum(nn.Module):", "    def __init__(self, in_features, num_classes):"]
    lines += ["        super().__init__()", "        self.one, self.two = nn.Linear(64, 10), nn.Linear(64, 10)"]
    lines += ["    def forward(self, x):", "        return self.one(x.flatten(1)) + self.two(x.flatten(1))", ""]
    write("tests_cli_sum.py", "\n".join(lines))
    words = ("fedavg", "fedper", *SMALL, "--model", "tests_cli_sum:Sum")
    for answer in (call("run", *words), call("compare", *words, "--seeds", "0,1", "--out", "compared")):
        assert (answer.code, answer.err) == (0, "")
        assert answer.setup.count("side by side: two is taken for the head, and one does not lead there") == 1
