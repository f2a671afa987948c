"""The server's checkpoint: what a manifest names is on the disk before it, and nothing else is left there."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

import fedtailor as ft
from fedtailor._common.files import seal
from fedtailor.messages import State
from fedtailor.messages.store import Store
from fedtailor.server.checkpoint import MANIFEST, Checkpoint, Saved
from tests.helpers import assert_same, files
from tests.kills.engine import killed_while_writing

BOTH = pytest.mark.parametrize("on_disk", [False, True])


class Place:
    """A server's checkpoint, and the store of the sites that goes with it, in one directory as a run has them."""

    def __init__(self, path: Path, on_disk: bool = False) -> None:
        self.sites = Store(path / "sites", "client", on_disk)
        self.kept = Store(path / "server", "server", on_disk)
        self.checkpoint = Checkpoint(path, self.kept)

    def write(self, round: int, state: State) -> None:
        self.checkpoint.write(round, state, self.sites.current, self.sites.save, self.sites.prune)

    def read(self) -> Saved:
        saved = self.checkpoint.read()
        self.sites.restore(saved.versions)
        return saved


def ones(value: float = 1.0) -> State:
    return {"w": torch.full((2,), value)}


def client(number: int, round: int) -> str:
    return f"sites/client-{number}-round-{round}.safetensors"


def kept(number: int, round: int) -> str:
    return f"server/server-{number}-round-{round}.safetensors"


def server(round: int) -> str:
    return f"server-round-{round}.safetensors"


@BOTH
def test_a_checkpoint_leaves_nothing_but_what_it_names(on_disk: bool, tmp_path: Path) -> None:
    place = Place(tmp_path, on_disk)
    place.write(0, {"theta": torch.zeros(2)})
    for round in (1, 2, 3):
        place.sites.put(0, ones(round), round)
        place.kept.put(5, ones(10 * round), round)
        if round == 1:
            place.sites.put(1, ones(), round)
        if round != 2:
            place.write(round, {"theta": torch.ones(2)})
    assert set(files(tmp_path)) == {MANIFEST, server(3), client(0, 3), client(1, 1), kept(5, 3)}
    named = json.loads((tmp_path / MANIFEST).read_text())
    assert len(named.pop("checksum")) == 32
    assert named == {"round": 3, "clients": {"0": 3, "1": 1}, "server": {"5": 3}}
    again = Place(tmp_path, on_disk)
    saved = again.read()
    assert (saved.round, saved.versions) == (3, {0: 3, 1: 1})
    assert_same(saved.state, {"theta": torch.ones(2)})
    assert_same(again.sites.get(0), ones(3))
    assert_same(again.sites.get(1), ones())
    assert_same(again.kept.get(5), ones(30))


def test_a_manifest_names_clients_in_their_order(tmp_path: Path) -> None:
    """Whenever they first took part; written as `json` writes it."""
    versions = {12: 3, 0: 1, 1_000_000: 2, 7: 3}
    Checkpoint(tmp_path, Store(None, "server")).write(3, {}, versions, lambda: None, lambda: None)
    named = {"round": 3, "clients": {"0": 1, "7": 3, "12": 3, "1000000": 2}, "server": {}}
    assert (tmp_path / MANIFEST).read_bytes() == seal(named)


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """All waits for the disk, for files and for directories, and all renames, in their order."""
    found: list[tuple[str, str]] = []
    fsync, replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        found.append(("sync", str(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path))))
        fsync(descriptor)

    def rename(path: Path, to: Path) -> Path:
        found.append(("rename", str(Path(to).relative_to(tmp_path))))
        return replace(path, to)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    return found


