"""How the benchmarks measure: by the clock and by the processor, the best of several, and a verdict per goal.

A shared machine disturbs the clock, so what is compared is measured in turn, in one run, and ratios count.
"""

import cProfile
import multiprocessing
import os
import pstats
import re
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from fedtailor.data import Dataset

CORES = len(os.sched_getaffinity(0))


def images(samples: int, shape: tuple[int, int, int]) -> Dataset:
    """Random images of ten classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (samples, *shape), generator=generator, dtype=torch.uint8)
    return Dataset("images", x, torch.arange(samples) % 10, tuple("0123456789"))


@dataclass(frozen=True)
class Seconds:
    """How long something took, by the clock and by the processors."""

    wall: float = float("inf")
    cpu: float = float("inf")

    def best(self, other: "Seconds") -> "Seconds":
        return Seconds(min(self.wall, other.wall), min(self.cpu, other.cpu))

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def __truediv__(self, number: float) -> "Seconds":
        return Seconds(self.wall / number, self.cpu / number)


def cpu_seconds() -> float:
    """Sum up the processor time of this process and its workers, those that live and those that have ended."""
    living = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    of_pid = (time.clock_gettime((~pid << 3) | 2) for pid in living)  # Linux: the processor clock of a process
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(of_pid)


def timed(work: Callable[[], object]) -> Seconds:
    """Time some work."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    work()
    return Seconds(time.perf_counter() - wall, cpu_seconds() - cpu)


def best_of(runs: dict[str, Callable[[], Seconds]], repeat: int) -> dict[str, Seconds]:
    """Find the best of several repetitions of each, in turn, so that a busy moment of the machine meets all of them."""
    for run in runs.values():  # the first pass of a network sets things up
        run()
    found = {name: Seconds() for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            found[name] = found[name].best(run())
    return found


def start(process: BaseProcess) -> None:
    """Start a process without the warning of threads."""
    with warnings.catch_warnings():  # newer Pythons warn of them where processes are forked
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()


def memory(pid: int | None) -> float:
    """Sum up the memory of a process and its children, in GiB. What they share counts once: memory by each one's part
    of it, and programs and libraries, which unrelated processes share too, by the process that has most of them."""
    own, files = 0, 0
    with suppress(OSError):  # one of them has just ended
        for process in [pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]:
            parts = Path(f"/proc/{process}/smaps_rollup").read_text()
            own += sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", parts, re.MULTILINE)))
            status = Path(f"/proc/{process}/status").read_text()
            files = max(files, *map(int, re.findall(r"^RssFile:\s+(\d+)", status, re.MULTILINE)))
    return (own + files) / 2**20


def profiled(work: Callable[[], object]) -> str:
    """List the functions that take most time themselves."""
    found, text = cProfile.Profile(), StringIO()
    found.runcall(work)
    pstats.Stats(found, stream=text).sort_stats("tottime").print_stats(10)
    return "\n".join(line for line in text.getvalue().splitlines() if line.strip())


@dataclass
class Goal:
    """A bound, and what was measured. `why` finds out where the time goes; it is asked only if the goal is missed."""

    what: str
    measured: float
    bound: float
    unit: str = "×"
    at_least: bool = False  # otherwise at most
    why: Callable[[], str] | None = None

    @property
    def met(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def row(self) -> list[str]:
        sign = "≥" if self.at_least else "≤"
        verdict = "met" if self.met else "MISSED"
        return [self.what, f"{sign} {self.bound:g} {self.unit}", f"{self.measured:.2f} {self.unit}", verdict]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        return "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])

    return "\n".join(aligned(line).rstrip() for line in lines)
