"""The order in which requests go to workers: the longest first, and few replies that have to wait for their turn."""

import numpy as np
import pytest

from fedtailor.engines.queue import Queue


def drain(queue: Queue) -> list[int]:
    """All that may be given before anything is finished."""
    given = []
    while (number := queue.next()) is not None:
        given.append(number)
    return given


def test_the_longest_of_all_goes_first() -> None:
    sizes = [1, 5, 2, 9, 9, 3, 7]
    queue = Queue(sizes, 100)
    assert drain(queue) == [3, 4, 6, 1, 5, 2, 0]
    assert queue.waiting == []
    assert queue.next() is None


def test_equal_requests_go_in_their_order() -> None:
    assert drain(Queue([4] * 9, 100)) == list(range(9))


def test_half_of_the_window_is_for_the_longest_the_other_half_for_the_next() -> None:
    """A window of 8 and nothing finished: the four longest of all, then the first four, the longest of these first; and
    then nobody until the first one is done."""
    sizes = [1, 2, 3, 2, *[5] * 10, 9, 8, 7]
    queue = Queue(sizes, 8)
    assert drain(queue) == [14, 15, 16, 4, 2, 1, 3, 0]
    queue.finish(14)
    queue.finish(2)
    assert drain(queue) == []
    queue.finish(0)  # the next unfinished one is 1: up to 4 are the next ones now, and 4 is there already
    assert drain(queue) == [5]
    for number in (1, 3, 4):
        queue.finish(number)
    assert drain(queue) == [6, 7, 8, 9]  # 5 to 8 are the next ones, 9, 14, 15 and 16 ahead of them


def test_a_window_of_one_is_the_order_of_the_requests() -> None:
    queue = Queue([1, 9, 5], 1)
    for number in range(3):
        assert drain(queue) == [number]
        queue.finish(number)


def test_what_comes_back_goes_out_again_first() -> None:
    queue = Queue([3, 1, 2, 9], 100)
    assert [queue.next(), queue.next()] == [3, 0]
    queue.again(0)
    assert queue.waiting == [0, 1, 2]
    assert drain(queue) == [0, 2, 1]


@pytest.mark.parametrize("window", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_all_are_done_once_and_few_wait(window: int, workers: int, seed: int) -> None:
    """Workers that finish in any order, and die now and then. At no time more than `window` - 1 replies wait for the
    first unfinished request, and whenever all workers are idle there is something to do."""
    random = np.random.default_rng(seed)
    count = 80
    queue = Queue(random.integers(1, 20, count).tolist(), window)
    busy: list[int] = []
    finished: set[int] = set()
    while len(finished) < count:
        while len(busy) < workers and (number := queue.next()) is not None:
            assert number not in finished
            assert number not in busy
            busy.append(number)
        assert busy
        number = busy.pop(int(random.integers(len(busy))))
        if random.random() < 0.1:
            queue.again(number)
            continue
        queue.finish(number)
        finished.add(number)
        first = min(set(range(count)) - finished, default=count)
        assert sum(other > first for other in finished) <= window - 1
    assert queue.next() is None
    assert queue.waiting == []


def test_the_longest_is_not_left_over_for_the_end() -> None:
    """Two workers, one request of 100 samples among many of 1: it does not begin when all others are done."""
    sizes = [1] * 100 + [100]
    queue = Queue(sizes, 16)
    assert queue.next() == 100


def test_nothing_to_do() -> None:
    queue = Queue([], 8)
    assert queue.next() is None
    assert queue.waiting == []