@BOTH
def test_what_a_manifest_names_is_on_the_disk_before_it(
    on_disk: bool, tmp_path: Path, steps: list[tuple[str, str]]
) -> None:
    place = Place(tmp_path, on_disk)
    for number in range(40):
        place.sites.put(number, ones(), 1)
        place.kept.put(number, ones(), 1)
    assert [name for step, name in steps if step == "sync"] == []  # a round does not wait for the disk
    place.write(1, {"theta": torch.ones(2)})
    committed = steps.index(("rename", MANIFEST))
    assert steps[committed - 1 :] == [("sync", f"{MANIFEST}.tmp"), ("rename", MANIFEST), ("sync", ".")]
    for name in set(files(tmp_path)) - {MANIFEST, server(1)}:  # written, later synced, and their directory then
        assert steps.index(("rename", name)) < steps.index(("sync", name))
        folder = ("sync", str(Path(name).parent))
        assert steps.index(("sync", name)) < len(steps) - 1 - steps[::-1].index(folder) < committed
    whole = [("sync", f"{server(1)}.tmp"), ("rename", server(1)), ("sync", ".")]
    assert steps[committed - 4 : committed - 1] == whole
    steps.clear()
    place.sites.put(3, ones(0), 2)
    place.write(2, {"theta": torch.ones(2)})
    durable = [name for step, name in steps if step == "sync"]
    assert durable == [client(3, 2), "sites", f"{server(2)}.tmp", ".", f"{MANIFEST}.tmp", "."]  # only what changed


def test_records_and_diagnostics_are_on_the_disk_before_the_manifest(
    tmp_path: Path, steps: list[tuple[str, str]]
) -> None:
    small = {"data": "digits", "clients": 3, "model": "mlp:4", "rounds": 1, "engine": "in-process"}
    ft.run("pgfed", out=tmp_path / "new" / "run", **small)
    first = steps.index(("sync", "new/run/rounds.jsonl"))  # at the end of the round
    committed = steps.index(("rename", "new/run/checkpoint/manifest.json"), first)
    between = steps[first:committed]
    for name in ("clients.jsonl", ".", "observed/round-1.safetensors", "observed", "checkpoint/sites", "checkpoint"):
        assert ("sync", str(Path("new/run") / name)) in between, name
    begun = steps.index(("rename", "new/run/experiment.toml"))
    assert {("sync", "."), ("sync", "new"), ("sync", "new/run")} <= set(
        steps[: begun + 2]
    )  # the directories themselves
    assert ("sync", "new/run") in steps[begun:first]  # with `checkpoint` in it


def test_older_states_go_only_when_the_manifest_no_longer_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, on_disk=True)
    place.sites.put(0, ones(1), 1)
    place.kept.put(0, ones(1), 1)
    place.write(1, {})
    place.sites.put(0, ones(2), 2)
    place.kept.put(0, ones(2), 2)
    unlink = Path.unlink

    def watching(path: Path, missing_ok: bool = False) -> None:
        assert json.loads((tmp_path / MANIFEST).read_text())["round"] == 2
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watching)
    place.write(2, {})
    assert set(files(tmp_path)) == {MANIFEST, server(2), client(0, 2), kept(0, 2)}


def test_a_state_that_the_last_checkpoint_names_stays_until_the_next(tmp_path: Path) -> None:
    place = Place(tmp_path, on_disk=True)
    place.sites.put(0, ones(), 1)
    place.kept.put(0, ones(), 1)
    place.write(1, {})
    for round in (2, 3):
        place.sites.put(0, ones(0), round)
        place.kept.put(0, ones(0), round)
    left = Place(tmp_path, on_disk=True)  # after a crash
    assert left.read().round == 1
    assert_same(left.sites.get(0), ones())
    assert_same(left.kept.get(0), ones())
    assert set(files(tmp_path)) == {MANIFEST, server(1), client(0, 1), kept(0, 1)}


