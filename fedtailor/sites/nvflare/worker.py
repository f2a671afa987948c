"""A site's worker process: letters in, answers out, through pipes that nothing else writes to.

The work is not done in NVFlare's process: if the system kills the worker (out of memory), it is started again, the
letter is repeated, and the job goes on. `python -m` this module is the worker.
"""

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fedtailor._common.files import make_directory
from fedtailor.sites.nvflare.job import SITE
from fedtailor.sites.nvflare.processes import alone, end_with_parent

MODULE = "fedtailor.sites.nvflare.worker"
TRIALS = 3  # times that a letter is given to a worker
LOOK = 0.2  # seconds from look to look at whether an answer is still wanted
LENGTH = struct.Struct(">Q")  # before each letter
LOCK = "worker.lock"  # in the site's directory


class WorkerFailed(Exception):
    """A letter was not answered: the worker died with it each time, or nobody wants the answer any more."""


class Worker:
    """The worker process of a site, as its parent sees it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the worker process, if there is none: it takes seconds."""
        self._process = self._process or subprocess.Popen(
            [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self._process

    def answer(self, letter: bytes, unwanted: Callable[[], bool]) -> bytes:
        """Have a letter answered; give up when the answer is no longer wanted."""
        for _ in range(TRIALS):
            process = self.start()
            assert process.stdin
            assert process.stdout
            with _killed_if(unwanted, process), suppress(OSError, EOFError):
                send(process.stdin, letter)
                return receive(process.stdout)
            self.close()
            if unwanted():
                raise WorkerFailed("The answer is no longer wanted.")
        raise WorkerFailed(f"The worker process died {TRIALS} times with the same letter.")

    def close(self) -> None:
        """End the worker process."""
        if process := self._process:
            self._process = None
            process.kill()
            with suppress(OSError):  # what is left of a letter cannot be written
                process.communicate()


@contextmanager
def _killed_if(unwanted: Callable[[], bool], process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Kill a process in whose answer nobody is interested any more: it may take hours."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(LOOK):
            if unwanted():
                process.kill()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def send(pipe: IO[bytes], letter: bytes) -> None:
    """Write a letter with its length."""
    pipe.write(LENGTH.pack(len(letter)))
    pipe.write(letter)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes:
    """Read a letter; at the end of the pipe, EOFError."""
    (length,) = LENGTH.unpack(_exactly(pipe, LENGTH.size))
    return _exactly(pipe, length)


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError
    return content


def main() -> None:
    """Answer letters until there are no more."""
    letters, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # whatever is printed goes to the site's log
    end_with_parent()
    from fedtailor.sites.site_file import read_site

    file = read_site(Path(os.environ[SITE]))
    from fedtailor.sites.local_site import LocalSite

    make_directory(file.private)
    with alone(file.private / LOCK), suppress(EOFError, BrokenPipeError):  # what a job left behind ends within moments
        site = LocalSite(file, file.read_plan())
        while True:
            send(answers, site.answer(receive(letters)))


if __name__ == "__main__":
    main()
