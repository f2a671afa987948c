"""Where clients run. An engine takes tasks and yields their results; the federation knows no more of it."""

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

from fedtailor.errors import FedtailorError
from fedtailor.site.work import Bench, Result, Task
from fedtailor.transport.in_process import InProcess
from fedtailor.transport.memory import keep_freed_memory
from fedtailor.transport.processes import Processes

__all__ = ["Bench", "Engine", "InProcess", "Processes", "Result", "Task", "cores", "make_engine"]


class Engine(Protocol):
    """What the federation needs of an engine."""

    workers: int

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]: ...

    def close(self) -> None: ...


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_engine(name: str, bench: Bench, workers: int | None) -> Engine:
    """The engine of this name; `auto` takes worker processes where there is more than one core for them."""
    can_fork = "fork" in multiprocessing.get_all_start_methods() and sys.platform == "linux"
    on_cpu = bench.initial.device.type == "cpu"
    if name == "processes" and not (can_fork and on_cpu):
        raise FedtailorError("Worker processes need Linux and the CPU: use --engine in-process here.")
    keep_freed_memory()
    count = workers or cores()
    may_fork = can_fork and on_cpu and not multiprocessing.current_process().daemon  # whose children are forbidden
    if name == "processes" or (name == "auto" and count > 1 and may_fork):
        return Processes(bench, count)
    return InProcess(bench)
