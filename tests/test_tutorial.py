"""The tutorial, gone through as a reader would: its commands in their order, and what it shows of their answers."""

import re
from pathlib import Path

import pytest

from examples.hospitals.make_data import make
from fedtailor.cli import display
from tests.cli.calling import Call, call, done
from tests.doc_pages import ROOT, Piece, commands, pieces

__all__ = ["call"]

PAGE = (ROOT / "docs" / "tutorial.md").read_text("utf-8")


def in_order() -> list[Piece]:
    """The blocks of the page that are commands or answers."""
    found = [piece for piece in pieces(PAGE) if piece.language in ("", "console", "text")]
    assert {piece.language for piece in found} == {"", "console", "text"}
    return found


def lines(text: str) -> list[str]:
    """The lines of an answer without their numbers, which have other last bits on other processors, and without the
    lengths of rulers: a time may have a digit more."""
    masked = (re.sub(r"\s+", " ", re.sub(r"\d[\d.,]*", "0", line)).strip() for line in text.splitlines())
    masked = (re.sub("─+", "─", line) for line in masked)
    return [line for line in masked if line]


@pytest.mark.slow
def test_what_the_tutorial_shows_is_what_its_commands_answer(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(display.out, "width", 80)
    answer = ""
    for piece in in_order():
        if piece.language == "text":
            said = iter(lines(answer))
            for line in lines(piece.code):
                assert line == "…" or line in said, f"docs/tutorial.md, the block in line {piece.line}: {line}"
            continue
        answer = ""
        if "make_data.py tables" in piece.code:
            make(Path("tables"))
            answer = Path("tables/all.csv").read_text("utf-8")
        for _, words in commands(f"```\n{piece.code}```"):
            answer += done(call(*words))
    assert {"digits.html", "hill.csv", "models"} <= {path.name for path in tmp_path.iterdir()}


def test_an_answer_that_is_not_given_is_seen() -> None:
    said = iter(lines(" ditto  97.65\n\n local  95.1\n"))
    assert [line in said for line in lines("ditto 98.00\nlocal 1\nditto 98")] == [True, True, False]
