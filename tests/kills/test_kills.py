"""A handful of the kills of `make kills`, the most telling ones, and that they would find what they are to find."""

import os
import random
import signal
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from fedtailor._common import files
from fedtailor.client.answers import Answering
from fedtailor.engines import processes
from fedtailor.messages.store import Store
from fedtailor.server.checkpoint import Checkpoint
from tests.kills import __main__ as kills
from tests.kills import engine, runs, sites, surroundings, workers
from tests.kills.engine import HOWS, Attempt, Case, Child, Operations, Stop, at_work, lost, tried, whole

COMMIT = "replace run/checkpoint/manifest.json.tmp"
Patch = Callable[[pytest.MonkeyPatch], None]


# --- what is promised ---


@pytest.mark.parametrize("part", kills.PARTS)
def test_killed_and_gone_on_with_everything_is_as_without_the_kill(part: str, tmp_path: Path) -> None:
    attempt, _ = kills.PARTS[part]
    made = 0
    for number in range(6):
        (tmp_path / str(number)).mkdir()
        found = tried(attempt, random.Random(f"test {part} {number}"), tmp_path / str(number))
        assert not found.fault, f"{found.what}\n{found.fault}"
        made += found.kills
    assert made >= 4


@cache
def small(states: str) -> Case:
    settings = {"states": states, "rounds": 2, "checkpoint_every": 1}
    return Case(states, partial(runs.alone, "pgfed", settings))


@pytest.mark.parametrize("states", ["memory", "disk"])
def test_what_a_manifest_names_is_on_the_disk_before_it(states: str, tmp_path: Path) -> None:
    """The power goes at each of the last operations of round 1's commit, and at the first ones after it."""
    case = small(states)
    (tmp_path / "whole").mkdir()
    expected = whole(case, tmp_path / "whole")
    commits = [number for number, operation in enumerate(expected.operations) if operation == COMMIT]
    assert len(commits) == 3
    for number in range(commits[1] - 3, commits[1] + 5):
        for luck in (0, 1):  # one takes all that was not synced, the other this and that
            folder = tmp_path / f"{number} {luck}"
            folder.mkdir()
            assert at_work(case, folder, Stop(number, "power", luck=luck)).end().killed
            assert lost(case, folder, expected.value) == "", f"power after {expected.operations[number]}"


# --- that it would be found if it were not kept ---


def without_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fedtailor.messages.store.fsync_files", lambda paths: None)


def manifest_first(patch: pytest.MonkeyPatch) -> None:
    """Write the manifest, and then the states that it names."""
    written = Checkpoint.write

    def write(self: Checkpoint, round: int, state: object, versions: object, save: object, prune: object) -> None:
        def late() -> None:
            save()  # type: ignore[operator]
            Store.save(self.store)
            prune()  # type: ignore[operator]

        with pytest.MonkeyPatch.context() as not_yet:
            not_yet.setattr(self.store, "save", lambda: None)
            written(self, round, state, versions, lambda: None, late)  # type: ignore[arg-type]

    patch.setattr(Checkpoint, "write", write)


def in_place(patch: pytest.MonkeyPatch) -> None:
    def write(path: Path, content: bytes | str, durable: bool = True) -> None:
        with files._open(path, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())

    patch.setattr("fedtailor.server.checkpoint.write_atomically", write)


@pytest.mark.parametrize("broken", [without_sync, manifest_first, in_place])
def test_a_run_that_does_not_keep_its_order_loses_something(
    broken: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    case = small("memory")
    (tmp_path / "whole").mkdir()
    expected = whole(case, tmp_path / "whole")
    after = max(number for number, operation in enumerate(expected.operations) if "manifest.json" in operation)
    faults = []
    for number in range(after - 3, after + 1):
        for how in HOWS:
            folder = tmp_path / f"{number} {how}"
            folder.mkdir()
            assert at_work(case, folder, Stop(number, how)).end().killed
            faults.append(lost(case, folder, expected.value))
    assert any(faults)
    assert not all(faults)


def test_a_site_that_answers_before_it_is_durable_loses_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites.federation("pgfed", tmp_path)
    monkeypatch.setattr(Answering, "work", forgetful(Answering.work))
    log = Stop(lambda number, what, path: number > 30 and path.name == "site.log", "after")
    ended, count, _ = sites.supervised(tmp_path, {"north": log})
    assert count == 1
    assert "it has lost its state" in ended.raised or ended.value != sites.whole("pgfed")[0]


def forgetful(work: Callable[..., object]) -> Callable[..., object]:
    def working(self: Answering, letter: object) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.sites.store, "keep", lambda number: None)
            return work(self, letter)

    return working


