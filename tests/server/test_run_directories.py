"""Run directories from elsewhere, damaged, edited, killed at any moment, or on a disk that is full."""

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from fedtailor._common.files import append, seal, unseal, write_atomically
from fedtailor.server.checkpoint import read_manifest
from fedtailor.server.records import RoundRecord
from fedtailor.server.run_directory import FORMAT, RunDirectory, versions
from fedtailor.studies.comparison import Comparing, make_comparison
from fedtailor.studies.runner import done, perform
from tests.helpers import assert_same, files, final, numbers, rewrite
from tests.kills.engine import HOWS, Child, Operations, Stop, Work, in_a_process, killed_while_writing

SMALL: dict[str, Any] = {"data": "digits", "clients": 2, "max_train": 20, "model": "mlp:4", "rounds": 3, "epochs": 1,
                         "engine": "in-process", "checkpoint_every": 2}  # fmt: skip
METHOD = "pgfed"  # it has states of clients, and diagnostics


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, and one that ended in round 3 after the checkpoint of round 2."""
    folder = tmp_path_factory.mktemp("made")
    ft.run(METHOD, out=folder / "finished", **SMALL)

    def kill(record: RoundRecord) -> None:
        if record.round == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        ft.run(METHOD, out=folder / "half", on_round=kill, **SMALL)

    in_a_process(child, -signal.SIGKILL)
    manifest = read_manifest(folder / "half" / "checkpoint")
    assert manifest is not None
    assert (manifest.round, len(ft.load(folder / "half").rounds)) == (2, 3)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "finished", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def half(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "half", tmp_path / "half")
    return tmp_path / "half"


@cache
def whole() -> tuple[list[Any], list[Any], dict[str, torch.Tensor]]:
    """The numbers and the last tensors of a run that was never interrupted."""
    result = ft.run(METHOD, **SMALL)
    return numbers(result.rounds), numbers(result.clients), final(result)


def check_whole(result: ft.RunResult) -> None:
    rounds, clients, tensors = whole()
    assert numbers(result.rounds) == rounds
    assert numbers(result.clients) == clients
    assert_same(final(result), tensors)


# --- links to elsewhere ---


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory that is nobody's business, with files whose names look like a run's."""
    home = tmp_path / "home"
    for name in ("id_ed25519", "server-round-1.safetensors", "client-0-round-1.safetensors", "round-9.safetensors"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text("private")
    for name in ("sites/client-5-round-1.safetensors", "server/server-5-round-1.safetensors", "manifest.json.tmp"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text("private")
    return home


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint/sites", "checkpoint/server", "observed", "tensorboard"])
def test_nothing_is_removed_or_written_through_a_linked_directory(name: str, half: Path, home: Path) -> None:
    shutil.rmtree(half / name, ignore_errors=True)
    (half / name).symlink_to(home, target_is_directory=True)
    before, ours = files(home), files(half)
    with pytest.raises(ft.FedtailorError, match=rf"{name} is no directory of its own \(a link, perhaps\), and a run"):
        ft.resume(half)
    assert files(home) == before
    assert files(half) == ours


@pytest.mark.parametrize("name", ["lock", "rounds.jsonl", "clients.jsonl", "experiment.toml", "result.json"])
@pytest.mark.parametrize("hard", [False, True])
def test_nothing_is_written_through_a_linked_file(name: str, hard: bool, half: Path, tmp_path: Path) -> None:
    key = tmp_path / "id_ed25519"
    key.write_bytes((half / name).read_bytes() if (half / name).exists() else b"")
    key.write_bytes(key.read_bytes() or b"private")
    before = key.read_bytes()
    (half / name).unlink(missing_ok=True)
    if hard:
        os.link(key, half / name)
    else:
        (half / name).symlink_to(key)
    if hard and not name.endswith("jsonl"):  # these are replaced, or only locked
        if name != "result.json":
            check_whole(ft.resume(half))
    else:
        with pytest.raises(ft.FedtailorError, match=rf"{name} is no file of its own \(a link, perhaps\)"):
            ft.resume(half)
    assert key.read_bytes() == before


def test_a_new_run_is_not_made_through_a_link_either(tmp_path: Path) -> None:
    key = tmp_path / "id_ed25519"
    key.write_text("private")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(key)
    with pytest.raises(ft.FedtailorError, match="exists already and is not a run directory"):
        ft.run(METHOD, out=tmp_path / "run", **SMALL)
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ft.FedtailorError, match="exists already and is not a run directory"):
        ft.run(METHOD, out=tmp_path / "dangling", **SMALL)
    assert key.read_text() == "private"
    assert not (tmp_path / "elsewhere").exists()


def test_a_planted_temporary_name_is_not_written_through(tmp_path: Path, half: Path) -> None:
    key = tmp_path / "id_ed25519"
    key.write_text("private")
    for name in ("result.json.tmp", "checkpoint/manifest.json.tmp", "checkpoint/server-round-3.safetensors.tmp"):
        (half / name).symlink_to(key)
    check_whole(ft.resume(half))
    (tmp_path / "model.json.tmp").symlink_to(key)
    write_atomically(tmp_path / "model.json", "ours")
    assert key.read_text() == "private"
    assert (tmp_path / "model.json").read_text() == "ours"
    assert not list(half.rglob("*.tmp"))
    (tmp_path / "other.json.tmp").mkdir()
    with pytest.raises(ft.FedtailorError, match=r"other\.json cannot be written \(Is a directory\)"):
        write_atomically(tmp_path / "other.json", "ours")


def test_only_files_that_are_ours_are_removed(half: Path) -> None:
    foreign = ["manifest.json.old", "server-round-1.txt", "sites/client-x-round-1.safetensors", "sites/notes.txt"]
    for name in foreign:
        (half / "checkpoint" / name).write_text("mine")
    (half / "checkpoint/sites/client-9-round-1.safetensors").mkdir()
    (half / "checkpoint/server-round-9.safetensors").mkdir()
    (half / "observed/round-7.safetensors").mkdir()
    (half / "observed/round-3 (copy).safetensors").write_text("mine")
    (half / "checkpoint/sites/client-9-round-2.safetensors").write_text("left by a kill")
    check_whole(ft.resume(half))
    assert all((half / "checkpoint" / name).read_text() == "mine" for name in foreign)
    assert (half / "observed/round-3 (copy).safetensors").exists()
    assert not (half / "checkpoint/sites/client-9-round-2.safetensors").exists()
    assert ft.load(half).observations.rounds() == [1, 2, 3]


def test_a_comparisons_run_that_is_a_link_is_refused(tmp_path: Path, half: Path) -> None:
    asked = make_comparison({"methods": [METHOD], "seeds": [0], **SMALL})
    work = Comparing(asked, tmp_path / "comparison")
    (title,) = work.runs
    path = work.path(title)
    path.parent.mkdir(parents=True)
    path.symlink_to(half, target_is_directory=True)
    before = files(half)
    with pytest.raises(ft.FedtailorError, match="is a link, and runs are made nowhere but in their directory"):
        work.run(title, lambda record: None, lambda loop: None)
    assert files(half) == before


def test_a_directory_that_is_not_ours_is_not_removed(tmp_path: Path) -> None:
    asked = make_comparison({"methods": [METHOD], "seeds": [0], **SMALL})
    work = Comparing(asked, tmp_path / "comparison")
    (title,) = work.runs
    work.path(title).mkdir(parents=True)
    (work.path(title) / "thesis.tex").write_text("mine")
    with pytest.raises(ft.FedtailorError, match="exists already and is not a run directory"):
        work.run(title, lambda record: None, lambda loop: None)
    assert (work.path(title) / "thesis.tex").read_text() == "mine"


def test_pipes_and_directories_are_not_read(half: Path) -> None:
    """Of a pipe we would wait for ever, or take it for an empty file."""
    for name in ("rounds.jsonl", "clients.jsonl", "partition.json", "about.json", "experiment.toml"):
        content = (half / name).read_bytes()
        (half / name).unlink()
        for make in (os.mkfifo, os.mkdir):
            make(half / name)
            with pytest.raises(ft.FedtailorError, match=name.replace(".", r"\.")):
                ft.load(half)
            (half / name).rmdir() if make is os.mkdir else (half / name).unlink()
        (half / name).write_bytes(content)
    ft.load(half)


def test_looking_into_a_run_that_was_killed_before_its_first_checkpoint_makes_nothing(tmp_path: Path) -> None:
    killed_while_writing("server-round-0", lambda: ft.run(METHOD, out=tmp_path / "run", **SMALL))
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ft.FedtailorError, match="has no finished round to take a model from"):
        ft.export(tmp_path / "run", to=tmp_path / "models")
    assert sorted(tmp_path.rglob("*")) == before


