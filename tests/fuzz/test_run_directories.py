"""A few seconds of mutated run directories; `make fuzz` does more."""

from tests.fuzz.run_directories import fuzz


def test_mutated_run_directories_are_read_or_refused_in_one_sentence() -> None:
    found = fuzz(seed=0, seconds=4)
    counts = found["counts"]
    assert found["failures"] == []
    assert counts["mutants"] > 3
    assert counts["refused"] > 0
    assert counts["read"] > 0
