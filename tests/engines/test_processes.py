"""Worker processes: shared memory, deaths, interruptions."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.engines.processes import _work
from fedtailor.engines.shared_memory import Sheet
from fedtailor.server.records import RoundRecord
from tests.engines.place import within
from tests.helpers import assert_same, files, final, numbers
from tests.kills.engine import in_a_process

SMALL: dict[str, Any] = {"data": "digits", "clients": 6, "model": "mlp:16", "rounds": 3}


class Deadly(ft.Method):
    """FedAvg whose client 3 kills its worker in round 2: once, or always."""

    name = "deadly"
    marker: str = ""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        marker = Path(self.marker)
        if client.id == 3 and client.round == 2 and (not self.marker or not marker.exists()):
            if self.marker:
                marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"theta": client.descend(message["theta"])}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_is_replaced_and_its_work_repeated(workers: int, tmp_path: Path) -> None:
    result = ft.run(Deadly(marker=str(tmp_path / "died")), engine="processes", workers=workers, **SMALL)
    assert (tmp_path / "died").exists()
    plain = ft.run("fedavg", engine="in-process", **SMALL)
    assert numbers(result.rounds) == numbers(plain.rounds)
    assert_same(final(result), final(plain))


def test_a_client_that_kills_every_worker_is_left_out() -> None:
    left_out = "client 3 left out: its worker process died 3 times"
    with pytest.warns(ft.ClientNote, match="round 3: client 3 is back"), pytest.warns(ft.ClientFailure, match=left_out):
        result = ft.run(Deadly(), engine="processes", workers=2, **SMALL)
    assert [record.failed for record in result.rounds] == [[], [3], []]


def test_no_worker_survives_a_run_or_an_interruption() -> None:
    def stop(record: RoundRecord) -> None:
        raise KeyboardInterrupt

    before = children(os.getpid())
    ft.run("fedavg", engine="processes", workers=2, **SMALL)
    with pytest.raises(KeyboardInterrupt):
        ft.run("fedavg", engine="processes", workers=2, on_round=stop, **SMALL)
    assert children(os.getpid()) <= before


def test_a_method_defined_anywhere_works_in_workers() -> None:
    class Here(ft.Method):
        def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
            return {"theta": client.descend(message["theta"])}

    assert_same(
        final(ft.run(Here(), engine="processes", workers=2, **SMALL)), final(ft.run("fedavg", workers=1, **SMALL))
    )


def test_sheets_hold_tensors_of_all_kinds() -> None:
    sheet = Sheet(1 << 16)
    tensors = {
        "vector": torch.randn(37),
        "matrix": torch.randn(5, 3, dtype=torch.float64).T,
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0),
        "flags": torch.tensor([True, False]),
    }
    layout, room = sheet.write(tensors)
    more, _ = sheet.write({"more": torch.ones(4)}, room)
    assert_same(sheet.read(layout), tensors)
    assert_same(sheet.read(more), {"more": torch.ones(4)})
    with pytest.raises(ft.FedtailorError, match="do not fit what a worker shares"):
        sheet.write({"large": torch.zeros(1 << 20)})


def children(process: int) -> set[int]:
    """The living children of a process."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process and fields[0] != "Z":
            found.add(int(path.parent.name))
    return found


def start(out: Path, rounds: int) -> subprocess.Popen[str]:
    """A run by the command line, far from its end when it is stopped."""
    options = ["--clients", "6", "--rounds", str(rounds), "--participation", "0.5", "--checkpoint-every", "3"]
    command = [sys.executable, "-m", "fedtailor", "run", "ditto", *options, "--workers", "2", "--out", str(out)]

    def hear_interrupts() -> None:  # also where the tests themselves run in the background, deaf to Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, preexec_fn=hear_interrupts, **pipes)


