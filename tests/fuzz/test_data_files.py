"""A few seconds of fuzzing, and that it sees what goes wrong."""

import random
import time
from contextlib import suppress
from mmap import mmap
from pathlib import Path

import pytest

from tests.fuzz import data_files
from tests.fuzz.data_files import READERS, fuzz, replay


def test_files_and_settings_of_strangers_are_read_or_refused() -> None:
    found = fuzz(seed=0, seconds=6)
    assert found["failures"] == []
    assert all(counts["mutants"] >= 1 for counts in found["counts"].values())


@pytest.mark.parametrize("name", READERS)
def test_some_mutants_are_right_and_some_are_not(name: str) -> None:
    """Otherwise nothing behind the first check of a reader would be tried."""
    outcomes = set()
    for number in range(200):
        outcomes.add(replay(7, name, number))
        if outcomes >= {"read", "refused"}:
            break
    assert outcomes == {"read", "refused"}


def wrong(rng: random.Random, folder: Path) -> None:
    raise KeyError("oh")


def slow(rng: random.Random, folder: Path) -> None:
    with suppress(Exception):
        time.sleep(60)


def greedy(rng: random.Random, folder: Path) -> None:
    with mmap(-1, 300_000_000) as memory:  # never memory that this process has freed and kept
        for page in range(0, len(memory), 4096):
            memory[page] = 1


@pytest.mark.parametrize(
    ("reader", "said"), [(wrong, "KeyError: 'oh'"), (slow, "TooLong: more than"), (greedy, "GB of memory")]
)
def test_what_goes_wrong_is_a_failure(monkeypatch: pytest.MonkeyPatch, reader: object, said: str) -> None:
    monkeypatch.setattr(data_files, "LONG", 0.2 if reader is slow else 20)
    monkeypatch.setattr(data_files, "MUCH", 1e8)
    monkeypatch.setattr(data_files, "READERS", {"mine": reader})
    assert said in replay(0, "mine", 0)
    found = fuzz(seed=0, seconds=0.1)
    assert found["counts"]["mine"]["refused"] == 0


def test_a_mutant_is_made_again() -> None:
    for name in READERS:
        assert replay(3, name, 5) == replay(3, name, 5)
