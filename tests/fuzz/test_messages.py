"""A few seconds of hostile replies; `make fuzz` does more."""

from tests.fuzz.messages import fuzz


def test_hostile_replies_and_frames_give_sentences() -> None:
    found = fuzz(seed=1, seconds=5)
    assert found["failures"] == []
    assert found["counts"]["rounds"] > 3
