"""How anything that strangers give is fuzzed: a right thing, and the same thing with harm done to it.

A target makes a thing and reads it: `target(luck, folder)`. `luck.right` draws which right thing it is, `luck.harm`
what is done to it. Each case is made twice with the same luck, first harmless. Only if the right thing is read, what
becomes of the harmed one says anything: it has to be refused in one sentence, or read. Else the case does not count, as
a reader that refuses everything would pass it.
"""

import os
import random
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtailor._common.errors import FedtailorError

LONG = 60  # seconds of one case
MUCH = 1.5e9  # bytes of memory that the process may grow by
LIMIT = "0.05"  # GB that data may take
NUMBERS = (0, 1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)

Files = dict[str, bytes]
Target = Callable[["Luck", Path], object]


class TooLong(BaseException):
    """A case took too long. Not an `Exception`: no reader may take it for a damaged file."""


class Luck:
    """Draws of a right thing and of the harm to it, which do not disturb each other."""

    def __init__(self, seed: int, name: str, number: int, harmless: bool = False) -> None:
        self.right = random.Random(f"{seed} {name} {number}")
        self.harm = random.Random(f"{seed} {name} {number} harm")
        self.harmless, self.harmed = harmless, False

    def chance(self, probability: float = 1.0) -> bool:
        """Draw if harm is done here."""
        happens = not self.harmless and self.harm.random() < probability
        self.harmed |= happens
        return happens

    def instead(self, right: Any, others: Sequence[Any], probability: float) -> Any:
        """The right value, or now and then another one."""
        return self.harm.choice(others) if self.chance(probability) else right


@dataclass
class Tally:
    """What became of the cases of a target."""

    refused: int = 0
    read: int = 0
    failed: int = 0
    not_counted: int = 0  # as the right thing was refused
    why: str = ""  # the last time
    failures: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return self.refused + self.read + self.failed

    def __str__(self) -> str:
        said = f"{self.cases} cases: {self.refused} refused, {self.read} read"
        said += f", {self.failed} failed" if self.failed else ""
        return said + (f"; {self.not_counted} not counted: {self.why}" if self.not_counted else "")


def fuzz(
    targets: Mapping[str, Target], seed: int, seconds: float, cases: int | None = None
) -> Iterator[tuple[str, Tally]]:
    """Try each target for its share of the time, or so many cases, and at least one. Yield what became of them."""
    for name, target in targets.items():
        tally, number, end = Tally(), 0, time.monotonic() + seconds / len(targets)
        while number == 0 or (time.monotonic() < end and number != cases):
            count(tally, target, seed, name, number)
            number += 1
        if not tally.cases:
            tally.failures.append(f"{name}: no case counts, {tally.why or 'as no harm was done'}")
        yield name, tally


def count(tally: Tally, target: Target, seed: int, name: str, number: int) -> None:
    """Try a case, and count it if the right thing is read and harm was done."""
    outcome, luck = tried(target, Luck(seed, name, number, harmless=True)), Luck(seed, name, number)
    if outcome.startswith("refused"):
        tally.not_counted += 1
        tally.why = outcome
        return
    if outcome == "read":
        outcome = tried(target, luck)
        if not luck.harmed:
            return
    if outcome.startswith("refused"):
        tally.refused += 1
    elif outcome == "read":
        tally.read += 1
    else:
        tally.failed += 1
        tally.failures.append(f"{name}, case {number} of seed {seed}: {outcome}")


def tried(target: Target, luck: Luck) -> str:
    """Make a thing and read it: `read`, `refused: SENTENCE`, or what went wrong."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak of memory so far
    before = _memory("VmRSS")
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), _bounded(), _alarm(luck):
            warnings.simplefilter("ignore")
            target(luck, Path(folder))
    except FedtailorError as error:
        said = str(error)
        if len(said) > 5_000 or "\n" in said:
            return f"a message of {len(said)} characters or several lines: {said[:200]!r}"
        outcome = f"refused: {said}"
    except (Exception, TooLong):
        return traceback.format_exc()
    else:
        outcome = "read"
    grown = _memory("VmHWM") - before
    return outcome if grown < MUCH else f"{grown / 1e9:.1f} GB of memory"


def _memory(kind: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at the most, VmSize reserved."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


@contextmanager
def _bounded() -> Iterator[None]:
    """Keep mutants from filling the machine's memory."""
    limits, before = resource.getrlimit(resource.RLIMIT_AS), os.environ.get("FEDTAILOR_DATA_LIMIT")
    os.environ["FEDTAILOR_DATA_LIMIT"] = LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + 6 * 10**9, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        os.environ.pop("FEDTAILOR_DATA_LIMIT")
        if before is not None:
            os.environ["FEDTAILOR_DATA_LIMIT"] = before


@contextmanager
def _alarm(luck: Luck) -> Iterator[None]:
    """Interrupt harm that takes too long; the right thing before it may have to import much."""

    def ring(*_: object) -> None:
        raise TooLong(f"more than {LONG} s")

    handler = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0 if luck.harmless else LONG)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


# --- harm to bytes ---


def mutated(luck: Luck, content: bytes, probability: float = 1.0) -> bytes:
    """Change a few places, now and then: bits, bytes, numbers, pieces cut out, doubled or put in."""
    if not luck.chance(probability):
        return content
    rng, changed = luck.harm, bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(8):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(changed):
                changed[at] = rng.randrange(256)
            case 2:
                size, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
                changed[at : at + size] = (rng.choice(NUMBERS) % 256**size).to_bytes(size, order)
            case 3:
                del changed[at : at + rng.choice((1, 4, 40, 400))]
            case 4:
                changed[at:at] = changed[at : at + rng.choice((1, 10, 1000))] * rng.choice((1, 2, 50))
            case 5:
                changed[at:at] = rng.randbytes(rng.choice((1, 3, 30)))
            case 6 if rng.random() < 0.2:
                del changed[at:]
            case 7:
                changed[at:at] = rng.choice(
                    (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b'"', b",", b"[", b"{", b"\x1b[")
                )
    return bytes(changed)


def mutate_one(luck: Luck, files: Files, probability: float = 1.0) -> Files:
    """Change one of the files, now and then."""
    name = luck.harm.choice(sorted(files))
    return {**files, name: mutated(luck, files[name], probability)}


def write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