def test_workers_that_outlive_their_parent_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_end_with", lambda parent: time.sleep(60))
    monkeypatch.setattr(engine.survivors, "__defaults__", (1.0,))
    monkeypatch.setattr(workers, "WAYS", {"at an operation": workers.parent_at_an_operation})
    monkeypatch.setattr(processes, "_work", busy(processes._work))
    found = tried(workers.attempt, random.Random(1), tmp_path)
    assert "processes survived" in found.fault


def busy(work: Callable[..., object]) -> Callable[..., None]:
    """A worker that goes on when its pipe is closed: only one that watches its parent ends then."""

    def working(*arguments: object) -> None:
        work(*arguments)
        time.sleep(60)

    return working


# --- the stops themselves ---


def test_every_operation_is_counted_and_stopped_at(tmp_path: Path) -> None:
    def work(folder: Path) -> dict[str, object]:
        files.write_atomically(folder / "a", b"content")
        files.append(folder / "b", b"more", 0)
        files.truncate(folder / "b", 1)
        files.remove(folder / "a")
        return {}

    done = whole(Case("files", work), tmp_path).operations
    assert done == [
        *("open a.tmp", "write a.tmp", "fsync a.tmp", "replace a.tmp", "fsync ."),
        *("open b", "write b", "open b", "truncate b", "unlink a"),
    ]
    left = []
    for number, how in [(1, "before"), (1, "half"), (1, "after"), (3, "before"), (3, "after"), (9, "after")]:
        folder = tmp_path / f"{number} {how}"
        folder.mkdir()
        stop = Stop(number, how)  # type: ignore[arg-type]
        assert Child(partial(work, folder), Operations(folder, stop).watch).end().killed
        left.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert left == [
        {"a.tmp": b""},
        {"a.tmp": b"con"},
        {"a.tmp": b"content"},
        {"a.tmp": b"content"},
        {"a": b"content"},
        {"b": b"m"},
    ]


def test_a_power_cut_takes_what_was_not_synced_and_nothing_else(tmp_path: Path) -> None:
    def work(folder: Path) -> None:
        files.write_atomically(folder / "synced", b"new")
        files.write_atomically(folder / "written", b"new", durable=False)
        files.append(folder / "growing", b" and more", 3)
        (folder / "last").write_bytes(b"")

    found = set()
    for luck in range(100):
        folder = tmp_path / str(luck)
        folder.mkdir()
        for name in ("synced", "written", "growing"):
            (folder / name).write_bytes(b"old")
        last = Stop(lambda _, what, path: path.name == "last", "power", luck=luck)
        assert Child(partial(work, folder), Operations(folder, last).watch).end().killed
        left = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert left["synced"] == b"new"
        assert left["growing"].startswith(b"old")
        found |= set(left.items())
    assert {content for name, content in found if name == "written"} >= {b"old", b"", b"new"}
    assert {content for name, content in found if name == "growing"} >= {b"old", b"old and more", b"old" + bytes(9)}


def hanging(rng: random.Random, folder: Path) -> Attempt:
    return Child(partial(time.sleep, 60)).end().value


def loud(rng: random.Random, folder: Path) -> Attempt:
    os.write(2, b'Traceback\n  File "/x/fedtailor/y.py"')
    return Attempt("loud")


def broken(rng: random.Random, folder: Path) -> Attempt:
    raise KeyError("oh")


@pytest.mark.parametrize(
    ("attempt", "said"), [(hanging, "it hung"), (loud, "on its standard error"), (broken, "KeyError: 'oh'")]
)
def test_what_goes_wrong_is_a_fault(
    attempt: engine.Try, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PATIENCE", 1)
    assert said in tried(attempt, random.Random(), tmp_path).fault
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_a_fault_ends_the_command_with_1_and_says_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attempt(rng: random.Random, folder: Path) -> Attempt:
        return Attempt("here", 2, "a bit was lost" * (rng.random() < 0.5))

    monkeypatch.setattr(kills, "PARTS", {"one": (attempt, 0.5), "other": (attempt, 0.5)})
    monkeypatch.setattr("sys.argv", ["kills", "--count", "40", "--seed", "3"])
    assert kills.main() == 1
    said = capsys.readouterr().out
    assert "one: 20 kills in 10 attempts" in said
    first = said.partition("again: python -m tests.kills ")[2].partition("\n")[0]
    monkeypatch.setattr("sys.argv", ["kills", *first.split()])
    assert kills.main() == 1
    assert "kills in 1 attempts" in capsys.readouterr().out


def test_a_read_only_file_system_is_a_real_one(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("mounting needs the rights of root")

    def work() -> str:
        surroundings.mount_read_only(tmp_path)
        try:
            (tmp_path / "file").touch()
        except OSError as error:
            return str(error.strerror)
        return "written"

    assert Child(work).end().value == "Read-only file system"
    (tmp_path / "file").touch()