# --- damage ---


def seen(path: Path) -> tuple[Any, ...]:
    """All that can be read of a run."""
    result = ft.load(path)
    observed = {
        (round, name): tensor
        for round in result.observations.rounds()
        for name, tensor in result.observed(round).items()
    }
    summary = {name: value for name, value in result.summary().items() if name != "seconds"}
    return numbers(result.rounds), numbers(result.clients), result.partition, summary, final(result), observed


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    tensors = all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one[4:], other[4:], strict=True)
    )
    return one[:4] == other[:4] and tensors


@pytest.mark.parametrize("which", ["finished", "half"])
@pytest.mark.parametrize("states", ["memory", "disk"])
def test_a_flipped_bit_anywhere_is_noticed_or_changes_nothing(
    which: str, states: str, made: Path, tmp_path: Path
) -> None:
    """Harmless is only what decides about no number: settings of the execution, and rounds that are made again."""
    draw = random.Random(f"{which} {states}")
    expected, ended = seen(made / which), seen(made / "finished")
    names = [str(path.relative_to(made / which)) for path in (made / which).rglob("*") if path.is_file()]
    harmless = []
    assert len(names) > 8
    for name in (name for name in sorted(names) if name != "lock"):
        content = (made / which / name).read_bytes()
        for place in {0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(4))}:
            flipped = bytearray(content)
            flipped[place] ^= 1 << draw.randrange(8)
            shutil.copytree(made / which, tmp_path / "copy")
            (tmp_path / "copy" / name).write_bytes(flipped)
            for look in (seen, resumed(states)):
                found, said = tried(look, tmp_path / "copy")
                assert (found is None) == (re.fullmatch(r"[^\n]+[.?]", said) is not None)
                if (which, name, place, look) == ("half", "rounds.jsonl", len(content) - 1, seen):
                    assert found is not None  # without its end, the last line is one that a crash cut off
                    assert found[0] == expected[0][:2]
                elif found is not None:
                    harmless.append((name, look))
                    assert same(found, ended if look is not seen else expected), (name, place)
            shutil.rmtree(tmp_path / "copy")
    written = {"experiment.toml", "result.json"}  # the latter is written anew
    again = written | {"rounds.jsonl", "clients.jsonl", "observed/round-3.safetensors"}
    assert {name for name, look in harmless if look is not seen} <= (again if which == "half" else written)
    assert {name for name, look in harmless if look is seen} <= {"experiment.toml"}


