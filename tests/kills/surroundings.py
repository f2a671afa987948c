"""What happens to a run from outside: its directory becomes read-only, it is stopped and continued, its memory ends.

What it says of it is one sentence, and nothing is lost: afterwards it goes on to the same bits.
"""

import ctypes
import errno
import os
import random
import resource
import signal
import stat
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import fedtailor as ft
from tests.kills import runs, studies, workers
from tests.kills.engine import (
    MEMORY,
    Attempt,
    Case,
    Child,
    Ended,
    Stop,
    Way,
    Whole,
    at_work,
    children,
    fault_of,
    lost,
    random_stop,
    whole,
)

CAPABILITIES, CAP_DAC_OVERRIDE = 0x20080522, 1  # the version of the system's interface
FAILURES = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 1, 32, 4096, 16384, 1 << 18


def refused(ended: Ended) -> str:
    """Say what is wrong with an end that should be a sentence of ours."""
    kind, _, said = ended.raised.strip().rpartition("\n")[2].partition(": ")
    if kind != "fedtailor._common.errors.FedtailorError" or len(said) > 500:
        return f"no sentence: {ended.raised or ended}"
    return ""


# --- read-only ---


def as_anybody() -> None:
    """Give up the right of root to write everywhere: then modes of files count for this process, too."""
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    assert libc.capget(header, sets) == 0
    for place in (0, 1):  # the effective ones and the permitted ones
        sets[place] &= ~(1 << CAP_DAC_OVERRIDE)
    assert libc.capset(header, sets) == 0


def change_rights(folder: Path, writable: bool) -> None:
    """Allow to write in everything below a folder, or forbid it."""
    for path in (folder, *folder.rglob("*")):
        rights = stat.S_IMODE(path.stat().st_mode)
        path.chmod(rights | 0o200 if writable else rights & ~0o222)


def read_only_from_an_operation(case: Case, rng: random.Random, folder: Path, expected: Whole) -> Attempt:
    """Forbid to write in the middle of a run, as an administrator would."""
    stop, where = random_stop(rng, expected.operations)
    stop = Stop(stop.at, "before", lambda: change_rights(folder, writable=False))
    ended = at_work(case, folder, stop, first=as_anybody).end()
    change_rights(folder, writable=True)
    fault = refused(ended) if ended.code or ended.raised else fault_of(ended, expected.value)
    return Attempt(where, 1, fault or lost(case, folder, expected.value))


def read_only_file_system(case: Case, rng: random.Random, folder: Path, expected: Whole) -> Attempt:
    """Go on with a killed run on a file system that is mounted read-only; what is there can still be read."""
    stop, where = random_stop(rng, expected.operations)
    killed = at_work(case, folder, stop).end().killed
    before = len(ft.load(folder / "run").rounds) if runs.begun(folder / "run") else None
    ended = at_work(case, folder, first=lambda: mount_read_only(folder)).end()
    fault = refused(ended)
    if before is not None and not fault:
        looked = Child(lambda: len(ft.load(folder / "run").rounds), lambda: mount_read_only(folder)).end()
        fault = "" if looked.value == before else f"it cannot be looked at: {looked}"
    return Attempt(where, int(killed), fault or lost(case, folder, expected.value))


