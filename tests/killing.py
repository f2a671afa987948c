"""Processes that are killed in the middle of writing a file."""

import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fedtailor._common import files


class _Half:
    """A file whose first write gets half of what it was given to the disk before its process is killed."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> "_Half":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: bytes) -> None:
        self._file.write(content[: len(content) // 2])
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def in_a_process(work: Callable[[], object], code: int = 0) -> None:
    """Do this work in a process that is to end with this code."""
    process = get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == code


def killed_while_writing(name: str, work: Callable[[], object]) -> None:
    """Do this work in a process that is killed when half of the first file whose name has `name` in it is written."""

    def child() -> None:
        whole = files._open

        def half(path: Path, mode: str) -> Any:
            file = whole(path, mode)
            return _Half(file) if name in path.name and mode in ("xb", "ab") else file

        files._open = half
        work()

    in_a_process(child, -signal.SIGKILL)
