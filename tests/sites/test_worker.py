"""A site's worker process: the real one, with a real site, and what happens when it dies."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fedtailor.messages.letters import Letter, read_letter
from fedtailor.sites.nvflare.job import SITE
from fedtailor.sites.nvflare.worker import LENGTH, LOCK, TRIALS, Worker, WorkerFailed
from tests.sites.loopback import wait_for
from tests.sites.parts import Federation

HELLO = Letter("hello", {"plan": "trial"}).pack()


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    Federation(tmp_path)
    monkeypatch.setenv(SITE, str(tmp_path / "south" / "site.toml"))
    found = Worker()
    yield found
    found.close()


def wanted() -> bool:
    return False


def test_letters_are_answered_by_one_process(worker: Worker) -> None:
    pid = worker.start().pid
    for _ in range(2):
        assert read_letter(worker.answer(HELLO, wanted)).header["site"] == "south"
    assert worker.start().pid == pid


def test_a_worker_that_is_killed_is_started_again(worker: Worker) -> None:
    first = worker.answer(HELLO, wanted)
    process = worker.start()
    process.kill()
    process.wait()
    assert worker.answer(HELLO, wanted) == first


def test_a_worker_that_is_killed_at_work_gets_the_letter_again(worker: Worker) -> None:
    process = worker.start()
    threading.Timer(0.3, process.kill).start()  # while it still imports: the letter is in its pipe
    assert read_letter(worker.answer(HELLO, wanted)).header["site"] == "south"
    assert process.wait() == -signal.SIGKILL


def test_a_worker_that_always_dies_is_given_up(worker: Worker, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "south" / "site.toml").write_text('name = "south"')
    with pytest.raises(WorkerFailed, match=f"died {TRIALS} times"):
        worker.answer(HELLO, wanted)
    assert capfd.readouterr().err.count("does not say 'data'") == TRIALS


def test_work_that_nobody_wants_is_ended(worker: Worker) -> None:
    process = worker.start()
    os.kill(process.pid, signal.SIGSTOP)  # work of any length
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match="no longer wanted"):
        worker.answer(HELLO, lambda: time.monotonic() > began + 0.5)
    assert process.wait() == -signal.SIGKILL


def test_what_is_printed_does_not_reach_the_pipe(worker: Worker) -> None:
    code = (
        "from fedtailor.sites.local_site import LocalSite; from fedtailor.sites.nvflare.worker import main; "
        "import os; LocalSite.log = lambda self, text: print(text, os.system('echo noise'), flush=True); main()"
    )
    letter = Letter("something else", {}).pack()
    done = subprocess.run(
        [sys.executable, "-c", code], input=LENGTH.pack(len(letter)) + letter, capture_output=True, check=True
    )
    assert read_letter(done.stdout[LENGTH.size :]).header["fault"] == "letter"
    assert LENGTH.unpack(done.stdout[: LENGTH.size]) == (len(done.stdout) - LENGTH.size,)
    assert b"noise" in done.stderr
    assert b"There is no letter of the kind 'something else'. 0" in done.stderr


def test_a_worker_at_work_ends_with_its_parent(worker: Worker) -> None:
    work = (
        "import time; from fedtailor.sites.local_site import LocalSite; "
        "from fedtailor.sites.nvflare.worker import main; "
        "LocalSite.answer = lambda self, letter: print('at work', flush=True) or time.sleep(600); main()"
    )
    parent = (
        "import subprocess, sys, time; from fedtailor.sites.nvflare.worker import send; "
        "process = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdin=subprocess.PIPE, "
        "stdout=subprocess.PIPE, stderr=subprocess.PIPE); send(process.stdin, b'letter'); process.stderr.readline(); "
        "print(process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent, work], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        assert _runs(pid)
        process.kill()
    wait_for(lambda: not _runs(pid), 20, "the end of the worker")


def _open_files(files: Path) -> set[str]:
    """The names of the files that a process has open; some are closed while one looks."""
    names = set()
    for file in files.iterdir():
        with suppress(OSError):
            names.add(Path(os.readlink(file)).name)
    return names


def test_two_workers_of_a_site_are_never_at_work_at_once(worker: Worker) -> None:
    worker.answer(HELLO, wanted)
    other, answers = Worker(), []
    files = Path(f"/proc/{other.start().pid}/fd")
    thread = threading.Thread(target=lambda: answers.append(other.answer(HELLO, wanted)))
    thread.start()
    wait_for(lambda: LOCK in _open_files(files), 60, "the other worker's turn")
    thread.join(1)
    assert not answers
    worker.close()
    thread.join()
    other.close()
    assert len(answers) == 1


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