def wait_for_round(out: Path, process: subprocess.Popen[str], number: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        path = out / "rounds.jsonl"
        if path.exists() and path.read_text().count("\n") >= number:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("the run did not get on")


def gone(processes: set[int]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{number}").exists() for number in processes):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_stopped_from_outside_is_resumable_and_leaves_no_orphans(how: signal.Signals, tmp_path: Path) -> None:
    rounds = 30
    process = start(tmp_path / "stopped", rounds)
    wait_for_round(tmp_path / "stopped", process, 5)
    workers = children(process.pid)
    assert len(workers) == 2
    process.send_signal(how)
    _, errors = process.communicate(timeout=30)
    assert gone(workers)
    if how == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert f"fedtailor resume {tmp_path / 'stopped'}" in errors.replace("\n", "")
    assert len(ft.load(tmp_path / "stopped").rounds) < rounds
    resumed = ft.resume(tmp_path / "stopped")
    experiment = resumed.experiment.model_dump(exclude={"workers"})
    whole = ft.run(**experiment, workers=1, out=tmp_path / "whole")
    assert numbers(resumed.rounds) == numbers(whole.rounds)
    assert files(tmp_path / "stopped/checkpoint") == files(tmp_path / "whole/checkpoint")


# --- clients that never answer ---


class Stuck(ft.Method):
    """FedAvg whose client 3 does nothing for a minute in round 2, in one of its functions; so does what it forks."""

    name = "stuck"
    where: str = "train"
    note: str = ""  # a file for the numbers of the processes

    def _wait(self, client: ft.Client, where: str) -> None:
        if client.id == 3 and client.round == 2 and self.where == where:
            forked = os.fork()
            with Path(self.note).open("a") as file:
                file.write(f"{os.getpid()}\n")
            if forked or where == "train":
                time.sleep(60)
            os._exit(0)

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        self._wait(client, "train")
        return {"theta": client.descend(message["theta"])}

    def personal_model(self, client: ft.Client, message: ft.Message) -> Tensor:
        self._wait(client, "personal_model")
        return message["theta"]


@pytest.mark.parametrize("engine", [{"engine": "auto", "workers": 1}, {"engine": "processes", "workers": 2}])
def test_a_client_that_never_answers_is_left_out_at_the_deadline(engine: dict[str, Any], tmp_path: Path) -> None:
    expected = r"round 2: client 3 left out: it did not answer within 1\.5 s\."
    back = pytest.warns(ft.ClientNote, match=r"round 3: client 3 is back\.")
    with within(30), back, pytest.warns(ft.ClientFailure, match=expected):
        result = ft.run(Stuck(note=str(tmp_path / "note")), deadline=1.5, **engine, **SMALL)
    assert [record.failed for record in result.rounds] == [[], [3], []]
    assert result.rounds[1].seconds < 10
    processes = set(map(int, (tmp_path / "note").read_text().split()))
    assert len(processes) == 2  # what it forked ended with it
    assert gone(processes)


def test_an_evaluation_that_never_ends_is_missing_at_the_deadline(tmp_path: Path) -> None:
    stuck = Stuck(where="personal_model", note=str(tmp_path / "note"))
    expected = r"The evaluation of client 3 failed: it did not answer within 1\.5 s\."
    with within(30), pytest.raises(ft.FedtailorError, match=expected):
        ft.run(stuck, deadline=1.5, workers=2, on_failure="stop", **SMALL)
    expected = r"client 3 not measured: it did not answer within 1\.5 s\."
    with within(30), pytest.warns(ft.ClientFailure, match=expected), pytest.warns(ft.ClientNote, match="3 is back"):
        result = ft.run(stuck, deadline=1.5, workers=2, **SMALL)
    assert [record.missing for record in result.rounds] == [[], [3], []]


def test_a_deadline_changes_no_number() -> None:
    with_one = ft.run("ditto", engine="processes", workers=2, deadline=60, **SMALL)
    assert_same(final(with_one), final(ft.run("ditto", engine="in-process", **SMALL)))


def test_without_worker_processes_a_deadline_is_refused_but_for_debugging() -> None:
    expected = r"^A deadline needs worker processes .*: leave out one or the other\.$"
    with pytest.raises(ft.FedtailorError, match=expected):
        ft.run("fedavg", engine="in-process", deadline=5, **SMALL)
    assert ft.run("fedavg", debug=True, deadline=5, **{**SMALL, "rounds": 1}).finished


class Haunted(ft.Method):
    """FedAvg whose client 3 forks a process, which has the worker's pipe too, and then kills its worker."""

    name = "haunted"
    note: str = ""
    apart: bool = False  # the process leaves the worker's group

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        if client.id == 3 and client.round == 2:
            if (forked := os.fork()) == 0:
                if self.apart:
                    os.setsid()
                time.sleep(20)
                os._exit(0)
            with Path(self.note).open("a") as file:
                file.write(f"{forked}\n")
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"theta": client.descend(message["theta"])}


@pytest.mark.parametrize("apart", [False, True])
def test_a_dead_worker_is_noticed_though_what_it_forked_holds_its_pipe(apart: bool, tmp_path: Path) -> None:
    method = Haunted(note=str(tmp_path / "note"), apart=apart)
    left_out, back = "client 3 left out: its worker process died 3 times", "round 3: client 3 is back"
    with within(15), pytest.warns(ft.ClientNote, match=back), pytest.warns(ft.ClientFailure, match=left_out):
        result = ft.run(method, engine="processes", workers=2, **SMALL)
    assert [record.failed for record in result.rounds] == [[], [3], []]
    left = set(map(int, (tmp_path / "note").read_text().split()))
    if apart:
        for number in left:
            os.kill(number, signal.SIGKILL)
    assert gone(left)


# --- limits ---


def test_a_worker_that_cannot_be_started_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtailor.engines.processes.SHEET", 1 << 60)  # more address space than there is
    said = r"A worker process cannot be started \(Cannot allocate memory; .+\): use fewer --workers, or --engine"
    with pytest.raises(ft.FedtailorError, match=said):
        ft.run("fedavg", engine="processes", workers=1, **SMALL)
    assert not children(os.getpid())


@pytest.mark.parametrize("how", ["closed", "closed unread"])
def test_a_worker_ends_in_silence_when_its_parent_is_gone(how: str) -> None:
    """With an answer unread, the pipe's end is an error and not its end."""
    parents, its_own = get_context("fork").Pipe()
    if how == "closed unread":
        its_own.send("an answer")
    parents.close()
    sites = SimpleNamespace(work=None)
    in_a_process(lambda: _work(sites, its_own, None, None, [], os.getppid(), None))  # type: ignore[arg-type]
