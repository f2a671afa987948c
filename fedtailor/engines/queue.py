"""The order in which requests go to workers."""

from collections import deque
from collections.abc import Sequence


class Queue:
    """About the longest request first, so that no long one is left over for the end.

    Who adds up replies in the order of the requests holds those that come before their turn. So only `window` requests
    may be done ahead of the first unfinished one: half of them are the next ones, the longest of these first; the other
    half may be the longest of all.
    """

    def __init__(self, sizes: Sequence[int], window: int) -> None:
        self.waiting = list(range(len(sizes)))
        self._sizes, self._near = sizes, max(1, window // 2)
        self._far = window - self._near
        self._longest = deque(sorted(self.waiting, key=lambda number: (-sizes[number], number)))
        self._given: set[int] = set()
        self._finished: set[int] = set()
        self._ahead: set[int] = set()  # of those given, the ones beyond the next ones
        self._first = 0  # the first unfinished one

    def next(self) -> int | None:
        """Take the number of the next request; None if there is none, or none may go further ahead."""
        while self._first in self._finished:
            self._first += 1
        limit = self._first + self._near
        self._ahead = {number for number in self._ahead if number >= limit}
        while self._longest and self._longest[0] in self._given:
            self._longest.popleft()
        if self._longest and len(self._ahead) < self._far:
            number = self._longest[0]
        elif near := [number for number in self.waiting[: self._near] if number < limit]:
            number = max(near, key=lambda number: self._sizes[number])  # the first of equals
        else:
            return None
        self.waiting.remove(number)
        self._given.add(number)
        if number >= limit:
            self._ahead.add(number)
        return number

    def finish(self, number: int) -> None:
        """Note that a request was answered."""
        self._finished.add(number)

    def again(self, number: int) -> None:
        """Put a request back: its worker died."""
        self.waiting = sorted([number, *self.waiting])
        self._given.discard(number)
        self._ahead.discard(number)
        self._longest.appendleft(number)