def tried(look: Callable[[Path], tuple[Any, ...]], path: Path) -> tuple[tuple[Any, ...] | None, str]:
    """What is found, or the sentence that refuses it."""
    try:
        return look(path), ""
    except ft.FedtailorError as error:
        return None, str(error)


def resumed(states: str) -> Callable[[Path], tuple[Any, ...]]:
    def look(path: Path) -> tuple[Any, ...]:
        result = ft.resume(path, states=states)
        final(result)  # states on disk are checked when they are read
        return seen(path)

    return look


def test_every_bit_of_a_record_counts() -> None:
    line = seal({"round": 1, "accuracy": 0.5}, "before")
    for content, before in ((line, "before"), (seal({"a": {"b": [1]}}, pretty=True), "")):
        assert json.loads(content)["checksum"] == unseal(content, before)
        for place in range(8 * len(content)):
            flipped = bytearray(content)
            flipped[place // 8] ^= 1 << place % 8
            with pytest.raises(ValueError, match="checksum"):
                unseal(bytes(flipped), before)
    with pytest.raises(ValueError, match="does not fit"):
        unseal(line, "another line")


def test_a_damaged_model_is_not_exported_with_its_recorded_accuracy(run: Path, tmp_path: Path) -> None:
    file = run / "checkpoint/sites/client-1-round-3.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(ft.FedtailorError, match=r"client-1-round-3\.safetensors cannot be read: its checksum does not"):
        ft.export(run, to=tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_records_without_a_checkpoint_are_not_made_again_in_silence(half: Path) -> None:
    (half / "checkpoint/manifest.json").unlink()
    before = files(half)
    with pytest.raises(ft.FedtailorError, match=r"manifest\.json is damaged \(it is missing\)"):
        ft.resume(half)
    assert files(half) == before


def test_a_manifest_that_has_forgotten_clients_is_refused(half: Path) -> None:
    manifest = half / "checkpoint/manifest.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content.replace(b'{"0": 2, "1": 2}', b'{"0": 2}'))
    assert manifest.read_bytes() != content
    with pytest.raises(ft.FedtailorError, match=r"manifest\.json is damaged \(its checksum does not fit\)"):
        ft.resume(half)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"clients": {"0": 2, "1": 2, "2": 2}}, "it names clients that do not exist"),
        ({"server": {"7": 1}}, "it names clients that do not exist"),
        ({"clients": {"0": 3}}, "it names states of rounds that it does not have"),
        ({"clients": {"0": 0}}, "it names states of rounds that it does not have"),
        ({"clients": {"-1": 1}}, "is damaged"),
        ({"round": 10**30}, "is damaged"),
        ({"round": True}, "is damaged"),
        ({"clients": None}, "is damaged"),
        ({"round": 1}, "it names states of rounds that it does not have"),
    ],
)
def test_a_manifest_is_checked_behind_its_checksum(changes: dict[str, Any], says: str, half: Path) -> None:
    rewrite(half / "checkpoint/manifest.json", **changes)
    with pytest.raises(ft.FedtailorError, match=says):
        ft.resume(half)


