"""The transport of worker processes: one thread each, tensors through shared memory.

Workers are forked from this process, so they have its data without a copy and any method, network or loss of the
user's, wherever it was defined. A worker that dies is replaced and its work is done again. One that misses the deadline
is killed, and its client has failed.
"""

import os
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from multiprocessing.process import BaseProcess

import torch

from fedtailor.errors import FedtailorError
from fedtailor.messages import Reply, Request, State, copied
from fedtailor.transport.in_process import InProcess, Place
from fedtailor.transport.queue import Queue
from fedtailor.transport.shared_memory import Sheet

SHEET = 4 << 30  # bytes of address space a worker shares each way; memory is taken only as tensors fill it
ATTEMPTS = 3  # how often a client's work is begun again after its worker died
PATIENCE = 0.5  # seconds after which one looks whether workers that say nothing are alive
WINDOW = 8  # requests for each worker that may be done ahead of the first unfinished one, so that their replies wait


class Worker:
    """One forked process, the pipe to it, and the two sheets of shared memory for what goes there and back."""

    def __init__(self, sites: Place, others: Sequence["Worker"]) -> None:
        self.inbox, self.outbox = Sheet(SHEET), Sheet(SHEET)
        self.pipe, far_end = get_context("fork").Pipe()
        not_its_own = [self.pipe, *(other.pipe for other in others)]
        self.process: BaseProcess = get_context("fork").Process(
            target=_work,
            args=(sites, far_end, self.inbox, self.outbox, not_its_own, os.getpid()),
            daemon=True,
        )
        with warnings.catch_warnings():  # newer Pythons warn of threads; these workers use none of this process's
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        far_end.close()
        assert self.process.pid is not None
        self.group = self.process.pid
        with suppress(ProcessLookupError):  # a group of its own, for what it forks too
            os.setpgid(self.group, self.group)

    def begin(self, request: Request, state: State) -> None:
        if not self.process.is_alive():  # a process that it forked may hold its end of the pipe: no error would come
            raise BrokenPipeError
        message, room = self.inbox.write(request.message)
        places, _ = self.inbox.write(state, room)
        self.pipe.send((replace(request, message={}), message, places))

    def finish(self) -> tuple[Reply, State]:
        """The reply to the present request; EOFError or OSError if the worker died over it."""
        reply, upload, state, failure = self.pipe.recv()
        if failure is not None:
            reply.cause, text = failure
            reply.cause.__cause__ = RemoteTraceback(text)
        reply.upload = copied(self.outbox.read(upload))
        return reply, copied(self.outbox.read(state))

    def end(self) -> None:
        """Kill the worker with all processes that it forked."""
        with suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


class Processes(InProcess):
    """Persistent worker processes, forked once for the run. States stay here; only work goes to them.

    `deadline` is the time in seconds that a worker has for one request.
    """

    def __init__(self, sites: Place, workers: int, deadline: float | None = None) -> None:
        super().__init__(sites)
        self.workers = workers
        self._deadline = deadline
        self._all: list[Worker] = []
        self._idle: list[Worker] = []
        self._busy: dict[Worker, tuple[int, float]] = {}  # the request's number, and when it was given
        self._hire()

    def _hire(self) -> None:
        """Fork workers until there are as many as there should be."""
        while len(self._all) < self.workers:
            self._all.append(Worker(self._sites, self._all))
            self._idle.append(self._all[-1])

    def _dismiss(self, worker: Worker) -> None:
        self._all.remove(worker)
        worker.end()

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Send requests and yield the replies as they come, no more than a window ahead of the first unfinished one."""
        all_requests = list(self._sites.split(requests))
        queue = Queue([self._sites.size(request) for request in all_requests], WINDOW * self.workers)
        deaths: Counter[int] = Counter()
        self._hire()
        try:
            while queue.waiting or self._busy:
                while self._idle and (number := queue.next()) is not None:
                    self._give(number, all_requests[number])
                ready = self._wait()
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
                    yield self._sites.finish(request, reply, state)
        finally:  # nobody waits for the rest: let no worker go on with it, nor be lost between two tasks
            for worker in [worker for worker in self._all if worker not in self._idle]:
                self._dismiss(worker)
            self._busy = {}

    def _wait(self) -> list[Connection]:
        """Wait until a pipe has news, but no longer than to the first deadline, and not for ever: a dead worker's pipe
        is not closed as long as a process that it forked has it too."""
        first = min((given for _, given in self._busy.values()), default=0.0)
        left = PATIENCE if self._deadline is None else first + self._deadline - time.monotonic()
        return wait([worker.pipe for worker in self._busy], max(0.0, min(left, PATIENCE)))  # type: ignore[return-value]

    def _answer(self, worker: Worker, ready: list[Connection], given: float) -> tuple[Reply, State] | None:
        """Read a worker's answer; None if there is none yet. TimeoutError: it is late; EOFError, OSError: it died."""
        dead = not worker.process.is_alive()
        late = self._deadline is not None and time.monotonic() >= given + self._deadline
        if worker.pipe in ready or ((dead or late) and worker.pipe.poll()):
            return worker.finish()
        if dead:
            raise EOFError
        if late:
            raise TimeoutError(f"it did not answer within {self._deadline:g} s")
        return None

    def _replace(self, worker: Worker) -> None:
        del self._busy[worker]
        self._dismiss(worker)
        self._hire()

    def _give(self, number: int, request: Request) -> None:
        worker = self._idle.pop()
        try:
            worker.begin(request, self._sites.begin(request))
        except (BrokenPipeError, ConnectionError):  # it died while it was idle
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


def _work(
    sites: Place, pipe: Connection, inbox: Sheet, outbox: Sheet, not_its_own: list[Connection], parent: int
) -> None:
    """A worker's life: requests from the pipe until it closes. Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    for other in not_its_own:
        other.close()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    while True:
        try:
            request, message, state = pipe.recv()
        except EOFError:
            return
        reply, after = sites.work(replace(request, message=inbox.read(message)), dict(inbox.read(state)))
        try:
            upload, room = outbox.write(reply.upload)
            places, _ = outbox.write(after, room)
        except FedtailorError as error:  # more than fits
            reply, upload, places = Reply(request.clients, error=str(error).rstrip(".")), [], []
        failure = _portable(reply.cause)
        reply.upload, reply.cause = {}, None
        pipe.send((reply, upload, places, failure))


def _portable(error: BaseException | None) -> tuple[BaseException, str] | None:
    """An exception that can be sent, and the text of its traceback."""
    if error is None:
        return None
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception of the user's own may do anything
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return error, text


def _end_with(parent: int) -> None:
    """End this worker, with all that it forked, when its parent is gone: even by `kill -9`, even in the middle of a
    task."""
    while os.getppid() == parent:
        time.sleep(0.5)
    with suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
