"""Which request goes to a worker when, and that every one is answered once whatever happens to the workers."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.engines.processes import Processes, Worker
from fedtailor.engines.queue import Queue
from fedtailor.engines.transports import make_transport
from fedtailor.engines.workers import ATTEMPTS, WINDOW
from fedtailor.messages import Reply, Request, Train
from tests.engines.place import Pretended, within


def requests(count: int) -> list[Request]:
    return [Train(1, client, {"x": torch.tensor([float(client)])}) for client in range(count)]


def check(replies: list[Reply], count: int) -> None:
    """Every request was answered once, by the right client with the right state."""
    assert sorted(reply.clients[0] for reply in replies) == list(range(count))
    for reply in replies:
        assert reply.error == ""
        assert reply.upload["twice"].tolist() == [2.0 * reply.clients[0]]
        assert reply.upload["state"] == reply.clients[0]


@contextmanager
def processes(place: Pretended, workers: int) -> Iterator[Processes]:
    with within(60), closing(Processes(place, workers)) as transport:
        yield transport


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 7, 50])
def test_every_request_is_answered_once(workers: int, count: int) -> None:
    place = Pretended([1 + client % 5 for client in range(count)])
    with processes(place, workers) as transport:
        for _ in range(2):  # and the same workers do the next round
            check(list(transport.ask(requests(count))), count)
    begun, done = (Counter(client for what, client in place.events if what == kind) for kind in ("begin", "finish"))
    assert begun == done == Counter(dict.fromkeys(range(count), 2))
    in_order = Pretended(place.sizes)
    check(list(in_order.ask(requests(count))), count)
    assert [client for what, client in in_order.events if what == "begin"] == list(range(count))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_longest_goes_first_but_not_too_far_ahead(workers: int, seed: int) -> None:
    """As the queue says, with a window for each worker: no more than that is finished before its turn."""
    count, window = 60, WINDOW * workers
    sizes = np.random.default_rng(seed).integers(1, 9, count).tolist()
    place = Pretended(sizes)
    with processes(place, workers) as transport:
        check(list(transport.ask(requests(count))), count)
    queue, finished = Queue(sizes, window), set[int]()
    for what, client in place.events:
        if what == "begin":
            assert client == queue.next()
        else:
            queue.finish(client)
            finished.add(client)
            first = min(set(range(count)) - finished, default=count)
            assert sum(other > first for other in finished) < window
    assert place.events[0] == ("begin", sizes.index(max(sizes)))
    assert finished == set(range(count))


def test_nobody_goes_too_far_ahead_of_a_slow_client() -> None:
    place = Pretended([1] * 40, during=lambda client: time.sleep(0.5) if client == 3 else None)
    with processes(place, 2) as transport:
        replies = list(transport.ask(requests(40)))
    check(replies, 40)
    order = [reply.clients[0] for reply in replies]
    assert sorted(order[: order.index(3)]) == [number for number in range(3 + 2 * WINDOW) if number != 3]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("times", [1, ATTEMPTS - 1])
def test_a_dying_workers_request_is_repeated(workers: int, times: int, tmp_path: Path) -> None:
    place = Pretended([1] * 12, dying={4: times, 5: 1}, marks=tmp_path)
    with processes(place, workers) as transport:
        check(list(transport.ask(requests(12))), 12)
        assert len(transport._all) == workers
    begun = Counter(client for what, client in place.events if what == "begin")
    assert begun == {**dict.fromkeys(range(12), 1), 4: 1 + times, 5: 2}
    finished = [client for what, client in place.events if what == "finish"]
    assert sorted(finished) == list(range(12))


def test_a_request_that_kills_every_worker_fails_alone(tmp_path: Path) -> None:
    place = Pretended([1] * 6, dying={4: 99}, marks=tmp_path)
    with processes(place, 2) as transport:
        replies = list(transport.ask(requests(6)))
        lost = next(reply for reply in replies if reply.clients == (4,))
        assert lost.error == f"its worker process died {ATTEMPTS} times over its work"
        assert lost.upload == {}
        assert sorted(reply.clients[0] for reply in replies if not reply.error) == [0, 1, 2, 3, 5]
        assert [client for what, client in place.events if what == "begin"].count(4) == ATTEMPTS
        assert len(transport._all) == 2


def test_workers_that_die_while_they_are_idle_are_replaced() -> None:
    place = Pretended([1] * 10)
    with processes(place, 2) as transport:
        check(list(transport.ask(requests(10))), 10)
        for worker in transport._all:
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.join()
        check(list(transport.ask(requests(10))), 10)
        assert all(worker.process.is_alive() for worker in transport._all)


@pytest.mark.parametrize("workers", [1, 2])
def test_after_a_refusal_all_workers_are_there(workers: int) -> None:
    place = Pretended([1] * 10, refused={5})
    with processes(place, workers) as transport:
        for _ in range(workers + 1):
            with pytest.raises(ft.FedtailorError, match="The state is not here"):
                list(transport.ask(requests(10)))
        place.refused = set()
        check(list(transport.ask(requests(10))), 10)
        assert len(transport._all) == len(transport._idle) == workers


@pytest.mark.parametrize("workers", [1, 2])
def test_after_an_interruption_all_workers_are_there(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come at any time, for instance while a reply is read."""

    def interrupted(worker: Worker) -> None:
        raise KeyboardInterrupt

    place = Pretended([1] * 10)
    with processes(place, workers) as transport:
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "finish", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(transport.ask(requests(10)))
        check(list(transport.ask(requests(10))), 10)
        assert len(transport._idle) == workers