# --- edited experiments, other versions ---

EDITS = {
    "method": '"ditto"', "lr": "0.2", "seed": "1", "epochs": "2", "momentum": "0.5", "weight_decay": "0.1",
    "batch": "20", "participation": '"1"', "clients": "3", "test": "0.3", "validation": "0.2", "model": '"mlp:5"',
    "head": "2", "loss": '"mse"', "rounds": "4", "dtype": '"float64"', "drop_last": "true", "observe_every": "2",
    "max_train": "10", "stratify": "false", "pixels": '"signed"', "mu": "0.2", "fine_tune": "1",
    "choose": '"best-test"',
}  # fmt: skip


def edit(run: Path, name: str, value: str) -> None:
    file = run / "experiment.toml"
    lines = file.read_text().splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if line.startswith(f"{name} = "))
    lines[place] = f"{name} = {value}\n"
    file.write_text("".join(lines))


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_experiment_is_refused_by_name(name: str, half: Path, tmp_path: Path) -> None:
    edit(half, name, EDITS[name])
    before = files(half)
    says = rf"experiment\.toml was edited: (parameters\.|evaluation\.)?{name} is .*, but the run was made with .*; put"
    for look in (ft.resume, ft.load, lambda path: ft.export(path, to=tmp_path / "a"), ft.adapt):
        with pytest.raises(ft.FedtailorError, match=says):
            look(half)  # type: ignore[operator]
    assert files(half) == before


def test_a_setting_that_is_removed_is_named_too(half: Path) -> None:
    file = half / "experiment.toml"
    file.write_text(file.read_text().replace("max_train = 20\n", ""))
    with pytest.raises(ft.FedtailorError, match="max_train is not set, but the run was made with 20"):
        ft.resume(half)


def test_a_setting_that_is_added_is_named_too(half: Path) -> None:
    file = half / "experiment.toml"
    file.write_text(f'split = "official"\n{file.read_text()}')
    with pytest.raises(ft.FedtailorError, match="split is official, but the run was made with not set"):
        ft.resume(half)


@pytest.mark.parametrize(
    ("name", "value"),
    [("workers", "1"), ("checkpoint_every", "1"), ("states", '"disk"'), ("on_failure", '"stop"'), ("debug", "true")],
)
def test_how_a_run_is_computed_may_be_edited(name: str, value: str, half: Path) -> None:
    file = half / "experiment.toml"
    if name == "workers":
        file.write_text(f"workers = 1\n{file.read_text()}")
    else:
        edit(half, name, value)
    check_whole(ft.resume(half))


