"""A group of clients that train as one computation (`--stack`): each is a coroutine, which waits where its network
computes until the others have come as far.

So a method stays a plain function of one client. Each client of a group has a place of its own, with a network whose
vector is a row of the group's stack.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from greenlet import getcurrent, greenlet

from fedtailor._common.errors import warn
from fedtailor.client.terms import Terms
from fedtailor.messages import Reply, Request, State, Together, copied, joined, parted
from fedtailor.training.stack import Answer, Call, Stack, alone

MOST = 1 << 30
SORTED = 4  # groups whose clients are sorted by their samples: those of a group then take about as many steps
OutOfMemory = torch.cuda.OutOfMemoryError
T = TypeVar("T")


class Worker(Protocol):
    """A place where one client's work is done."""

    def work(self, request: Request, state: State) -> tuple[Reply, State]: ...


@dataclass
class Group:
    """The places of the clients that train as one computation. `size` counts the samples of a request, and `make` makes
    a place with terms of its own."""

    terms: Terms
    size: Callable[[Request], int]
    make: Callable[[Terms], Worker]
    largest: int = field(default=MOST, init=False)  # after the device's memory did not suffice for more
    _places: list[Worker] = field(default_factory=list, init=False)
    _stack: Stack | None = field(default=None, init=False)

    def _make(self, size: int) -> None:
        """Make places for so many clients, each with terms that have its own network."""
        self._stack = Stack(self.terms.network, size)
        self._places = [self.make(replace(self.terms, network=network, stack=1)) for network in self._stack.networks]

    def together(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Join requests to groups. Which ones depends on the requests alone, and not on who does them."""
        stack = self.terms.stack
        for start in range(0, len(requests), SORTED * stack):
            near = sorted(requests[start : start + SORTED * stack], key=self.size, reverse=True)
            for first in range(0, len(near), stack):
                group = near[first : first + stack]
                yield group[0] if len(group) == 1 else Together.of(group)

    def work(self, request: Together, state: State) -> tuple[Reply, State]:
        """Do the work of a group. The reply's parts are those of its clients, in the order of the request."""
        messages, states = parted(request.message, request.clients), parted(state, request.clients)
        done: list[tuple[Reply, State]] = []
        while len(done) < len(request.parts):
            now = request.parts[len(done) : len(done) + self.largest]
            works = [(replace(part, message=messages[part.client]), states[part.client]) for part in now]
            try:  # with copies: another try begins with what there was
                done += self._done([(replace(own, message=copied(own.message)), copied(state)) for own, state in works])
            except OutOfMemory:
                if len(now) == 1:
                    raise
                self.largest, self._places, self._stack = -(-len(now) // 2), [], None
                warn(
                    f"The device's memory does not suffice for {len(now)} clients at once: from here on, at most "
                    f"{self.largest} train as one computation; --stack {self.largest} does so from the start."
                )
            except Exception:  # a client's own loss or network, of any kind: alone, it is found out whose
                done += [self._places[0].work(*work) for work in works]
        replies = [reply for reply, _ in done]
        uploads = {reply.clients[0]: reply.upload for reply in replies}
        for reply in replies:
            reply.upload = {}
        whole = Reply(request.clients, joined(uploads), parts=replies)
        return whole, joined({reply.clients[0]: after for reply, after in done})

    def _done(self, works: Sequence[tuple[Request, State]]) -> list[tuple[Reply, State]]:
        """Do the work of several clients at once."""
        if self._stack is None or len(works) > len(self._places):
            self._make(len(works))
        assert self._stack is not None
        at_work = zip(self._places, works, strict=False)
        done = run_together(self._stack, [partial(place.work, *work) for place, work in at_work])
        for reply, _ in done:
            if isinstance(reply.cause, OutOfMemory) and len(done) > 1:  # alone it is the client's failure
                raise reply.cause
            reply.seconds /= len(done)
        return done


def parts_of(request: Together, reply: Reply) -> list[Reply]:
    """Return the replies of a group's clients, with their uploads; the same failure for all if the group failed."""
    if reply.error:
        return [Reply((client,), error=reply.error, cause=reply.cause) for client in request.clients]
    for part, upload in zip(reply.parts, parted(reply.upload, request.clients).values(), strict=True):
        part.upload = upload
    return reply.parts


def run_together(stack: Stack, works: Sequence[Callable[[], T]]) -> list[T]:
    """Do several clients' work at the same time, and return what comes of each. An exception ends all of them.

    What is the thread's is changed over with the client: PyTorch's random state, and whether it records gradients.
    """
    scheduler, grad = getcurrent(), torch.is_grad_enabled()
    tasks = [greenlet(work) for work in works]
    results: dict[int, T] = {}
    calls: dict[int, Call] = {}

    def wait(call: Call) -> Answer:
        if getcurrent() is scheduler:  # in a function of the client's that a computation calls
            return None
        before = torch.is_grad_enabled(), torch.default_generator.get_state()
        answer = scheduler.switch(call)
        torch.set_grad_enabled(before[0])
        torch.default_generator.set_state(before[1])
        return answer

    def go_on(number: int, *answer: Answer) -> None:
        found = tasks[number].switch(*answer)
        torch.set_grad_enabled(grad)
        if tasks[number].dead:
            results[number] = found
        else:
            calls[number] = found

    stack.wait = wait
    try:
        for number in range(len(tasks)):
            go_on(number)
        while calls:
            asked = dict(calls)
            calls.clear()
            for number, answer in zip(asked, stack.compute(list(asked.values())), strict=True):
                go_on(number, answer)
    finally:
        for task in tasks:
            task.throw()  # nothing, for those that are done
        stack.wait = alone
        torch.set_grad_enabled(grad)
    return [results[number] for number in range(len(tasks))]
