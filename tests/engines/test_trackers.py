"""Trackers: what MLflow, Weights & Biases and trackers of one's own get of runs, and that none of them ends one."""

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor._common.extras import install_command
from fedtailor.engines import trackers
from tests.cli.calling import Call, call, done, interrupted_in, refusal
from tests.engines import namespace

__all__ = ["call"]

SMALL: dict[str, Any] = {"clients": 4, "max_train": 20, "model": "mlp:8", "rounds": 3, "engine": "in-process"}
WORDS = ["--clients", "4", "--max-train", "20", "--model", "mlp:8", "--rounds", "3"]


class Seen(ft.Tracker):
    """Remembers what it gets."""

    def __init__(self) -> None:
        self.runs: list[ft.TrackedRun] = []
        self.metrics: dict[str, dict[int, Mapping[str, float]]] = {}
        self.files: dict[str, list[str]] = {}
        self.ended: dict[str, bool] = {}

    def start(self, run: ft.TrackedRun) -> str:
        self.runs.append(run)
        return run.id or f"{len(self.runs)}"

    def log(self, run: ft.TrackedRun, round: int, metrics: Mapping[str, float]) -> None:
        self.metrics.setdefault(run.id, {})[round] = metrics

    def save(self, run: ft.TrackedRun, name: str, files: Sequence[Path]) -> None:
        assert all(file.stat().st_size for file in files)
        self.files.setdefault(run.id, []).extend(f"{name}/{file.name}" for file in files)

    def finish(self, run: ft.TrackedRun, complete: bool) -> None:
        self.ended[run.id] = complete


class Fails(ft.Tracker):
    """Fails in one function, or in all."""

    def __init__(self, where: str = "everywhere") -> None:
        self.where = where

    def __getattribute__(self, name: str) -> Any:
        where = object.__getattribute__(self, "where") if name in ("start", "log", "save", "finish") else ""
        if where in (name, "everywhere"):
            raise RuntimeError(f"no {name} today")
        return object.__getattribute__(self, name)


class Hangs(ft.Tracker):
    """Never comes back."""

    def log(self, run: ft.TrackedRun, round: int, metrics: Mapping[str, float]) -> None:
        threading.Event().wait()


