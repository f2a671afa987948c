"""Processes that end with whoever started them, and are ended with all that they started. Linux only, as NVFlare is."""

import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedtailor._common.errors import FedtailorError

LOOK = 0.2  # seconds from look to look at the parent
GRACE = 5.0  # seconds for a process that was asked to end


@contextmanager
def alone(lock: Path, refusal: str | None = None) -> Iterator[None]:
    """Be the only one with this lock: wait for it, or refuse in these words. It goes with its process."""
    with open(lock, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
        except BlockingIOError:
            raise FedtailorError(str(refusal)) from None
        yield


def end_with_parent() -> None:
    """Have this process end, with all that it started, as soon as its parent is gone."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="end-with-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK)
    for pid in descendants(os.getpid()):
        kill(pid)
    os._exit(1)


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process started, and those that these started, also in sessions of their own."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found = [pid]
    for known in found:
        found += children.get(known, [])
    yield from found[1:]


def kill(pid: int) -> None:
    """Kill a process, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process of ours and all that it started."""
    started = list(descendants(process.pid))
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    process.kill()
    process.wait()
    for pid in started:
        kill(pid)
