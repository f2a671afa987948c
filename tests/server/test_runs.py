"""Runs and their directories: what is written, what is refused, what survives."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.server.records import RoundRecord
from tests.helpers import assert_same, digits, files, final, numbers
from tests.server.failing import Fragile

SMALL: dict[str, Any] = {"data": "digits", "clients": 5, "model": "mlp:16", "rounds": 4, "engine": "in-process"}


def test_a_run_directory_holds_everything(tmp_path: Path) -> None:
    result = ft.run("ditto", out=tmp_path / "run", lam=0.5, **SMALL)
    names = {"experiment.toml", "about.json", "partition.json", "network.json"}
    names |= {"rounds.jsonl", "clients.jsonl", "result.json"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == names | {"checkpoint", "lock"}
    lines = (tmp_path / "run/rounds.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    assert len({line.pop("checksum") for line in written}) == len(lines)
    assert written == [record.plain() for record in result.rounds]
    first = json.loads(lines[0])
    assert {
        "round",
        "accuracy",
        "accuracy_std",
        "accuracy_worst_decile",
        "loss",
        "bytes_up",
        "bytes_down",
        "seconds",
    } <= set(first)
    assert json.loads((tmp_path / "run/result.json").read_text())["accuracy"] == result.accuracy
    partition = json.loads((tmp_path / "run/partition.json").read_text())
    assert sum(map(sum, partition["train"])) == int(result.data.n_samples.sum())


def test_the_experiment_file_is_complete_and_repeats_the_run(tmp_path: Path) -> None:
    settings = {**SMALL, "participation": 0.5, "evaluation": {"fine_tune": 1}, "batch": "full", "head": "1"}
    result = ft.run("ditto", out=tmp_path / "run", **settings)
    written = tomllib.loads((tmp_path / "run/experiment.toml").read_text())
    assert written["parameters"] == {"lam": 0.5}  # the default, too
    assert ft.Experiment(**written) == result.experiment
    again = ft.run(**written)
    assert numbers(again.rounds) == numbers(result.rounds)
    assert_same(final(again), final(result))


def test_without_out_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ft.run("fedavg", **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_exists_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ft.FedtailorError, match="exists already"):
        ft.run("fedavg", out=tmp_path, **SMALL)
    assert files(tmp_path) == {"notes.txt": b"mine"}


def test_bad_input_writes_nothing(tmp_path: Path) -> None:
    for settings in ({"partition": "dirichlet:-1"}, {"model": "cnn"}, {"participation": 99}, {"lam": -1}, {"lamm": 1}):
        with pytest.raises(ft.FedtailorError):
            ft.run("ditto", out=tmp_path / "run", **{**SMALL, **settings})
        assert not (tmp_path / "run").exists()


def test_more_rounds_give_what_a_longer_run_gives(tmp_path: Path) -> None:
    short = {**SMALL, "rounds": 2, "participation": 0.5}
    ft.run("fedper", out=tmp_path / "grown", **short)
    grown = ft.resume(tmp_path / "grown", rounds=5)
    whole = ft.run("fedper", out=tmp_path / "whole", **{**short, "rounds": 5})
    assert numbers(grown.rounds) == numbers(whole.rounds)
    assert files(tmp_path / "grown/checkpoint") == files(tmp_path / "whole/checkpoint")
    assert ft.load(tmp_path / "grown").experiment == whole.experiment


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    result = ft.run("fedavg", out=tmp_path / "run", **SMALL)
    before = files(tmp_path / "run")
    assert ft.resume(tmp_path / "run").rounds == result.rounds
    assert files(tmp_path / "run") == before


def test_resume_refuses_what_would_change_the_numbers(tmp_path: Path) -> None:
    ft.run("fedavg", out=tmp_path / "run", **SMALL)
    with pytest.raises(ft.FedtailorError, match="'lr' cannot be changed"):
        ft.resume(tmp_path / "run", lr=0.5)
    with pytest.raises(ft.FedtailorError, match="it can only get more"):
        ft.resume(tmp_path / "run", rounds=2)
    (tmp_path / "other").mkdir()
    with pytest.raises(ft.FedtailorError, match="is not a run directory"):
        ft.resume(tmp_path / "other")
    with pytest.raises(ft.FedtailorError, match="is not a run directory"):
        ft.resume(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_other_data_are_refused(tmp_path: Path) -> None:
    one, other = digits([40, 40]), digits([40, 40], seed=1)
    ft.run("fedavg", data=one, out=tmp_path / "run", rounds=2)
    with pytest.raises(ft.FedtailorError, match="pass data= to resume it"):
        ft.resume(tmp_path / "run")
    with pytest.raises(ft.FedtailorError, match="not those of the run"):
        ft.resume(tmp_path / "run", data=other, rounds=3)
    assert len(ft.resume(tmp_path / "run", data=one, rounds=3).rounds) == 3


def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    ft.run("fedavg", out=tmp_path / "run", **SMALL)
    server = tmp_path / "run/checkpoint/server-round-4.safetensors"
    content = server.read_bytes()
    server.write_bytes(content[:100])
    with pytest.raises(ft.FedtailorError, match=r"server-round-4\.safetensors cannot be read"):
        ft.resume(tmp_path / "run", rounds=5)
    server.write_bytes(content)
    (tmp_path / "run/checkpoint/manifest.json").write_text("{")
    with pytest.raises(ft.FedtailorError, match=r"manifest\.json is damaged \(it has no checksum\)"):
        ft.resume(tmp_path / "run", rounds=5)


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    whole = ft.run("fedavg", out=tmp_path / "run", **SMALL)
    with (tmp_path / "run/rounds.jsonl").open("a") as file:
        file.write('{"round": 5, "accur')
    assert ft.load(tmp_path / "run").rounds == whole.rounds
    assert len(ft.resume(tmp_path / "run", rounds=5).rounds) == 5


def test_looking_into_a_run_changes_nothing(tmp_path: Path) -> None:
    result = ft.run("ditto", out=tmp_path / "run", **SMALL)
    before = files(tmp_path / "run")
    loaded = ft.load(tmp_path / "run")
    for client in range(5):
        for name, tensor in loaded.personal(client).items():
            assert torch.equal(tensor, result.personal(client)[name])
    assert loaded.accuracy == result.accuracy
    assert loaded.per_client == result.per_client
    assert files(tmp_path / "run") == before
    with pytest.raises(ft.FedtailorError, match="There is no client 7: they are numbered from 0 to 4"):
        loaded.personal(7)


def test_two_processes_cannot_write_in_one_directory(tmp_path: Path) -> None:
    import subprocess
    import sys

    def meanwhile(record: RoundRecord) -> None:
        command = [sys.executable, "-m", "fedtailor", "resume", str(tmp_path / "run")]
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert other.returncode == 2
        assert "Another process is running" in other.stderr

    ft.run("fedavg", out=tmp_path / "run", on_round=meanwhile, **{**SMALL, "rounds": 1})


# --- clients that fail ---


@pytest.mark.parametrize("engine", ["in-process", "processes"])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", "RuntimeError: no disk left"),
        ("nan", "its upload has NaN or infinite numbers in 'theta'"),
        ("inf", "its upload has NaN or infinite numbers in 'theta'"),
        ("state", "its new state holds 'note', a str"),
    ],
)
def test_a_client_that_fails_is_left_out_and_named(how: str, says: str, engine: str) -> None:
    settings = {**SMALL, "clients": 3, "rounds": 2, "engine": engine}
    with pytest.warns(ft.ClientFailure, match=f"Fragile, round 2: client 2 left out: .*{says}"):
        result = ft.run(Fragile(how=how), **settings)
    assert [record.failed for record in result.rounds] == [[], [2]]
    assert result.client_state(2)["rounds"] == 1  # its state is the one before
    assert result.client_state(1)["rounds"] == 2
    assert result.server_state["theta"].isfinite().all()


def test_a_failure_can_be_made_fatal(tmp_path: Path) -> None:
    settings = {**SMALL, "clients": 3, "on_failure": "stop", "checkpoint_every": 1}
    with pytest.raises(ft.FedtailorError, match="Fragile, round 2: client 2 failed: RuntimeError: no disk left"):
        ft.run(Fragile(), out=tmp_path / "run", **settings)
    assert len(ft.load(tmp_path / "run").rounds) == 1  # and the first round is not lost


def test_a_method_that_is_no_method_is_refused() -> None:
    with pytest.raises(ft.FedtailorError, match="did you mean 'fedavg'"):
        ft.run("fedavgg")
    with pytest.raises(ft.FedtailorError, match="cannot be imported"):
        ft.run("nowhere:Method")
    with pytest.raises(ft.FedtailorError, match="is not a method"):
        ft.run("json:dumps")


def test_a_method_of_ones_own_is_found_by_name() -> None:
    settings = {**SMALL, "rounds": 1}
    by_object = ft.run(Fragile(), **settings)
    by_name = ft.run("tests.server.failing:Fragile", **settings, who=2)
    assert by_object.experiment.method == "tests.server.failing:Fragile"
    assert_same(final(by_object), final(by_name))


def test_a_loss_of_ones_own() -> None:
    def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets, label_smoothing=0.2)

    plain, smooth = ft.run("fedavg", **SMALL), ft.run("fedavg", loss=smoothed, **SMALL)
    assert smooth.accuracy is not None
    assert smooth.loss != plain.loss
    with pytest.raises(ft.FedtailorError, match="must return one number"):
        ft.run("fedavg", loss=lambda outputs, targets: outputs, **SMALL)