def mount_read_only(folder: Path) -> None:
    """Mount a folder read-only for this process alone: in a namespace of its own. It needs the rights of root."""
    libc, place = ctypes.CDLL(None, use_errno=True), str(folder).encode()

    def call(code: int) -> None:
        if code:
            raise OSError(ctypes.get_errno(), "no namespace with mounts of its own")

    call(libc.unshare(CLONE_NEWNS))
    call(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    call(libc.mount(place, place, None, MS_BIND, None))
    call(libc.mount(None, place, None, MS_REMOUNT | MS_BIND | MS_RDONLY, None))


def failing_disk(case: Case, rng: random.Random, folder: Path, expected: Whole) -> Attempt:
    """From an operation on, every write fails: the disk is full, broken, or read-only."""
    place, code, how = rng.randrange(len(expected.operations)), rng.choice(FAILURES), rng.choice(("before", "half"))

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    stop = Stop(lambda number, what, _: number >= place, how, fail)
    ended = at_work(case, folder, stop).end()
    where = f"{os.strerror(code)}, {how} {place}: {expected.operations[place]}"
    return Attempt(where, 1, refused(ended) or lost(case, folder, expected.value))


# --- stopped and continued ---


def parent_stopped(case: Case, rng: random.Random, folder: Path, expected: Whole) -> Attempt:
    """Stop a run with workers in the middle of an operation, and let it go on after a while."""
    stop, where = random_stop(rng, expected.operations)
    child = at_work(case, folder, Stop(stop.at, rng.choice(("before", "half", "after")), stop_itself))
    continued = wake(child.pid, child)
    return Attempt(where, continued, fault_of(child.end(), expected.value))


def worker_stopped(case: Case, rng: random.Random, folder: Path, expected: Whole) -> Attempt:
    """Stop a worker in the middle of an answer, and let it go on after a while."""
    messages = workers.Messages(rng.randrange(16), rng.choice(("before", "half", "after")), stop_itself)
    child = at_work(case, folder, first=messages.watch)
    continued = wake(child.pid, child)
    return Attempt(f"{messages.how} answer {messages.at}", continued, fault_of(child.end(), expected.value))


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped_for_good(case: Case, rng: random.Random, folder: Path, expected: Whole) -> Attempt:
    """Stop a worker for ever: its client is left out at the deadline, in one sentence, and the run comes to its end."""
    messages = workers.Messages(rng.randrange(16), act=stop_itself)

    def work() -> tuple[int, list[list[int]], list[str]]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            rounds = runs.run("pgfed", {"engine": "processes", "workers": 2, "deadline": 1.0}, folder).rounds
        return len(rounds), [record.failed for record in rounds], [str(warning.message) for warning in said]

    ended = Child(work, messages.watch).end()
    if ended.raised:
        return Attempt(f"answer {messages.at}", 0, ended.raised)
    rounds, failed, said = ended.value
    left_out = sum(map(len, failed)) == 1 and any("it did not answer within 1 s" in text for text in said)
    unmeasured = not any(failed) and any("not measured" in text for text in said)
    fault = "" if rounds == 4 and (left_out or unmeasured) else f"{rounds} rounds, failed {failed}: {said}"
    return Attempt(f"answer {messages.at}", int(messages.reached()), fault)


def wake(pid: int, child: Child, seconds: float = 0.1) -> int:
    """Let processes that are stopped go on after a while; return how many there were."""
    continued = 0
    while child.process.is_alive():
        for process in (pid, *children(pid)):
            with suppress(FileNotFoundError, ProcessLookupError):
                if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                    time.sleep(seconds)
                    os.kill(process, signal.SIGCONT)
                    continued += 1
        time.sleep(0.005)
    return continued


# --- memory ---

LARGE = "--data digits --clients 4 --model mlp:4000 --epochs 1 --rounds 3 --set max_train=16 --set checkpoint_every=1"


def commanded(engine: str, folder: Path) -> Mapping[str, object]:
    """A run whose vectors take megabytes, by the command line."""
    studies.call("resume out" if runs.begun(folder / "out") else f"run pgfed {LARGE} {engine} --out out", folder)
    failed = any(record.failed or record.missing for record in ft.load(folder / "out").rounds)
    return {"a client failed": failed} if failed else runs.outcome(folder / "out")


def limit(more: int) -> None:
    """Let this process have so many bytes more than it has now."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.getrlimit(resource.RLIMIT_AS)[1]))


def memory_of_a_run(case: Case, rng: random.Random, folder: Path, expected: Whole) -> Attempt:
    stop, where = random_stop(rng, expected.operations)
    act = partial(limit, rng.choice((0, 2**20, 2**22, 2**23, 2**24)))
    return _in_little_memory(case, folder, expected, where, at_work(case, folder, Stop(stop.at, "before", act)))


def memory_of_a_worker(case: Case, rng: random.Random, folder: Path, expected: Whole) -> Attempt:
    messages = workers.Messages(rng.randrange(12), act=partial(limit, rng.choice((0, 2**18, 2**20, 2**22))))
    child = at_work(case, folder, first=messages.watch)
    return _in_little_memory(case, folder, expected, f"answer {messages.at}", child)


def _in_little_memory(case: Case, folder: Path, expected: Whole, where: str, child: Child) -> Attempt:
    """It is right to go on without a client, to end with a sentence, or with the abort of a library that knows no other
    end (safetensors is one)."""
    ended = child.end()
    if ended.code == -signal.SIGABRT:
        fault = ""
    elif ended.raised:
        fault = "" if studies.is_sentence(ended.raised) else ended.raised
    else:
        fault = "" if "a client failed" in ended.value else fault_of(ended, expected.value)
    after = at_work(case, folder).end()
    if not after.raised and "a client failed" not in after.value:
        fault = fault or fault_of(after, expected.value)
    return Attempt(where, 1, fault or after.raised)


# --- all of them ---

SMALL = Case("pgfed", partial(runs.alone, "pgfed", {"checkpoint_every": 1}))
OF_WORKERS = workers.CASES["scaffold"]
WAYS: dict[str, tuple[Case, Way]] = {
    "read-only from an operation on": (SMALL, read_only_from_an_operation),
    "a failing disk": (SMALL, failing_disk),
    "a read-only file system": (SMALL, read_only_file_system),
    "the parent of workers is stopped": (OF_WORKERS, parent_stopped),
    "a worker is stopped": (OF_WORKERS, worker_stopped),
    "a worker is stopped for good": (OF_WORKERS, stopped_for_good),
    "little memory for a run": (Case("large", partial(commanded, "--engine in-process")), memory_of_a_run),
    "little memory for a worker": (Case("large, workers", partial(commanded, "--workers 2")), memory_of_a_worker),
}


@cache
def expected(way: str) -> Whole:
    with TemporaryDirectory(dir=MEMORY) as folder:
        return whole(WAYS[way][0], Path(folder))


def attempt(rng: random.Random, folder: Path) -> Attempt:
    """Do one of these things to a run."""
    way = rng.choice(sorted(WAYS))
    case, do = WAYS[way]
    found = do(case, rng, folder, expected(way))
    found.what = f"{way}: {found.what}"
    return found