def test_who_stops_listening_gets_no_old_reply_later() -> None:
    place = Pretended([1] * 10, during=lambda client: time.sleep(0.02))
    with processes(place, 2) as transport:
        with closing(transport.ask(requests(10))) as replies:  # type: ignore[type-var]
            next(replies)
        place.events.clear()
        check(list(transport.ask(requests(10))), 10)
        assert len(transport._all) == 2


def test_the_transport_of_a_name() -> None:
    place = Pretended([1] * 3)
    assert make_transport("in-process", place, None, on_cpu=True) is place
    assert make_transport("auto", place, 1, on_cpu=True) is place
    with closing(make_transport("auto", place, 1, on_cpu=True, deadline=1.0)) as transport:
        assert isinstance(transport, Processes)  # only another process can be stopped
    assert make_transport("auto", place, 3, on_cpu=False) is place
    with closing(make_transport("auto", place, 3, on_cpu=True)) as transport:
        assert isinstance(transport, Processes)
        assert transport.workers == 3
    with closing(make_transport("processes", place, 1, on_cpu=True)) as transport:
        assert isinstance(transport, Processes)
    with pytest.raises(ft.FedtailorError, match="Worker processes need Linux and the CPU"):
        make_transport("processes", place, 1, on_cpu=False)


def test_what_needs_no_worker_goes_straight_to_the_sites() -> None:
    place = Pretended([4, 5])
    with processes(place, 1) as transport:
        assert [declaration.n_samples for declaration in transport.declare()] == [4, 5]
        transport.accept([1])
    assert place.events == [("accept", 1)]


def test_an_idle_workers_death_is_no_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if a process that it forked holds its pipe, so that writing to it gives no error."""
    monkeypatch.setattr("fedtailor.engines.workers.ATTEMPTS", 1)
    place = Pretended([1] * 4, during=lambda client: hold_the_pipe())
    with processes(place, 1) as transport:
        for _ in range(2):
            check(list(transport.ask(requests(4))), 4)
            os.kill(transport._all[0].process.pid, signal.SIGKILL)
            transport._all[0].process.join()


def hold_the_pipe() -> None:
    if os.fork() == 0:
        time.sleep(5)
        os._exit(0)
