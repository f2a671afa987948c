"""The Markdown of the documentation, as its tests read it: blocks of code in their order, and commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PIECE = re.compile(
    r"<!-- not run: (?P<reason>[^\n]+) -->|<!-- setup\n(?P<setup>.*?)-->|"
    r"^```(?P<language>[a-z]*)\n(?P<block>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Piece:
    """A block of code, and the line of the page that it begins in."""

    language: str
    code: str
    line: int


def pieces(text: str) -> Iterator[Piece]:
    """All blocks of a page that are meant to run, and what is set up for them."""
    left_out = False
    for found in PIECE.finditer(text):
        line = text[: found.start()].count("\n") + 2
        if found["reason"]:
            left_out = True
        elif found["setup"]:
            yield Piece("python", found["setup"], line)
        else:
            if not left_out:
                yield Piece(found["language"], found["block"], line)
            left_out = False


def commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """The words of every `fedtailor …` line of a page's blocks of commands, without the comment behind it."""
    for piece in pieces(text):
        for number, line in enumerate(piece.code.splitlines()) if piece.language in ("", "console") else ():
            if line.startswith("fedtailor "):
                yield piece.line + number, shlex.split(line, comments=True)[1:]
