"""Worker processes, killed at an exact message or at any time, and their parent, after which none of them is left."""

import os
import random
import signal
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.kills import runs
from tests.kills.engine import (
    MEMORY,
    Attempt,
    Case,
    Child,
    Way,
    Whole,
    Work,
    adopt_orphans,
    at_work,
    children,
    fault_of,
    kill,
    lost,
    random_stop,
    survivors,
    whole,
)

METHODS = {"pgfed": {}, "scaffold": {"states": "disk"}, "ditto": {"participation": 0.75, "checkpoint_every": 1}}
CASES = {
    method: Case(method, partial(runs.alone, method, {"engine": "processes", "workers": 2, **settings}))
    for method, settings in METHODS.items()
}
HEADER = struct.Struct("!i")  # of a message in a pipe of multiprocessing's


@dataclass
class Messages:
    """The answers of all workers of this process, from `watch` on: at the one of a number, something is done.

    They are counted by bytes in a pipe, of which each takes one: no lock is left behind by who is killed.
    """

    at: int
    how: str = "before"  # or half, or after
    act: Work = kill
    _count: tuple[int, int] = field(default_factory=os.pipe)

    def watch(self) -> None:
        os.write(self._count[1], b"." * self.at + b"!" + b"." * 10_000)
        parent, whole = os.getpid(), Connection._send_bytes  # type: ignore[attr-defined]

        def sent(pipe: Connection, content: Any) -> None:
            if os.getpid() == parent or os.read(self._count[0], 1) != b"!":
                whole(pipe, content)
                return
            message = HEADER.pack(len(content)) + bytes(content)
            first = {"before": 0, "half": len(message) // 2, "after": len(message)}[self.how]
            os.write(pipe.fileno(), message[:first])
            self.act()
            os.write(pipe.fileno(), message[first:])

        Connection._send_bytes = sent  # type: ignore[attr-defined]

    def reached(self) -> bool:
        """Find out afterwards whether there was an answer of this number."""
        return b"!" not in os.read(self._count[0], 20_000)


@cache
def expected(method: str) -> Whole:
    """What comes out without workers: with them it must be the same."""
    alone = Case(method, partial(runs.alone, method, METHODS[method]))
    with TemporaryDirectory(dir=MEMORY) as one, TemporaryDirectory(dir=MEMORY) as other:
        found = whole(CASES[method], Path(one))
        assert found.value == whole(alone, Path(other)).value, f"{method}: workers have other bits"
    return found


def attempt(rng: random.Random, folder: Path) -> Attempt:
    """Stop a run with workers in one of the ways, in a process that adopts all that it leaves behind."""
    method, how = rng.choice(sorted(METHODS)), rng.choice(sorted(WAYS))
    found = expected(method)

    def work() -> Attempt:
        adopt_orphans()
        attempt = WAYS[how](CASES[method], rng, folder, found)
        attempt.what = f"{method}, {how}: {attempt.what}"
        if left := survivors():
            attempt.fault += f"{len(left)} processes survived"
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        return attempt

    ended = Child(work).end()
    return ended.value or Attempt(f"{method}, {how}", fault=ended.raised or f"code {ended.code}")


# --- ways ---


def parent_at_an_operation(case: Case, rng: random.Random, folder: Path, expected: Whole) -> Attempt:
    stop, where = random_stop(rng, expected.operations)
    return _gone_on(case, folder, expected, where, at_work(case, folder, stop))


def parent_at_any_time(case: Case, rng: random.Random, folder: Path, expected: Whole) -> Attempt:
    seconds = rng.uniform(0, expected.seconds)
    child = at_work(case, folder)
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    return _gone_on(case, folder, expected, f"after {seconds:.3f} s", child)


def worker_at_a_message(case: Case, rng: random.Random, folder: Path, expected: Whole) -> Attempt:
    messages = Messages(rng.randrange(16), rng.choice(("before", "half", "after")))
    ended = at_work(case, folder, first=messages.watch).end()
    return Attempt(f"{messages.how} answer {messages.at}", int(messages.reached()), fault_of(ended, expected.value))


def workers_at_any_time(case: Case, rng: random.Random, folder: Path, expected: Whole) -> Attempt:
    """Kill two workers: a client's work is begun three times."""
    child, attempt = at_work(case, folder), Attempt("at any time")
    for _ in range(2):
        time.sleep(rng.uniform(0, expected.seconds / 2))
        if workers := children(child.pid):
            with suppress(ProcessLookupError):
                os.kill(rng.choice(workers), signal.SIGKILL)
                attempt.kills += 1
    attempt.fault = fault_of(child.end(), expected.value)
    return attempt


def parent_of_a_stopped_worker(case: Case, rng: random.Random, folder: Path, expected: Whole) -> Attempt:
    """Kill the parent of a worker that is stopped, as a shell's job: the system lets the orphan go on, and so end."""
    messages, parent = Messages(rng.randrange(12)), [0]

    def act() -> None:
        os.kill(parent[0], signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP)

    def first() -> None:
        os.setsid()
        parent[0] = os.getpid()
        messages.watch()

    messages.act = act
    return _gone_on(case, folder, expected, f"answer {messages.at}", at_work(case, folder, first=first))


def _gone_on(case: Case, folder: Path, expected: Whole, where: str, child: Child) -> Attempt:
    ended = child.end()
    fault = "" if ended.killed else fault_of(ended, expected.value)
    return Attempt(where, int(ended.killed), fault or lost(case, folder, expected.value))


WAYS: dict[str, Way] = {
    "the parent, at an operation": parent_at_an_operation,
    "the parent, at any time": parent_at_any_time,
    "the parent, with a stopped worker": parent_of_a_stopped_worker,
    "a worker, at a message": worker_at_a_message,
    "workers, at any time": workers_at_any_time,
}
