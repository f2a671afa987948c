"""Follow a round, and the start of a run, as data do: which functions are called, in which files and rooms.

    python -m benchmarks.walk                  the numbers: functions, files and changes of room
    python -m benchmarks.walk --print pgfed    and every function in the order of its first call

A room is a package or a module directly under `fedtailor/`. A change of room is a call that lands in another room than
the call before it. Comprehensions and lambdas belong to the function around them; the body of a class is no function.
A round is the second one of a run in process with one client and one local step; the start is `fedtailor run` with 20
clients, up to round 1. The command's modules are imported before: data do not pass through what an import calls (the
decorators that make a command's options, the hooks of pydantic).
"""

import argparse
import contextlib
import inspect
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fedtailor
import fedtailor.cli.run  # before a walk, with what the command imports when it is called
import fedtailor.engines.runs
from fedtailor.cli import main
from fedtailor.server.loop import Loop

PACKAGE = os.path.dirname(fedtailor.__file__) + os.sep
ROUND = {"data": "digits", "clients": 1, "rounds": 2, "steps": 1, "engine": "in-process"}
START = ["run", "fedavg", "--data", "digits", "--clients", "20", "--rounds", "1", "--engine", "in-process"]


@dataclass
class Walk:
    """The package's own functions in the order of their calls."""

    calls: list[CodeType] = field(default_factory=list)

    def during(self, work: Callable[[], Any]) -> Any:
        """Do some work, and note every call in it."""

        def note(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            own = code.co_filename.startswith(PACKAGE) and code.co_flags & inspect.CO_OPTIMIZED  # not a class's body
            if event == "call" and own and not code.co_name.startswith("<"):
                self.calls.append(code)

        sys.setprofile(note)
        try:
            return work()
        finally:
            sys.setprofile(None)

    @property
    def functions(self) -> list[CodeType]:
        """Every function once, in the order of first calls."""
        return list(dict.fromkeys(self.calls))

    def numbers(self) -> tuple[int, int, int]:
        """Count functions, files, and changes of room."""
        rooms = [room(code) for code in self.calls]
        files = {code.co_filename for code in self.calls}
        return len(self.functions), len(files), sum(one != other for one, other in pairwise(rooms))


def room(code: CodeType) -> str:
    """Name the room of a function."""
    return code.co_filename.removeprefix(PACKAGE).split(os.sep)[0].removesuffix(".py")


def of_a_round(method: str) -> Walk:
    """Follow the second round of a method."""
    walk, plain = Walk(), Loop.round

    def followed(loop: Loop, number: int, *rest: Any) -> Any:
        return walk.during(partial(plain, loop, number, *rest)) if number == 2 else plain(loop, number, *rest)

    Loop.round = followed  # type: ignore[assignment,method-assign]
    try:
        fedtailor.run(method, **ROUND)  # type: ignore[arg-type]
    finally:
        Loop.round = plain  # type: ignore[method-assign]
    return walk


class _RoundOne(BaseException):
    """The first round begins: the start is over."""


def of_the_start() -> Walk:
    """Follow `fedtailor run` up to its first round."""
    walk, plain, argv = Walk(), Loop.round, sys.argv

    def reached(*_: Any) -> Any:
        sys.setprofile(None)
        raise _RoundOne

    Loop.round = reached  # type: ignore[assignment,method-assign]
    try:
        with tempfile.TemporaryDirectory() as out, contextlib.suppress(_RoundOne):
            sys.argv = ["fedtailor", *START, "--quiet", "--out", str(Path(out) / "run")]
            walk.during(main)
    finally:
        sys.argv = argv
        Loop.round = plain  # type: ignore[method-assign]
    return walk


def _print(walk: Walk) -> None:
    before = ""
    for code in walk.functions:
        here = code.co_filename.removeprefix(PACKAGE)
        print(f"{here if here != before else '':32} {code.co_qualname}")
        before = here


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", default="", metavar="WHAT", help="a method's name, or start")
    asked = parser.parse_args()
    if asked.print:
        _print(of_the_start() if asked.print == "start" else of_a_round(asked.print))
    else:
        for title, walk in [
            *((f"one {m} round", of_a_round(m)) for m in ("pgfed", "fedavg")),
            ("start", of_the_start()),
        ]:
            functions, files, changes = walk.numbers()
            print(f"{title:18} {functions:4} functions {files:4} files {changes:4} changes of room")