def test_killed_while_it_was_made_longer_a_run_has_its_rounds(run: Path) -> None:
    """`about.json` comes first: the file that lags behind is put right."""
    killed_while_writing("experiment.toml", lambda: ft.resume(run, rounds=5))
    assert "rounds = 3" in (run / "experiment.toml").read_text()
    assert ft.load(run).experiment.rounds == 5
    longer = ft.run(METHOD, **{**SMALL, "rounds": 5})
    assert numbers(ft.resume(run).rounds) == numbers(longer.rounds)
    assert "rounds = 5" in (run / "experiment.toml").read_text()
    assert json.loads((run / "result.json").read_text())["rounds"] == 5


def test_a_run_that_is_made_longer_has_no_result_until_its_end(run: Path) -> None:
    killed_while_writing("rounds.jsonl", lambda: ft.resume(run, rounds=5))
    assert not (run / "result.json").exists()
    assert not ft.load(run).finished


def test_the_versions_that_made_a_run_are_recorded_and_another_one_is_said(half: Path) -> None:
    about = json.loads((half / "about.json").read_text())
    assert about["versions"] == versions()
    assert set(about["versions"]) == {"fedtailor", "torch", "numpy", "python", "processor"}
    assert about["format"] == FORMAT
    rewrite(half / "about.json", versions={**versions(), "fedtailor": "0.0.9", "processor": "VSX"})
    here = versions()
    said = rf"made with fedtailor 0\.0\.9, not {here['fedtailor']} and with processor VSX, not {here['processor']}: its"
    with pytest.warns(UserWarning, match=said):
        check_whole(ft.resume(half))


def test_a_setting_that_is_newer_than_the_run_has_its_default(half: Path) -> None:
    about = json.loads((half / "about.json").read_text())
    del about["experiment"]["keep_momentum"]
    rewrite(half / "about.json", experiment=about["experiment"])
    check_whole(ft.resume(half))


def test_another_format_is_refused(half: Path) -> None:
    rewrite(half / "about.json", format=FORMAT + 1, versions={"fedtailor": "9.0"})
    for look in (ft.load, ft.resume):
        with pytest.raises(ft.FedtailorError, match=r"was made by fedtailor 9\.0 in another format \(2, not 1\): use"):
            look(half)
    (half / "about.json").unlink()
    for look in (ft.load, ft.resume):
        with pytest.raises(ft.FedtailorError, match=r"has no about\.json: an older version of fedtailor made it"):
            look(half)


# --- killed at any moment ---


def again(path: Path) -> ft.RunResult:
    """Start a run once more, or go on with it: one of them must do."""
    if (path / "experiment.toml").exists():
        with pytest.raises(ft.FedtailorError, match="is a run already"):
            ft.run(METHOD, out=path, **SMALL)
        return ft.resume(path)
    return ft.run(METHOD, out=path, **SMALL)


def test_killed_at_any_moment_a_run_can_be_started_or_resumed(tmp_path: Path) -> None:
    """At every operation until the first checkpoint is there, and at every fifth one then."""
    moment, beginnings = 0, 0
    while killed_at(moment, tmp_path, lambda: ft.run(METHOD, out=tmp_path / "run", **SMALL)):
        if (tmp_path / "run").exists() and not (tmp_path / "run" / "experiment.toml").exists():
            beginnings += 1
            for look in (ft.resume, ft.load):
                with pytest.raises(ft.FedtailorError, match=r"was stopped before it began: start it|is not a run dir"):
                    look(tmp_path / "run")
        begun = (tmp_path / "run/checkpoint/manifest.json").exists()
        check_whole(again(tmp_path / "run"))
        assert not list((tmp_path / "run").rglob("*.tmp"))
        moment += 5 if begun else 1
        shutil.rmtree(tmp_path / "run")
    assert moment > 60
    assert beginnings > 10


