"""Work in a process of its own, stopped at an exact operation on a file, and done again.

`in_a_process` forks: the child has all that its parent imported, so a kill costs what the work costs. There every
operation on a file below a directory is counted, and the process is stopped at one of them: before it, after it, when
half of it is written, or with the power, when what was not synced may be lost.
"""

import builtins
import ctypes
import io
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from tests.kills.disk import Disk

How = Literal["before", "half", "after", "power"]
HOWS: tuple[How, ...] = ("before", "half", "after", "power")
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where files cost no time: no sync is waited for
PATIENCE = 600  # seconds of one attempt: more is a hang, on a machine with much else to do, too
Work = Callable[[], object]


def kill() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


# --- processes ---


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, what its work returned, and the traceback of what it raised."""

    code: int
    value: Any = None
    raised: str = ""

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class Child:
    """Work in a process of its own, at work. `first` is done there before it."""

    def __init__(self, work: Work, first: Work = lambda: None) -> None:
        self.began, (self._mine, theirs) = time.monotonic(), get_context("fork").Pipe(duplex=False)
        self.process = get_context("fork").Process(target=_report, args=(work, first, theirs))
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def end(self) -> Ended:
        """Wait for the end; it may have forked others, which have its end of the pipe too."""
        while not self._mine.poll(0.01) and self.process.is_alive():
            pass
        value, raised = None, ""
        with suppress(EOFError, OSError):
            if self._mine.poll():
                value, raised = self._mine.recv()
        self.process.join()
        self._mine.close()
        assert self.process.exitcode is not None
        return Ended(self.process.exitcode, value, raised)


def _report(work: Work, first: Work, pipe: Any) -> None:
    try:
        first()
        found = work(), ""
    except Exception:
        found = None, traceback.format_exc()
    pipe.send(found)


def in_a_process(work: Work, code: int = 0) -> None:
    """Do this work in a process that is to end with this code."""
    ended = Child(work).end()
    assert (ended.code, ended.raised) == (code, ""), ended


def killed_while_writing(name: str, work: Work) -> None:
    """Do this work in a process that is killed when half of the first file whose name has `name` in it is written."""
    half = Operations(Path("/"), Stop(lambda _, what, path: what == "write" and name in path.name, "half"))
    ended = Child(work, half.watch).end()
    assert ended.killed, ended


# --- operations on files ---


@dataclass(frozen=True)
class Stop:
    """Something that is done at an operation: the one of this number, or the first one for which `at` says so."""

    at: int | Callable[[int, str, Path], bool]
    how: How = "before"
    act: Work = kill
    luck: int = 0  # decides what a power cut takes

    def is_at(self, number: int, what: str, path: Path) -> bool:
        return number == self.at if isinstance(self.at, int) else self.at(number, what, path)


@dataclass
class Operations:
    """The operations of this process on files below `root`, from `watch` on."""

    root: Path
    stop: Stop | None = None
    done: list[str] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.RLock)
    _inside: bool = False
    _disk: Disk | None = None

    def watch(self) -> None:
        """Count every operation of this process, and stop at the one that is meant. There is no way back."""
        if self.stop and self.stop.how == "power":
            self._disk = Disk(self.root)
        for name in ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "fsync"):
            setattr(os, name, self._counted(name, getattr(os, name)))
        builtins.open = io.open = self._opening(io.open)  # type: ignore[assignment]

    def step(self, what: str, place: Any, work: Callable[[], Any], half: Work | None = None) -> Any:
        """Do one operation, which the process may not survive."""
        with self._lock:
            path = Path(os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else os.path.abspath(place))
            if self._inside or not path.is_relative_to(self.root):
                return work()
            self._inside = True
            try:
                return self._step(what, path, work, half)
            finally:
                self._inside = False

    def _step(self, what: str, path: Path, work: Callable[[], Any], half: Work | None) -> Any:
        number, how = len(self.done), None
        self.done.append(f"{what} {path.relative_to(self.root)}")
        if self.stop and self.stop.is_at(number, what, path):
            how = self.stop.how
        if how == "half" and half:
            half()
        if how in ("before", "half"):
            self._act()
        try:
            return work()
        finally:
            if self._disk:
                self._disk.note(what, path)
            if how == "power":
                assert self._disk
                self._disk.lose(random.Random(self.stop and self.stop.luck))
            if how in ("after", "power"):
                self._act()

    def _act(self) -> None:
        assert self.stop
        self.stop.act()

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(place: Any, *rest: Any, **more: Any) -> Any:
            return self.step(name, place, lambda: function(place, *rest, **more))

        return called

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            if isinstance(file, int) or not {*mode} & {*"wxa+"}:
                return function(file, mode, *rest, **more)
            found = self.step("open", file, lambda: function(file, mode, *rest, **more))
            return Written(found, Path(file), self) if Path(os.path.abspath(file)).is_relative_to(self.root) else found

        return opened


class Written:
    """A file open for writing. Nothing stays in a buffer: what a kill leaves is what was written before it."""

    def __init__(self, file: Any, path: Path, operations: Operations) -> None:
        self._file, self._path, self._operations = file, path, operations

    def __enter__(self) -> "Written":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: Any) -> int:
        middle, left = len(content) // 2, [content]

        def put(part: Any) -> None:
            self._file.write(part)
            self._file.flush()

        def half() -> None:
            put(content[:middle])
            left[0] = content[middle:]

        self._operations.step("write", self._path, lambda: put(left[0]), half)
        return len(content)

    def truncate(self, end: int) -> int:
        return int(self._operations.step("truncate", self._path, lambda: self._file.truncate(end)))


# --- work that is stopped, and done again ---


@dataclass(frozen=True)
class Case:
    """Work in a directory that begins there or goes on, as its user would, and returns what must come out the same."""

    name: str
    work: Callable[[Path], Mapping[str, object]]


@dataclass(frozen=True)
class Whole:
    """What came out of a case that nothing stopped, its operations on files, and the seconds that it took."""

    value: Mapping[str, object]
    operations: list[str]
    seconds: float


def clock() -> None:
    """Stop the clock, so that seconds in records are the same again."""
    time.perf_counter = lambda: 0.0


def at_work(case: Case, folder: Path, stop: Stop | None = None, first: Work = lambda: None) -> Child:
    """Begin the work of a case in a folder, or go on with it there, in a process that this may stop."""

    def prepare() -> None:
        clock()
        first()
        if stop:
            Operations(folder, stop).watch()

    return Child(lambda: case.work(folder), prepare)


def whole(case: Case, folder: Path) -> Whole:
    """Do the work of a case without a stop. What it imported is imported here too: later children need not."""
    watched = Operations(folder)

    def work() -> tuple[Mapping[str, object], list[str], list[str]]:
        return case.work(folder), watched.done, sorted(sys.modules)

    def first() -> None:
        clock()
        watched.watch()

    child = Child(work, first)
    ended = child.end()
    seconds = time.monotonic() - child.began
    if ended.code or ended.raised:
        raise RuntimeError(f"{case.name} fails unstopped: {ended.raised or ended.code}")
    value, operations, modules = ended.value
    for name in {*modules} - {*sys.modules}:
        with suppress(ImportError):
            import_module(name)
    return Whole(value, operations, seconds)


def lost(case: Case, folder: Path, expected: Mapping[str, object]) -> str:
    """Go on with stopped work to its end, and say what is not as it would have been without the stop."""
    return fault_of(at_work(case, folder).end(), expected)


def fault_of(ended: Ended, expected: Mapping[str, object]) -> str:
    """Say what is wrong with an end, or other than expected; nothing if all is well."""
    if ended.code or ended.raised:
        return ended.raised or f"it ended with code {ended.code}"
    names = sorted(name for name in {*expected, *ended.value} if expected.get(name) != ended.value.get(name))
    return f"other than without the stop: {', '.join(names)}" if names else ""


@dataclass
class Attempt:
    """A piece of work that was stopped: how, how often, and what was wrong in the end."""

    what: str
    kills: int = 0
    fault: str = ""


Try = Callable[[random.Random, Path], Attempt]
Way = Callable[[Case, random.Random, Path, Whole], Attempt]  # to stop a case in a folder, of which this comes out whole


class Hung(BaseException):
    """An attempt did not come to its end."""


def tried(attempt: Try, rng: random.Random, folder: Path) -> Attempt:
    """Make an attempt. What hangs is a fault, and so is a traceback of ours on the standard error of any process."""

    def ring(*_: object) -> None:
        raise Hung

    before, own = signal.signal(signal.SIGALRM, ring), os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        signal.alarm(PATIENCE)
        try:
            found = attempt(rng, folder)
        except Hung:
            found = Attempt("unknown", fault=f"it hung for {PATIENCE} s\n{traceback.format_exc()}")
            kill_descendants(os.getpid())
        except Exception:
            found = Attempt("unknown", fault=traceback.format_exc())
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
            os.dup2(own, 2)
            os.close(own)
        said.seek(0)
        text = said.read().decode(errors="replace")
    if "Traceback" in text and "/fedtailor/" in text:
        found.fault += f"\non its standard error:\n{text}"
    return found


def random_stop(rng: random.Random, operations: list[str]) -> tuple[Stop, str]:
    """Choose one of these operations to stop at, and say in words where that is."""
    at, how = rng.randrange(len(operations)), rng.choice(HOWS)
    return Stop(at, how, luck=rng.randrange(2**32)), f"{how} {at}: {operations[at]}"


def kill_and_go_on(case: Case, rng: random.Random, folder: Path, expected: Whole) -> Attempt:
    """Kill a case at one to three operations, one after the other, and let it come to its end."""
    attempt = Attempt(case.name)
    for _ in range(rng.choice((1, 1, 2, 3))):
        stop, where = random_stop(rng, expected.operations)
        ended = at_work(case, folder, stop).end()
        attempt.what += f"; {where}"
        if not ended.killed:  # what was left to do had fewer operations
            attempt.fault = fault_of(ended, expected.value)
            break
        attempt.kills += 1
    attempt.fault = attempt.fault or lost(case, folder, expected.value)
    return attempt


def tries(cases: Sequence[Case]) -> Try:
    """Make the function that kills one of these cases, and lets it come to its end."""

    @cache
    def expected(number: int) -> Whole:
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            return whole(cases[number], Path(folder))

    def attempt(rng: random.Random, folder: Path) -> Attempt:
        number = rng.randrange(len(cases))
        return kill_and_go_on(cases[number], rng, folder, expected(number))

    return attempt


# --- processes that nobody waits for ---


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Become the parent of all processes whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """End this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    assert ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0


def survivors(seconds: float = 10.0) -> list[int]:
    """Wait for the end of all children, and list those that are still there after so many seconds."""
    end = time.monotonic() + seconds
    with suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
        return children(os.getpid())
    return []


def kill_descendants(pid: int) -> None:
    """Kill a process's children, and theirs."""
    for child in children(pid):
        kill_descendants(child)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """List a process's children."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
