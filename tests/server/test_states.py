"""States and checkpoints: what is on the disk when, and what is left there."""

import os
from pathlib import Path

import pytest
import torch

import fedtailor as ft
from fedtailor.server import states as module
from fedtailor.store import MANIFEST, States
from tests.helpers import assert_same


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_checkpoint_leaves_nothing_but_what_it_names(on_disk: bool, tmp_path: Path) -> None:
    states = States(tmp_path, on_disk)
    states.checkpoint(0, {"theta": torch.zeros(2)})
    for round in (1, 2, 3):
        states.put("client-0", {"w": torch.full((2,), float(round))}, round)
        if round == 1:
            states.put("client-1", {"w": torch.ones(2)}, round)
        if round != 2:
            states.checkpoint(round, {"theta": torch.ones(2)})
    files = {f"{name}.safetensors" for name in ("client-0-round-3", "client-1-round-1", "server-round-3")}
    assert names(tmp_path) == {MANIFEST, *files}
    again = States(tmp_path, on_disk)
    round, server = again.restore()
    assert round == 3
    assert_same(server, {"theta": torch.ones(2)})
    assert_same(again.get("client-0"), {"w": torch.full((2,), 3.0)})
    assert_same(again.get("client-1"), {"w": torch.ones(2)})


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_a_manifest_names_is_on_the_disk_before_it(
    on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting: list[str] = []
    fsync = os.fsync

    def record(file: int) -> None:
        lasting.append(Path(os.readlink(f"/proc/self/fd/{file}")).name.removesuffix(".tmp"))
        fsync(file)

    monkeypatch.setattr(module.os, "fsync", record)
    states = States(tmp_path, on_disk)
    for client in range(40):
        states.put(f"client-{client}", {"w": torch.ones(2)}, 1)
    assert lasting == []  # a round does not wait for the disk
    states.checkpoint(1, {"theta": torch.ones(2)})
    assert lasting[-1] == MANIFEST
    assert set(lasting) == names(tmp_path)
    lasting.clear()
    states.put("client-3", {"w": torch.zeros(2)}, 2)
    states.checkpoint(2, {"theta": torch.ones(2)})
    assert lasting == ["client-3-round-2.safetensors", "server-round-2.safetensors", MANIFEST]  # only what changed


def test_a_state_that_the_last_checkpoint_names_stays_until_the_next(tmp_path: Path) -> None:
    states = States(tmp_path, on_disk=True)
    states.put("client-0", {"w": torch.ones(2)}, 1)
    states.checkpoint(1, {})
    for round in (2, 3):
        states.put("client-0", {"w": torch.zeros(2)}, round)
    left = States(tmp_path, on_disk=True)  # after a crash
    assert left.restore()[0] == 1
    assert_same(left.get("client-0"), {"w": torch.ones(2)})
    files = {MANIFEST, "client-0-round-1.safetensors", "server-round-1.safetensors"}
    assert names(tmp_path) == files


def test_what_a_run_left_that_never_began_is_removed(tmp_path: Path) -> None:
    (tmp_path / "server-round-0.safetensors.tmp").write_bytes(b"half")
    assert States(tmp_path).restore() == (0, {})
    assert names(tmp_path) == set()


def test_a_recorded_run_keeps_no_client_records_in_memory(tmp_path: Path) -> None:
    settings = {"data": "digits", "clients": 4, "model": "mlp:8", "rounds": 3, "engine": "in-process"}
    written, kept = ft.run("fedavg", out=tmp_path / "run", **settings), ft.run("fedavg", **settings)
    assert written._federation.clients == []
    assert written.clients == kept.clients
    assert written.per_client == kept.per_client