class TestOnesOwn:
    def test_it_gets_settings_every_round_and_the_record(self) -> None:
        seen = Seen()
        result = ft.run("ditto", lam=0.5, track=seen, **SMALL)
        (run,) = seen.runs
        assert (run.name, run.study, run.id) == ("ditto-seed0", None, "1")
        assert run.parameters["parameters.lam"] == 0.5
        assert run.parameters["evaluation.model"] == "personal"
        assert run.parameters["rounds"] == 3
        assert "track" not in run.parameters
        assert list(seen.metrics["1"]) == [1, 2, 3]
        for record in result.rounds:
            logged = seen.metrics["1"][record.round]
            assert (logged["accuracy"], logged["bytes_up"]) == (record.accuracy, record.bytes_up)
            assert logged["participants"] == 4
        assert seen.files == {"1": ["record/experiment.toml", "record/result.json"]}
        assert seen.ended == {"1": True}

    @pytest.mark.parametrize("where", ["start", "log", "save", "finish", "everywhere"])
    def test_one_that_fails_never_ends_a_run_and_is_warned_of_once(self, where: str) -> None:
        seen, said = Seen(), "no start today" if where == "everywhere" else f"no {where} today"
        with pytest.warns(UserWarning, match=f"The tracker Fails failed .RuntimeError: {said}") as warned:
            result = ft.run("fedavg", track=[Fails(where), seen], **SMALL)
        assert result.finished
        assert len(warned) == 1
        assert list(seen.metrics["1"]) == [1, 2, 3]  # the other one misses nothing

    def test_one_that_hangs_does_not_hold_a_run_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trackers, "WAIT", 0.1)
        with pytest.warns(UserWarning, match="The tracker Hangs failed .no answer for 0.1 seconds"):
            assert ft.run("fedavg", track=Hangs, **SMALL).finished

    def test_the_numbers_are_those_of_a_run_without(self) -> None:
        def numbers(result: ft.RunResult) -> list[tuple[Any, ...]]:
            return [(record.accuracy, record.loss) for record in result.rounds]

        assert numbers(ft.run("fedavg", track=Seen(), **SMALL)) == numbers(ft.run("fedavg", **SMALL))

    def test_a_run_that_fails_is_not_complete(self) -> None:
        def stop(record: Any) -> None:
            raise KeyboardInterrupt

        seen = Seen()
        with pytest.raises(KeyboardInterrupt):
            ft.run("fedavg", track=seen, on_round=stop, **SMALL)
        assert seen.ended == {"1": False}

    def test_a_resumed_run_goes_on_under_its_id(self, tmp_path: Path) -> None:
        first, second = Seen(), Seen()
        ft.run("fedavg", track=first, out=tmp_path / "run", **SMALL)
        assert "track" not in (tmp_path / "run/experiment.toml").read_text()  # an object is not recorded
        ft.resume(tmp_path / "run", rounds=4, track=second)
        (run,) = second.runs
        assert (run.id, run.logged, run.finished, list(second.metrics["1"])) == ("1", 3, 3, [4])
        assert ft.resume(tmp_path / "run", rounds=5).finished
        assert list(second.metrics["1"]) == [4]

    def test_a_record_of_it_that_is_damaged_leaves_it_out(self, tmp_path: Path) -> None:
        ft.run("fedavg", track=Seen(), out=tmp_path / "run", **SMALL)
        (tmp_path / "run/trackers/Seen.json").write_text("{}")
        with pytest.warns(UserWarning, match="The tracker Seen failed .FedtailorError: .*Seen.json is damaged"):
            assert ft.resume(tmp_path / "run", rounds=4, track=Seen()).finished

    @pytest.mark.parametrize("recorded", [pytest.param(False, marks=pytest.mark.slow), True])
    def test_a_comparison_is_a_study_of_runs(self, recorded: bool, tmp_path: Path) -> None:
        seen = Seen()
        out = {"out": tmp_path / "here"} if recorded else {}
        ft.compare(["local", "fedavg"], seeds=[0, 1], track=seen, **out, **{**SMALL, "rounds": 1})
        study, *runs = seen.runs
        assert (study.is_study, study.study, study.parameters["methods"]) == (True, None, ["local", "fedavg"])
        assert [(run.parameters["method"], run.parameters["seed"]) for run in runs] == [
            *(("local", 0), ("fedavg", 0)),
            *(("local", 1), ("fedavg", 1)),
        ]
        assert all(run.study is study and not run.is_study for run in runs)
        assert {"table/table.txt", "table/result.json", "report/report.html"} <= set(seen.files[study.id])
        assert set(seen.ended.values()) == {True}
        assert set(seen.metrics) == {run.id for run in runs}

    def test_one_that_fails_never_ends_a_comparison(self) -> None:
        with pytest.warns(UserWarning, match="The tracker Fails failed") as warned:
            table = ft.compare(["local", "fedavg"], seeds=[0], track=Fails(), **{**SMALL, "rounds": 1})
        assert len(table.lines) == 2
        assert len([each for each in warned if "tracker" in str(each.message)]) == 1

    def test_a_tuning_is_a_study_of_trials_and_runs(self) -> None:
        pytest.importorskip("optuna")
        seen = Seen()
        ft.tune(["fedavg"], trials=2, track=seen, **{**SMALL, "rounds": 1})
        assert [run.name for run in seen.runs] == ["tuning", "fedavg, trial 1", "fedavg, trial 2", "fedavg-seed0"]
        assert seen.runs[0].is_study
        assert {run.study.name for run in seen.runs[1:] if run.study} == {"tuning"}
        assert seen.runs[1].parameters["lr"] == 0.1
        assert list(seen.metrics["2"][1]) == ["validation_accuracy"]

    def test_exported_models_are_its_files(self, tmp_path: Path) -> None:
        seen = Seen()
        result = ft.run("fedavg", track=seen, **SMALL)
        ft.export(result, to=tmp_path / "models", client=3, track=seen)
        assert seen.files["1"][2:] == ["models/client-3.safetensors", "models/client-3.json"]
        ft.export(result, to=tmp_path / "more", client=3)
        assert len(seen.files["1"]) == 4


