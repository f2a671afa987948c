"""A case or two of every target, and that fuzzing sees what goes wrong and counts what it should."""

import time
from contextlib import suppress
from mmap import mmap
from pathlib import Path

import pytest

from fedtailor import FedtailorError
from tests.fuzz import __main__ as command
from tests.fuzz import data_files, engine
from tests.fuzz.__main__ import TARGETS
from tests.fuzz.engine import Luck, Target, fuzz, tried


@pytest.mark.parametrize("name", TARGETS)
def test_what_strangers_give_is_read_or_refused_in_one_sentence(name: str) -> None:
    (found,) = fuzz({name: TARGETS[name]}, seed=0, seconds=0.5, cases=40)
    assert found[1].failures == []
    assert found[1].cases


@pytest.mark.parametrize("name", data_files.TARGETS)
def test_some_harm_is_refused_and_some_is_not(name: str) -> None:
    """Otherwise nothing behind the first check of a reader would be tried."""
    outcomes: set[str] = set()
    for number in range(200):
        outcomes.add(tried(TARGETS[name], Luck(7, name, number)).partition(":")[0])
        if outcomes >= {"read", "refused"}:
            break
    assert outcomes == {"read", "refused"}


def wrong(luck: Luck, folder: Path) -> None:
    if luck.chance():
        raise KeyError("oh")


def slow(luck: Luck, folder: Path) -> None:
    if luck.chance():
        with suppress(Exception):
            time.sleep(60)


def greedy(luck: Luck, folder: Path) -> None:
    if luck.chance():
        with mmap(-1, 300_000_000) as memory:  # never memory that this process has freed and kept
            for page in range(0, len(memory), 4096):
                memory[page] = 1


def wordy(luck: Luck, folder: Path) -> None:
    if luck.chance():
        raise FedtailorError("one\ntwo")


@pytest.mark.parametrize(
    ("target", "said"),
    [(wrong, "KeyError: 'oh'"), (slow, "TooLong: more than"), (greedy, "GB of memory"), (wordy, "several lines")],
)
def test_what_goes_wrong_is_a_failure(monkeypatch: pytest.MonkeyPatch, target: Target, said: str) -> None:
    monkeypatch.setattr(engine, "LONG", 0.2 if target is slow else 20)
    monkeypatch.setattr(engine, "MUCH", 1e8)
    ((_, found),) = fuzz({"mine": target}, seed=0, seconds=0)
    assert said in found.failures[0]
    assert (found.cases, found.refused, found.read) == (1, 0, 0)


def test_a_case_whose_right_thing_is_refused_does_not_count() -> None:
    def strict(luck: Luck, folder: Path) -> None:
        if luck.chance(0.9) or luck.right.random() < 0.5:
            raise FedtailorError("no")

    ((_, found),) = fuzz({"mine": strict}, seed=0, seconds=60, cases=100)
    assert 30 < found.not_counted < 70
    assert found.why == "refused: no"
    assert 20 < found.refused < 100 - found.not_counted  # harm was not always done
    assert found.read == 0


def test_a_target_of_which_no_case_counts_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuses(luck: Luck, folder: Path) -> None:
        raise FedtailorError("no")

    def careful(luck: Luck, folder: Path) -> None: ...

    monkeypatch.setattr(command, "TARGETS", {"one": refuses, "two": careful})
    monkeypatch.setattr("sys.argv", ["fuzz", "--seconds", "0"])
    assert command.main() == 1
    assert capfd.readouterr().out.splitlines() == [
        "one: 0 cases: 0 refused, 0 read; 1 not counted: refused: no",
        "one: no case counts, refused: no",
        "two: 0 cases: 0 refused, 0 read",
        "two: no case counts, as no harm was done",
        "2 targets, 0 cases, 2 failures",
    ]


@pytest.mark.parametrize("name", data_files.TARGETS)
def test_a_case_is_made_again(name: str) -> None:
    def outcome() -> str:
        return tried(TARGETS[name], Luck(3, name, 5)).partition(":")[0]

    assert outcome() == outcome()