def test_a_checkpoint_that_cannot_be_removed_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path)
    place.write(1, {})
    (tmp_path / server(7)).write_bytes(b"left behind")

    def failing(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", failing)
    with pytest.raises(ft.FedtailorError, match=r"server-round-1\.safetensors cannot be written \(Read-only"):
        place.write(2, {})
    with pytest.raises(ft.FedtailorError, match=r"server-round-.*cannot be written \(Read-only"):
        Place(tmp_path).read()


@pytest.mark.parametrize("at", ["manifest.json", "server-round-2", "client-0-round-2", "server-0-round-2"])
@BOTH
def test_a_kill_at_any_file_leaves_the_last_checkpoint(at: str, on_disk: bool, tmp_path: Path) -> None:
    place = Place(tmp_path, on_disk)
    place.sites.put(0, ones(1), 1)
    place.kept.put(0, ones(1), 1)
    place.write(1, {"theta": torch.ones(2)})
    before = files(tmp_path)

    def work() -> None:
        place.sites.put(0, ones(2), 2)
        place.kept.put(0, ones(2), 2)
        place.write(2, {"theta": torch.zeros(2)})

    killed_while_writing(at, work)
    again = Place(tmp_path, on_disk)
    saved = again.read()
    assert (saved.round, saved.versions) == (1, {0: 1})
    assert_same(saved.state, {"theta": torch.ones(2)})
    assert_same(again.sites.get(0), ones(1))
    assert_same(again.kept.get(0), ones(1))
    assert files(tmp_path) == before


def test_a_state_that_becomes_empty_comes_back_empty(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.sites.put(0, ones(), 1)
    place.kept.put(0, ones(), 1)
    place.write(1, ones())
    place.sites.put(0, {}, 2)
    place.kept.put(0, {}, 2)
    place.write(2, {})
    again = Place(tmp_path)
    saved = again.read()
    assert saved == Saved(2, {}, {0: 2})
    assert again.sites.get(0) == {}
    assert again.kept.get(0) == {}


def test_what_a_run_left_that_never_began_is_removed(tmp_path: Path) -> None:
    for name in (server(0) + ".tmp", MANIFEST + ".tmp", client(0, 1), kept(0, 1) + ".tmp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    assert Place(tmp_path).read() == Saved()
    assert set(files(tmp_path)) == {"notes.txt"}


def test_who_looks_removes_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.kept.put(0, ones(), 1)
    place.write(1, ones())
    (tmp_path / (server(2) + ".tmp")).write_bytes(b"half")
    before = files(tmp_path)
    looking = Place(tmp_path)
    assert looking.checkpoint.read(sweep=False).round == 1
    assert_same(looking.kept.get(0), ones())
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"round": "one"}',
        '{"round": 1, "clients": [], "server": {}}',
        '{"round": 1, "clients": {}}',
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(manifest: str, tmp_path: Path) -> None:
    Place(tmp_path).write(1, {})
    (tmp_path / MANIFEST).write_text(manifest)
    with pytest.raises(ft.FedtailorError, match=r"manifest\.json is damaged \(.*\): restore it from a copy, or run "):
        Place(tmp_path).read()


def test_a_server_file_of_another_round_is_refused(tmp_path: Path) -> None:
    Place(tmp_path).write(1, ones())
    content = (tmp_path / server(1)).read_bytes()
    Place(tmp_path).write(2, ones())
    (tmp_path / server(2)).write_bytes(content)
    with pytest.raises(ft.FedtailorError, match=r"server-round-2\.safetensors is not what it should be: its round is"):
        Place(tmp_path).read()
    (tmp_path / server(2)).unlink()
    with pytest.raises(ft.FedtailorError, match=r"server-round-2\.safetensors cannot be read: No such file"):
        Place(tmp_path).read()


def test_without_a_directory_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    checkpoint = Checkpoint(None, Store(None, "server"))
    checkpoint.write(1, ones(), {}, lambda: asked.append("save"), lambda: asked.append("prune"))
    assert asked == []
    assert files(tmp_path) == {}


def test_a_recorded_run_keeps_no_client_records_in_memory(tmp_path: Path) -> None:
    settings = {"data": "digits", "clients": 4, "model": "mlp:8", "rounds": 3, "engine": "in-process"}
    written, held = ft.run("fedavg", out=tmp_path / "run", **settings), ft.run("fedavg", **settings)
    assert written.simulation.loop.clients == []
    assert written.clients == held.clients
    assert written.per_client == held.per_client
