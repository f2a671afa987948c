"""Progress where the output is no terminal, and the switches --quiet and --verbose."""

import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedtailor._common.errors import ClientFailure, ClientNote
from fedtailor.cli import display, loudness
from tests.cli.calling import Answer, Call, done, interrupted_in, refusal

SMALL = ("--clients", 3, "--epochs", 1, "--model", "mlp:4", "--engine", "in-process")


Told = Callable[[], list[str]]


class Timed(display.Bars):
    """Bars by a clock that the test moves."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.get_time, self._last = lambda: self.now, self.now  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _switches() -> None:
    loudness.quiet = loudness.verbose = False


@pytest.fixture
def bars(capsys: pytest.CaptureFixture[str]) -> Timed:
    return Timed()


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """`told()`: the lines of stderr since it was called last; there is nothing on stdout."""

    def lines() -> list[str]:
        out, err = capsys.readouterr()
        assert out == ""
        return err.splitlines()

    return lines


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal of 120 columns."""
    stream = io.StringIO()
    console = display.SafeConsole(file=stream, force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(display, "out", console)
    return stream


class TestLines:
    def test_ten_lines_a_task_and_those_of_its_begin(self, bars: Timed, told: Told) -> None:
        task = bars.add_task("fedavg", total=100, status="", unit="round")
        for number in range(1, 101):
            bars.now = 3.5 * number
            bars.update(task, completed=number, status="accuracy 71.2 %  1.2 MB")
        found = told()
        assert found[:2] == [
            "fedavg: 100 rounds",
            "fedavg: round 10 of 100, accuracy 71.2 %, 1.2 MB, 35 s, about 5 min left",
        ]
        assert [int(re.findall(r"round (\d+)", line)[0]) for line in found[1:]] == list(range(10, 101, 10))
        assert found[-1] == "fedavg: round 100 of 100, accuracy 71.2 %, 1.2 MB, 6 min"

    @pytest.mark.parametrize(
        ("total", "done", "seconds", "said"),
        [(1000, 7, 25.0, [3, 6]), (20, 20, 0.1, [10, 20])],  # one a minute of long rounds; quick ones do not fill a log
    )
    def test_so_many_as_can_be_read(
        self, total: int, done: int, seconds: float, said: list[int], bars: Timed, told: Told
    ) -> None:
        task = bars.add_task("fedavg", total=total, status="", unit="round")
        for number in range(1, done + 1):
            bars.now = seconds * number
            bars.update(task, completed=number)
        found = [line.partition(",")[0] for line in told()[1:]]
        assert found == [f"fedavg: round {number} of {total}" for number in said]

    def test_a_run_that_goes_on_begins_where_it_was(self, bars: Timed, told: Told) -> None:
        task = bars.add_task("runs/one", total=None, status="setting up", unit="round")
        assert told() == []
        bars.update(task, total=20, completed=10, status="")
        bars.now = 10
        bars.update(task, completed=15)
        assert told() == ["runs/one: round 10 of 20", "runs/one: round 15 of 20, 10 s, about 10 s left"]

    def test_what_ends_early_has_a_last_line(self, bars: Timed, told: Told) -> None:
        stopped, removed, again = (bars.add_task(name, total=100, status="", unit="round") for name in "abc")
        for task in (stopped, removed, again):
            bars.update(task, completed=3)
        told()
        bars.reset(again, total=50, description="d", status="")
        bars.remove_task(removed)
        bars.stop()
        bars.stop()
        assert told() == ["c: round 3 of 100, 0 s", "d: 50 rounds", "b: round 3 of 100, 0 s", "a: round 3 of 100, 0 s"]

    def test_a_task_that_gets_another_name_begins_anew(self, bars: Timed, told: Told) -> None:
        task = bars.add_task("setting up", total=None, status="", unit="round")
        for name in ("fedavg", "ditto"):
            bars.update(task, description=name, completed=1, total=4)
        assert told() == ["fedavg: round 1 of 4", "ditto: round 1 of 4"]

    def test_names_of_strangers_do_not_steer_the_terminal(self, bars: Timed, told: Told) -> None:
        bars.add_task("\x1b[2J[bold]x", total=1, status="", unit="round")
        assert told() == ["\\x1b[2J[bold]x: 1 round"]

    def test_none_at_a_terminal_where_there_are_bars(self, terminal: io.StringIO, told: Told) -> None:
        with display.progress_bars() as bars:
            bars.update(bars.add_task("fedavg", total=1, status="", unit="round"), completed=1)
        assert told() == []
        assert "━" in terminal.getvalue()
        assert "fedavg: " not in terminal.getvalue()


def own_data(clients: int = 2) -> str:
    rng = np.random.default_rng(0)
    count = 20 * clients
    labels = np.arange(count) % 2
    np.savez("own.npz", x=rng.random((count, 4)).astype(np.float32), y=labels, client=np.arange(count) // 20)
    return "own.npz"


def begun(call: Call) -> None:
    """A run with a client that was held out, for the commands that go on with it."""
    done(call("run", "fedavg", *SMALL, "--rounds", 1, "--new-clients", 1, "--out", "run"))


COMMANDS: dict[str, tuple[tuple[object, ...], str]] = {
    "run": (("run", "fedavg", *SMALL, "--rounds", 2, "--out", "new"), r"fedavg: round 2 of 2, accuracy [\d.]+ %"),
    "resume": (("resume", "run", "--rounds", 3), r"run: round 3 of 3, accuracy"),
    "compare": (
        ("compare", "local", "fedavg", *SMALL, "--rounds", 2, "--seeds", 0, "--out", "new"),
        "all 2 runs: round 4 of 4",
    ),
    "tune": (
        ("tune", "fedavg", *SMALL, "--rounds", 2, "--trials", 2, "--validation", 0.2, "--out", "new"),
        "fedavg, trial 2 of 2: .*round 2 of 2, validation",
    ),
    "reproduce": (
        ("reproduce", "pflego/table1-fmnist-high", "--only", "fedper", "--rounds", 1, "--data", "digits", "--set",
         "split=merge", "--set", "test=0.2", "--set", "model=mlp:4", "--set", "clients=3", "--set", "partition=iid"),
        "fedper, 3 clients, seed 0: round 1 of 1",
    ),
    "advise": (("advise", *SMALL, "--budget", 1, "--method", "fedper"), "fedper: round 2 of 2"),
    "leak": (
        ("leak", "fedavg", "--data", "digits", "--clients", 3, "--model", "mlp:4", "--iterations", 5),
        "fedavg: iteration 5 of 5",
    ),
    "adapt": (("adapt", "run", "--epochs", 1, "--to", "new"), "adapting: client 1 of 1"),
    "export": (("export", "run", "--to", "new"), "exporting: model 2 of 2"),
}  # fmt: skip


def answered(call: Call, command: str, *more: object) -> Answer:
    if command in ("resume", "adapt", "export"):
        begun(call)
    answer = call(*COMMANDS[command][0], *more)
    assert answer.code == 0, answer
    assert re.sub(r"(Warning|Note): .*\n", "", answer.err) == ""
    return answer


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_takes_its_time_says_so_on_stderr(call: Call, command: str) -> None:
    answer = answered(call, command)
    expected = COMMANDS[command][1]
    assert any(re.search(expected, line) for line in answer.progress), answer.progress
    assert not re.search(expected, answer.out)


@pytest.mark.parametrize("command", COMMANDS)
def test_with_quiet_there_are_results_alone(call: Call, command: str) -> None:
    answer = answered(call, command, "--quiet")
    assert answer.progress == ()
    assert answer.setup == ""
    assert answer.out != ""
    assert "on this machine" not in answer.out  # what a reproduction will cost


class TestSwitches:
    def test_they_stand_before_the_command_or_behind_it(self, call: Call) -> None:
        words = ("run", "fedavg", *SMALL, "--rounds", 2)
        loud = call(*words)
        assert loud.setup
        assert loud.progress
        for quiet in (call("-q", *words), call("--quiet", *words), call(*words, "-q"), call(*words, "--quiet")):
            assert (quiet.code, quiet.setup, quiet.progress) == (0, "", ())
            assert re.sub(r"[\d.]+ s|digits-\d", "", quiet.out) == re.sub(r"[\d.]+ s|digits-\d", "", loud.out)
        assert call(*words).progress  # the next command is as loud as ever

    def test_they_exclude_each_other(self, call: Call) -> None:
        for words in (("-q", "-v", "run", "fedavg"), ("-q", "run", "fedavg", "-v"), ("run", "fedavg", "-q", "-v")):
            assert refusal(call, *words) == "--quiet and --verbose exclude each other: give one of them."

    def test_verbose_has_a_line_for_each_round_and_the_directory(self, call: Call) -> None:
        answer = call("run", "fedavg", *SMALL, "--rounds", 7, "--out", "here", "--verbose")
        rounds = [line for line in answer.progress if ": round " in line]
        assert [int(line.split()[2]) for line in rounds] == list(range(1, 8))
        assert all(re.search(r"accuracy [\d.]+ %, [\d.]+ kB, this round \d+\.\d\d s, ", line) for line in rounds)
        assert answer.err == "fedavg: recorded in here\n"

    def test_verbose_at_a_terminal_has_the_lines_above_the_bars(self, terminal: io.StringIO) -> None:
        loudness.verbose = True
        with display.progress_bars() as bars:
            task = bars.add_task("fedavg", total=2, status="", unit="round", lines="each")
            bars.update(task, completed=1, status="accuracy 50 %", took="this round 0.10 s")
        written = [line.strip() for line in terminal.getvalue().splitlines()]
        assert any(line.endswith("fedavg: round 1 of 2, accuracy 50 %, this round 0.10 s") for line in written)
        assert "this round" not in written[-1]  # the bar has no room for it

    def test_quiet_at_a_terminal_has_no_bars(self, terminal: io.StringIO) -> None:
        loudness.quiet = True
        with display.working("setting up"), display.progress_bars() as bars:
            bars.update(bars.add_task("fedavg", total=1, status="", unit="round"), completed=1)
            bars.say("a line")
        assert terminal.getvalue() == ""

    def test_warnings_stay_with_quiet_and_notes_do_not(self, told: Told) -> None:
        loudness.quiet = True
        with display.progress_bars():
            warnings.warn("it is back", ClientNote, stacklevel=1)
            warnings.warn("it is gone", ClientFailure, stacklevel=1)
        assert told() == ["Warning: it is gone"]

    def test_a_warning_is_said_once_and_with_verbose_where_it_comes_from(self, told: Told) -> None:
        for verbose, where in ((False, ""), (True, rf" \({Path(__file__).name}, line \d+\)")):
            loudness.verbose = verbose
            with display.progress_bars():
                for _ in range(3):
                    warnings.warn("it is gone", ClientFailure, stacklevel=1)
            (said,) = told()
            assert re.fullmatch(f"Warning: it is gone{where}", said)


def test_an_interrupt_leaves_a_line_of_where_it_was(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_in(monkeypatch, "fedavg", 4)
    monkeypatch.setattr(display, "PAUSE", 1000.0)
    answer = call("run", "fedavg", *SMALL, "--rounds", 30, "--out", "here")
    assert (answer.code, answer.err) == (130, "Interrupted. Continue with: fedtailor resume here\n")
    assert [line.partition(",")[0] for line in answer.progress] == ["fedavg: 30 rounds", "fedavg: round 3 of 30"]