def test_killed_at_any_moment_of_a_resume_a_run_can_be_resumed(half: Path, tmp_path: Path) -> None:
    moment = 0
    shutil.copytree(half, tmp_path / "run")
    while killed_at(moment, tmp_path, lambda: ft.resume(tmp_path / "run")):
        check_whole(ft.resume(tmp_path / "run"))
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(half, tmp_path / "run")
        moment += 2
    assert moment > 15


def killed_at(moment: int, folder: Path, work: Work) -> bool:
    """Do some work in a process that is killed at the operation of this number; False if it was done before."""
    ended = Child(work, Operations(folder, Stop(moment, HOWS[moment % len(HOWS)])).watch).end()
    assert not ended.raised, ended.raised
    return ended.killed


@pytest.mark.parametrize("name", ["partition.json", "about.json", "experiment.toml", "server-round-0", "manifest.json"])
def test_killed_in_its_first_moments_a_run_can_be_started_again(name: str, tmp_path: Path) -> None:
    killed_while_writing(name, lambda: ft.run(METHOD, out=tmp_path / "run", **SMALL))
    check_whole(again(tmp_path / "run"))
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_a_comparison_goes_on_after_a_kill_before_its_question_is_written(tmp_path: Path) -> None:
    asked = make_comparison({"methods": [METHOD], "seeds": [0], **SMALL})
    killed_while_writing("comparison.toml", lambda: Comparing(asked, tmp_path / "a").begin({}))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["comparison.toml.tmp"]
    Comparing(asked, tmp_path / "a").begin({})
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["comparison.toml", "runs.json"]


def without_last_line(content: bytes) -> bytes:
    return b"".join(content.splitlines(keepends=True)[:-1])


@pytest.mark.parametrize("name", ["rounds.jsonl", "clients.jsonl"])
@pytest.mark.parametrize("left", [without_last_line, lambda content: without_last_line(content) + bytes(9) + b"\n"])
def test_what_a_power_cut_leaves_behind_the_checkpoint_is_made_again(
    name: str, left: Callable[[bytes], bytes], half: Path
) -> None:
    """Records are on the disk itself by the next checkpoint: until then, one of the two files may lack a round."""
    (half / name).write_bytes(left((half / name).read_bytes()))
    shorter = name == "rounds.jsonl" and left is without_last_line  # as after a kill: the clients' are written first
    if not shorter:
        with pytest.raises(ft.FedtailorError, match=r"behind the checkpoint of round 2, as after a power cut: `fed"):
            ft.load(half)
    made = perform(RunDirectory(half).experiment(), half, lambda _: pytest.fail("it is not begun anew"))
    check_whole(made)


# --- a run that is finished, and one that only has all its records ---


@pytest.mark.parametrize("name", ["server-round-3", "manifest.json", "result.json"])
def test_a_run_with_all_records_is_not_finished_without_its_checkpoint_and_result(name: str, tmp_path: Path) -> None:
    asked = make_comparison({"methods": [METHOD], "seeds": [0], **SMALL, "checkpoint_every": 3})
    work = Comparing(asked, tmp_path / "a")
    work.begin({})
    (title,) = work.runs
    path = work.path(title)

    def nothing(_: object) -> None: ...

    class Third(Exception):
        pass

    def stop(record: RoundRecord) -> None:
        if record.round == 2:
            raise Third

    with pytest.raises(Third):
        perform(work.runs[title], path, work._prepared.prepare, stop)
    killed_while_writing(name, lambda: work.run(title, nothing, nothing))
    assert len(ft.load(path).rounds) == 3
    assert list(work.todo()) == [title]
    work.run(title, nothing, nothing)
    assert work.todo() == {}
    check_whole(ft.load(path))
    manifest = read_manifest(path / "checkpoint")
    assert manifest is not None
    assert manifest.round == 3
    assert json.loads((path / "result.json").read_text())["rounds"] == 3


def test_a_run_that_has_enough_is_done_with_its_checkpoint(run: Path, half: Path) -> None:
    def enough(record: RoundRecord) -> bool:
        return record.round == 3

    assert done(run, enough) is not None
    assert done(half, enough) is None
    assert done(half) is None


# --- one writer ---