class TestNames:
    def test_unknown_ones_are_refused_before_the_run(self, tmp_path: Path) -> None:
        with pytest.raises(ft.FedtailorError, match="There is no tracker 'mlfow': did you mean 'mlflow'"):
            ft.run("fedavg", track="mlfow", out=tmp_path / "run")
        with pytest.raises(ft.FedtailorError, match="is no Tracker"):
            ft.run("fedavg", track=print)  # type: ignore[arg-type]
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(("name", "module"), [("mlflow", "mlflow"), ("wandb", "wandb")])
    def test_a_missing_package_is_said_before_the_run(
        self, name: str, module: str, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, module, None)
        said = refusal(call, "run", "fedavg", *WORDS, "--track", name, "--out", "run")
        assert said == f"The tracker {name} is not installed: {install_command(name)}, or leave it out."
        assert not Path("run").exists()

    def test_code_that_a_run_names_is_trusted_first(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("theirs.py").write_text(
            "import fedtailor\nclass Mine(fedtailor.Tracker):\n"
            "    def log(self, run, round, metrics):\n"
            "        with open('rounds', 'a') as file:\n            print(round, file=file)\n"
        )
        monkeypatch.syspath_prepend(".")
        done(call("run", "fedavg", *WORDS, "--track", "theirs:Mine", "--out", "run"))
        assert 'track = "theirs:Mine"' in Path("run/experiment.toml").read_text()
        said = refusal(call, "resume", "run", "--rounds", 4)
        assert said.startswith("The run in run names code of its own (tracker theirs:Mine): if you trust it")
        done(call("show", "run"))
        done(call("resume", "run", "--rounds", 4, "--trust"))
        done(call("resume", "run", "--rounds", 5, "--track", "none"))
        assert Path("rounds").read_text().split() == ["1", "2", "3", "4"]

    def test_older_files_have_tensorboard_as_a_setting(self) -> None:
        from fedtailor.experiment import make_experiment

        assert make_experiment({"tensorboard": True}).track == "tensorboard"
        assert make_experiment({"tensorboard": False}).track is None
        assert make_experiment({"track": ["mlflow", "wandb"]}).track == "mlflow,wandb"

    def test_tensorboard_needs_a_directory(self) -> None:
        pytest.importorskip("tensorboard")
        with pytest.raises(ft.FedtailorError, match="The tracker tensorboard needs a directory: give --out"):
            ft.run("fedavg", track="tensorboard", **SMALL)


# --- MLflow ---


@pytest.fixture
def mlflow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """MLflow's own client of a store of files."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    return mlflow.MlflowClient()


def in_mlflow(client: Any, experiment: str = "fedtailor") -> list[Any]:
    """All runs, the first one first."""
    number = client.get_experiment_by_name(experiment).experiment_id
    return list(reversed(client.search_runs([number])))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
class TestMLflow:
    def test_a_run(self, mlflow_client: Any, tmp_path: Path) -> None:
        result = ft.run("ditto", lam=0.5, track="mlflow", **SMALL)
        (run,) = in_mlflow(mlflow_client)
        assert (run.info.status, run.info.run_name) == ("FINISHED", "ditto-seed0")
        assert (run.data.params["parameters.lam"], run.data.params["rounds"]) == ("0.5", "3")
        history = mlflow_client.get_metric_history(run.info.run_id, "accuracy")
        assert [(each.step, each.value) for each in history] == [(r.round, r.accuracy) for r in result.rounds]
        ft.export(result, to=tmp_path / "models", client=3, track="mlflow")
        names = {folder: {f.path for f in mlflow_client.list_artifacts(run.info.run_id, folder)} for folder in
                 ("record", "models")}  # fmt: skip
        assert names == {
            "record": {"record/experiment.toml", "record/result.json"},
            "models": {"models/client-3.safetensors", "models/client-3.json"},
        }
        assert len(in_mlflow(mlflow_client)) == 1
        assert mlflow_client.get_run(run.info.run_id).info.status == "FINISHED"

    @pytest.mark.slow
    def test_a_comparison_is_a_run_with_nested_ones(self, mlflow_client: Any, tmp_path: Path) -> None:
        ft.compare(["local", "fedavg"], seeds=[0], track="mlflow", out=tmp_path / "here", **{**SMALL, "rounds": 1})
        study, *runs = sorted(in_mlflow(mlflow_client), key=lambda run: run.info.start_time)
        assert study.info.run_name == "here"
        assert [run.data.tags["mlflow.parentRunId"] for run in runs] == [study.info.run_id] * 2
        assert {run.data.params["method"] for run in runs} == {"local", "fedavg"}
        files = {file.path for file in mlflow_client.list_artifacts(study.info.run_id, "table")}
        assert {"table/table.md", "table/result.json"} <= files
        (page,) = mlflow_client.list_artifacts(study.info.run_id, "report")
        assert page.path == "report/report.html"

    @pytest.mark.slow
    def test_a_crashed_run_goes_on_and_no_round_is_there_twice(
        self, mlflow_client: Any, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
        with monkeypatch.context() as interrupted:
            interrupted_in(interrupted, "fedavg", 3)
            assert call("run", "fedavg", *WORDS, "--track", "mlflow", "--out", "run").code == 130
        (run,) = in_mlflow(mlflow_client, "mine")
        assert run.info.status == "FAILED"
        for name in ("checkpoint", "rounds.jsonl"):
            assert (Path("run") / name).exists()
        kept = json.loads(Path("run/trackers/mlflow.json").read_text())
        assert (kept["id"], kept["round"]) == (run.info.run_id, 2)
        done(call("resume", "run"))
        (run,) = in_mlflow(mlflow_client, "mine")
        assert run.info.status == "FINISHED"
        assert [each.step for each in mlflow_client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 3]

    def test_rounds_that_are_done_again_are_not_logged_again(self, mlflow_client: Any, tmp_path: Path) -> None:
        import shutil

        ft.run("fedavg", track="mlflow", out=tmp_path / "run", **{**SMALL, "rounds": 1})
        shutil.copytree(tmp_path / "run/checkpoint", tmp_path / "kept")
        ft.resume(tmp_path / "run", rounds=3)
        shutil.rmtree(tmp_path / "run/checkpoint")
        (tmp_path / "kept").rename(tmp_path / "run/checkpoint")  # as if it had been killed before the last checkpoint
        ft.resume(tmp_path / "run", rounds=4)
        (run,) = in_mlflow(mlflow_client)
        assert [each.step for each in mlflow_client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 3, 4]

    def test_a_server_that_is_away_does_not_end_a_run(
        self, mlflow_client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with pytest.warns(UserWarning, match="The tracker mlflow failed") as warned:
            assert ft.run("fedavg", track="mlflow", **SMALL).finished
        assert len(warned) == 1


# --- Weights & Biases ---


@pytest.fixture
def wandb_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Weights & Biases writes, with nobody logged in."""
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("NETRC", str(tmp_path / "home/none"))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield tmp_path / "wandb"
    wandb.teardown()  # it reads its environment once


def in_wandb(directory: Path) -> dict[str, Any]:
    """What the offline files have, by the name of the run: its records by their kind."""
    import wandb
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    wandb.teardown()  # its own process writes the end of the files when it ends
    found: dict[str, Any] = {}
    for file in sorted(directory.glob("offline-run-*/*.wandb")):
        store, records = DataStore(), []
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            records.append(record)
        store.close()
        run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
        about = found.setdefault(run.display_name, {"run": run, "history": [], "files": []})
        for record in records:
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
                about["history"].append((record.history.step.num, values))
            if record.WhichOneof("record_type") == "request" and record.request.HasField("log_artifact"):
                artifact = record.request.log_artifact.artifact
                about["files"] += [f"{artifact.type}/{entry.path}" for entry in artifact.manifest.contents]
            if record.WhichOneof("record_type") == "artifact":
                about["files"] += [f"{record.artifact.type}/{e.path}" for e in record.artifact.manifest.contents]
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
class TestWandB:
    def test_a_run_without_a_login_is_offline(self, wandb_directory: Path) -> None:
        with pytest.warns(UserWarning, match=r"Biases is offline .nobody is logged in.: `wandb sync .*` sends later"):
            result = ft.run("ditto", lam=0.5, track="wandb", **SMALL)
        ((name, about),) = in_wandb(wandb_directory).items()
        config = {update.key: json.loads(update.value_json) for update in about["run"].config.update}
        assert (name, about["run"].project) == ("ditto-seed0", "fedtailor")
        assert (config["parameters.lam"], config["rounds"]) == (0.5, 3)
        assert [(step, values["accuracy"]) for step, values in about["history"]] == [
            (record.round, record.accuracy) for record in result.rounds
        ]
        assert sorted(about["files"]) == ["record/experiment.toml", "record/result.json"]

    @pytest.mark.slow
    def test_a_comparison_is_a_group(self, wandb_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "offline")  # which is asked for, and so no warning
        here = wandb_directory.parent / "here"
        ft.compare(["local", "fedavg"], seeds=[0], track="wandb", out=here, **{**SMALL, "rounds": 1})
        found = in_wandb(wandb_directory)
        study = found.pop("here")
        assert (study["run"].job_type, study["run"].run_group) == ("study", f"here-{study['run'].run_id}")
        assert {about["run"].run_group for about in found.values()} == {study["run"].run_group}
        assert [len(about["history"]) for about in found.values()] == [1, 1]
        assert {"table/table.md", "report/report.html"} <= set(study["files"])

    @pytest.mark.slow
    def test_a_resumed_run_goes_on_under_its_id(self, wandb_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "offline")
        path = wandb_directory.parent / "run"
        ft.run("fedavg", track="wandb", out=path, **SMALL)
        time.sleep(1)  # its directories are named by the second
        ft.resume(path, rounds=4)
        assert len({file.name for file in wandb_directory.glob("offline-run-*/*.wandb")}) == 1
        assert len([*wandb_directory.glob("offline-run-*")]) == 2
        (about,) = in_wandb(wandb_directory).values()
        assert [step for step, _ in about["history"]] == [1, 2, 3, 4]

    @pytest.mark.slow
    def test_a_server_that_is_away_leaves_it_offline(
        self, wandb_directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fedtailor.engines.wandb.PATIENCE", 2)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        with pytest.warns(UserWarning, match="Biases is offline") as warned:
            assert ft.run("fedavg", track="wandb", **SMALL).finished
        assert len(warned) == 1
        assert [len(about["history"]) for about in in_wandb(wandb_directory).values()] == [3]


@pytest.mark.slow
def test_all_three_in_a_process_without_a_network(tmp_path: Path) -> None:
    """With their own defaults: `mlflow.db` and `wandb/` where the process works."""
    for module in ("mlflow", "wandb", "tensorboard"):
        pytest.importorskip(module)
    if why := namespace.why_not():
        pytest.skip(why)
    program = (
        f"import os; os.chdir({str(tmp_path)!r})\nimport fedtailor as ft\n"
        f"ft.run('fedavg', track='mlflow,wandb,tensorboard', out='run', **{SMALL})"
    )
    ended = namespace.inside(sys.executable, "-c", program)
    assert ended.returncode == 0, ended.stdout
    assert "The tracker" not in ended.stdout
    assert "Weights & Biases is offline" in ended.stdout
    assert (tmp_path / "mlflow.db").is_file()
    assert [about["history"][-1][0] for about in in_wandb(tmp_path / "wandb").values()] == [3]
    kept = {file.stem: json.loads(file.read_text())["round"] for file in (tmp_path / "run/trackers").iterdir()}
    assert kept == {"mlflow": 3, "tensorboard": 3, "wandb": 3}
