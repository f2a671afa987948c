"""The part that all transports with workers have in common: who gets which request, deaths, deadlines.

Workers compute and keep nothing, so any of them can serve any client. One that dies is replaced and its work is done
again. One that misses the deadline is ended, and its client has failed.
"""

import pickle
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from typing import Generic, Protocol, TypeVar

from fedtailor.engines.queue import Queue
from fedtailor.messages import Reply, Request, State
from fedtailor.messages.transport import Place, Relay

ATTEMPTS = 3  # how often a client's work is begun again after its worker died
PATIENCE = 0.5  # seconds after which one looks whether workers that say nothing are alive
WINDOW = 8  # requests for each worker that may be done ahead of the first unfinished one, so that their replies wait


class Worker(Protocol):
    """One that does a request at a time, elsewhere."""

    def begin(self, request: Request, state: State) -> None:
        """Give it a request; ConnectionError if it died while it was idle."""

    def has_news(self) -> bool:
        """Find out whether there is an answer, or will never be one."""

    def finish(self) -> tuple[Reply, State]:
        """The answer to the present request; EOFError or OSError if it died over it."""

    def end(self) -> None:
        """Kill it."""


W = TypeVar("W", bound=Worker)


class Workers(Relay, Generic[W]):
    """Workers for a run. States stay here; only work goes to them.

    `deadline` is the time in seconds that a worker has for one request.
    """

    def __init__(self, sites: Place, workers: int, deadline: float | None = None) -> None:
        super().__init__(sites)
        self._sites, self.workers = sites, workers
        self._deadline = deadline
        self._all: list[W] = []
        self._idle: list[W] = []
        self._busy: dict[W, tuple[int, float]] = {}  # the request's number, and when it was given

    def _hire(self) -> None:
        """Begin new workers until there are as many as there should be."""
        raise NotImplementedError

    def _wait(self, seconds: float) -> Collection[W]:
        """Wait so long for news, and list busy workers that have some. A worker may also become idle meanwhile."""
        raise NotImplementedError

    def _expect(self, requests: Sequence[Request]) -> None:
        """Prepare for these requests."""

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Send requests and yield the replies as they come, no more than a window ahead of the first unfinished one."""
        all_requests = list(self._sites.split(requests))
        queue = Queue([self._sites.size(request) for request in all_requests], WINDOW * self.workers)
        deaths: Counter[int] = Counter()
        self._expect(all_requests)
        self._hire()
        try:
            while queue.waiting or self._busy:
                while self._idle and (number := queue.next()) is not None:
                    self._give(number, all_requests[number])
                ready = self._wait(self._patience())
                for worker, (number, given) in list(self._busy.items()):
                    request = all_requests[number]
                    try:
                        answer = self._answer(worker, ready, given)
                    except TimeoutError as late:
                        self._replace(worker)
                        answer = Reply(request.clients, error=str(late)), {}
                    except (EOFError, OSError):
                        self._replace(worker)
                        deaths[number] += 1
                        if deaths[number] < ATTEMPTS:
                            queue.again(number)
                            continue
                        error = f"its worker process died {ATTEMPTS} times over its work"
                        answer = Reply(request.clients, error=error), {}
                    else:
                        if answer is None:
                            continue
                        self._idle.append(worker)
                        del self._busy[worker]
                    reply, state = answer
                    queue.finish(number)
                    yield from self._sites.finish(request, reply, state)
        finally:  # nobody waits for the rest: let no worker go on with it, nor be lost between two tasks
            for worker in self._at_work():
                self._dismiss(worker)
            self._busy = {}
            self._expect([])

    def _at_work(self) -> list[W]:
        """List the workers that have a request, or may have one."""
        return [worker for worker in self._all if worker not in self._idle]

    def _patience(self) -> float:
        """The seconds to wait for news: no longer than to the first deadline, and not for ever."""
        if self._deadline is None or not self._busy:
            return PATIENCE
        first = min(given for _, given in self._busy.values())
        return max(0.0, min(first + self._deadline - time.monotonic(), PATIENCE))

    def _answer(self, worker: W, ready: Collection[W], given: float) -> tuple[Reply, State] | None:
        """Read a worker's answer; None if there is none yet. TimeoutError: it is late; EOFError, OSError: it died."""
        late = self._deadline is not None and time.monotonic() >= given + self._deadline
        if worker in ready or (late and worker.has_news()):
            return worker.finish()
        if late:
            raise TimeoutError(f"it did not answer within {self._deadline:g} s")
        return None

    def _dismiss(self, worker: W) -> None:
        self._all.remove(worker)
        worker.end()

    def _replace(self, worker: W) -> None:
        del self._busy[worker]
        self._dismiss(worker)
        self._hire()

    def _give(self, number: int, request: Request) -> None:
        worker = self._idle.pop()
        try:
            worker.begin(request, self._sites.begin(request))
        except ConnectionError:
            self._dismiss(worker)
            self._hire()
            self._give(number, request)
        else:
            self._busy[worker] = number, time.monotonic()

    def close(self) -> None:
        """End all workers."""
        for worker in self._all:
            worker.end()
        self._all, self._idle, self._busy = [], [], {}


Failure = tuple[BaseException, str] | None


def take_causes(reply: Reply) -> list[Failure]:
    """Take the exceptions out of a reply and its parts, so that they can be sent beside it."""
    replies = [reply, *reply.parts]
    failures = [portable(each.cause) for each in replies]
    for each in replies:
        each.cause = None
    return failures


def put_causes(reply: Reply, failures: Sequence[Failure]) -> None:
    """Put the exceptions that were sent beside a reply back into it."""
    for each, failure in zip([reply, *reply.parts], failures, strict=True):
        each.cause = arrived(failure)


def portable(error: BaseException | None) -> Failure:
    """An exception that can be sent, and the text of its traceback."""
    if error is None:
        return None
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception of the user's own may do anything
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return error, text


def arrived(failure: Failure) -> BaseException | None:
    """The exception that was sent, with the text of its traceback as its cause."""
    if failure is None:
        return None
    error, text = failure
    error.__cause__ = RemoteTraceback(text)
    return error
