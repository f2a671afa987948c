"""Calling the command line inside the test's process: importing PyTorch anew for every command takes seconds."""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fedtailor.cli import display, main
from fedtailor.messages.transport import Transport
from fedtailor.server.loop import Loop
from fedtailor.server.records import RoundRecord

# A line of progress, as commands write it to stderr where there is no terminal.
PROGRESS = re.compile(r"^(?!\w+: .*[.?]$).+: (?:(?:\w+ )?\d+ of \d+(?:, .+)?|\d+ \w+)\n", re.MULTILINE)
# Characters that a terminal would obey.
HOSTILE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Answer:
    """What a command left behind: its exit code, what it wrote where, what it said of the setup of a run first, and its
    lines of progress."""

    code: int
    out: str
    err: str
    setup: str = field(default="", compare=False)
    progress: tuple[str, ...] = field(default=(), compare=False)


Call = Callable[..., Answer]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """`call("run", "fedavg")` in an empty directory, not at a terminal, on a page of 200 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(display.out, "width", 200)  # it was made when the module was imported
    monkeypatch.setenv("FEDTAILOR_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    modules, handler = set(sys.modules), signal.getsignal(signal.SIGTERM)

    def called(*words: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["fedtailor", *map(str, words)])
        capsys.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as exit:
            code = exit.code
        assert code is None or isinstance(code, int)
        out, err = capsys.readouterr()
        setup = re.match(
            r"(Network .+; head .+\.\n((The|These|Weights:|LoRA:) .+\.\n)*)?(.+: a client uploads .+\.\n)*", out
        )
        assert setup is not None
        progress = tuple(line.rstrip("\n") for line in PROGRESS.findall(err))
        return Answer(code or 0, out[setup.end() :], PROGRESS.sub("", err), setup[0], progress)

    yield called
    signal.signal(signal.SIGTERM, handler)
    for name in set(sys.modules) - modules:  # the user's own modules, made by a test
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def done(answer: Answer) -> str:
    """What a command that went well and had nothing to complain about wrote."""
    assert (answer.code, answer.err) == (0, "")
    return answer.out


def contents(directory: Path) -> dict[str, bytes | None]:
    """Everything below a directory: the content of files, None for directories. Python's own caches do not count."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
        if "__pycache__" not in path.parts
    }


def refusal(call: Call, *words: object) -> str:
    """The one sentence with which a command refuses, after checks that hold for every refusal."""
    before = contents(Path.cwd())
    answer = call(*words)
    assert answer.code == 2, answer
    assert answer.out == ""
    assert contents(Path.cwd()) == before
    lines = answer.err.splitlines()
    assert len(lines) == 1, answer.err
    assert lines[0].startswith("Error: ")
    sentence = lines[0].removeprefix("Error: ")
    assert sentence[-1] in ".?", sentence
    assert not re.search(r"[.?!] [A-Z]", sentence), f"more than one sentence: {sentence}"
    return sentence


def usage_error(call: Call, *words: object) -> str:
    """What is said of a command line that cannot be read at all, without the frame around it."""
    before = contents(Path.cwd())
    answer = call(*words)
    assert answer.code == 2, answer
    assert answer.out == ""
    assert contents(Path.cwd()) == before
    assert "Traceback" not in answer.err
    said = [line.strip("│ ") for line in answer.err.splitlines() if line.startswith("│")]
    assert len(said) == 1, answer.err
    return said[0]


def interrupted_in(monkeypatch: pytest.MonkeyPatch, method: str, round: int) -> None:
    """Ctrl-C in this round of a method's run."""
    whole_round = Loop.round

    def stopped(loop: Loop, number: int, transport: Transport) -> RoundRecord:
        if loop.experiment.method == method and number == round:
            raise KeyboardInterrupt
        return whole_round(loop, number, transport)

    monkeypatch.setattr(Loop, "round", stopped)
