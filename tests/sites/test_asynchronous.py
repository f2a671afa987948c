"""Asynchronous rounds at real sites: a slow one holds nobody up, and a buffer of all replies is the synchronous run."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor.engines.channel import InMemory
from fedtailor.messages.letters import read_letter
from fedtailor.server.records import RoundRecord
from tests.helpers import numbers
from tests.sites.parts import Federation, close_metrics, same_server

WAIT = 60.0


class Slow(InMemory):
    """Sites of which one does not answer a round's training until it is let go."""

    def __init__(self, sites: Mapping[str, Any], slow: str, round: int) -> None:
        super().__init__(sites)
        self._slow, self._round, self.go = slow, round, threading.Event()
        self._alone = threading.Lock()  # what is a process's (random numbers) belongs to one site at a time

    def ask(self, letters: Mapping[str, bytes], deadline: float | None) -> Iterator[tuple[str, bytes | str]]:
        for name, letter in letters.items():
            header = read_letter(letter).header
            if name == self._slow and header.get("asked") == "train" and header["round"] == self._round:
                assert self.go.wait(WAIT), "nobody let the slow site go"
            with self._alone:
                answer = self._sites[name].answer(letter)
            yield name, answer


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_the_others_go_on_without_a_slow_site(method: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, method=method, rounds=8, late="buffer=2")
    channel = Slow(federation.sites(), "west", round=1)

    def let_go(record: RoundRecord) -> None:
        if record.round == 5:
            channel.go.set()

    result = federation.run(channel, on_round=let_go)
    first = [record for record in result.rounds if record.round <= 5]
    assert [record.participants for record in first] == [[0, 1, 2], *[[0, 1]] * 4]
    assert all(record.missing == [2] and record.evaluated == 2 for record in first)  # it was never measured
    assert all(record.failed == [] and record.clock is None for record in result.rounds)
    came = next(record for record in result.rounds if 2 in record.stale)
    assert came.stale == {2: came.round - 1}
    assert [record.missing for record in result.rounds if record.round >= came.round] == [[]] * (9 - came.round)


def test_a_buffer_of_all_is_the_synchronous_run(tmp_path: Path) -> None:
    one = Federation(tmp_path / "one", method="fedper", late="buffer=3").run()
    other = Federation(tmp_path / "other", method="fedper").run()
    assert same_server(one.simulation, other.simulation)
    assert close_metrics(one, other, 0.0)
    assert numbers(one.rounds) == numbers(other.rounds)


def test_a_server_that_stops_goes_on(tmp_path: Path) -> None:
    """The training that was under way is asked for once more, with what the site was sent then."""
    federation = Federation(tmp_path, method="fedavg", rounds=6, late="buffer=2")
    channel = Slow(federation.sites(), "west", round=1)

    def stop(record: RoundRecord) -> None:
        if record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federation.run(channel, on_round=stop)
    channel.go.set()
    sites = Slow(federation.sites(), "west", round=1)
    sites.go.set()
    resumed = federation.run(sites)
    assert [record.round for record in resumed.rounds] == [1, 2, 3, 4, 5, 6]
    came = next(record for record in resumed.rounds if 2 in record.stale)
    assert came.round > 3
    assert came.stale[2] == came.round - 1


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        ({"system": "speeds=1"}, "sets 'system', which is for simulations alone"),
        ({"late": "first=2"}, "At real sites, late is a buffer; how long a round waits is the plan's deadline"),
        ({"late": "deadline=5"}, "At real sites, late is a buffer"),
        ({"late": "buffer=4"}, "A buffer of 4 replies is never full: 3 clients are at work"),
        ({"late": "buffer=2", "method": "pgfed"}, "PGFed needs every client's own"),
    ],
)
def test_what_cannot_be_at_sites_is_refused(experiment: dict[str, Any], words: str, tmp_path: Path) -> None:
    method = experiment.pop("method", "fedavg")
    federation = Federation(tmp_path, method=method, **experiment)
    with pytest.raises(ft.FedtailorError, match=words):
        federation.run()