def test_who_copies_a_run_at_work_does_not_take_its_lock(tmp_path: Path) -> None:
    """Locks of another kind are gone when any descriptor of their file is closed in the process."""
    answers = []

    def meanwhile(record: RoundRecord) -> None:
        shutil.copytree(tmp_path / "run", tmp_path / f"copy-{record.round}")
        command = [sys.executable, "-m", "fedtailor", "resume", str(tmp_path / "run")]
        answers.append(subprocess.run(command, capture_output=True, text=True, check=False))

    result = ft.run(METHOD, out=tmp_path / "run", on_round=meanwhile, **{**SMALL, "rounds": 1})
    assert [(answer.returncode, "Another process is running" in answer.stderr) for answer in answers] == [(2, True)]
    assert [record.round for record in ft.load(tmp_path / "run").rounds] == [1]
    assert result.finished
    assert numbers(ft.resume(tmp_path / "copy-1").rounds) == numbers(result.rounds)  # a copy is a run of its own


@pytest.mark.skipif(sys.platform != "linux", reason="worker processes need Linux")
def test_a_worker_that_outlives_its_parent_does_not_hold_the_lock(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.lock()
    (started, say), (reader, writer) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # as a worker does whose parent was killed
        os.close(writer)
        os.write(say, b"!")
        os.read(reader, 1)
        os._exit(0)
    os.read(started, 1)
    directory.unlock()
    try:
        directory.lock()
        directory.unlock()
    finally:
        os.close(writer)
        os.waitpid(child, 0)
        for descriptor in (started, say, reader):
            os.close(descriptor)


def test_a_second_writer_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    def write_too(record: RoundRecord) -> None:
        if record.round == 1:
            with (tmp_path / "run" / "clients.jsonl").open("a") as file:
                file.write('{"round": 2}\n')

    with pytest.raises(ft.FedtailorError, match=r"clients\.jsonl was changed while this run wrote in it: end whatever"):
        ft.run(METHOD, out=tmp_path / "run", on_round=write_too, **SMALL)
    assert (tmp_path / "run/rounds.jsonl").read_text().count("\n") == 1
    check_whole(ft.resume(tmp_path / "run"))


def test_a_run_that_cannot_begin_leaves_no_lock_in_this_process(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(
            "fedtailor.engines.simulation.make_transport", lambda *_: (_ for _ in ()).throw(ft.FedtailorError("no"))
        )
        with pytest.raises(ft.FedtailorError, match=r"^no$"):
            ft.resume(half)
    check_whole(ft.resume(half))


# --- a disk that is full ---


@pytest.mark.parametrize("name", ["partition.json", "rounds.jsonl", "manifest.json", "client-1-round-2", "result.json"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_is_named_and_the_run_goes_on_later(name: str, code: int, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    full = Stop(lambda _, what, path: what == "write" and name in path.name, "half", fail)
    work = Child(lambda: ft.run(METHOD, out=tmp_path / "run", **SMALL), Operations(tmp_path, full).watch)
    cure = "make room for it" if code == errno.ENOSPC else "choose another place, or mend this one"
    says = rf"{name}.* cannot be written \({os.strerror(code)}\): {cure}, and start again \(a run: `fedtailor resume`"
    assert re.search(rf"FedtailorError: .*{says}", work.end().raised)
    assert not list((tmp_path / "run").rglob("*.tmp"))  # half a file would be in the way
    check_whole(again(tmp_path / "run"))


def test_a_file_that_may_not_grow_is_one_sentence_on_the_command_line(tmp_path: Path) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = [sys.executable, "-m", "fedtailor", "run", METHOD, *words, "--out", str(tmp_path / "run")]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1300, resource.RLIM_INFINITY))

    answer = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert answer.returncode == 2
    assert "Traceback" not in answer.stderr
    said = " ".join(answer.stderr.split())
    assert "cannot be written (File too large): make room for it, and start again" in said
    assert str(tmp_path / "run") in said
    check_whole(again(tmp_path / "run"))


def test_what_is_appended_goes_to_the_end_that_we_know(tmp_path: Path) -> None:
    append(tmp_path / "lines", b"one\n", 0)
    append(tmp_path / "lines", b"two\n", 4)
    for end in (0, 4, 9):
        with pytest.raises(ft.FedtailorError, match="was changed while this run wrote in it"):
            append(tmp_path / "lines", b"three\n", end)
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\n"
