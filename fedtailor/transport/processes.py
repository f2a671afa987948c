"""The engine of worker processes: one thread each, longest client first, tensors through shared memory.

Workers are forked from this process, so they have its data without a copy and any method, network or loss of the
user's, wherever it was defined. A worker that dies is replaced and its work is done again.
"""

import os
import signal
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from fedtailor.errors import FedtailorError
from fedtailor.site.work import Bench, Result, Task, copied
from fedtailor.transport.shared_memory import Sheet

SHEET = 4 << 30  # bytes of address space a worker shares each way; memory is taken only as tensors fill it
ATTEMPTS = 3  # how often a client's work is begun again after its worker died


class Worker:
    """One forked process, the pipe to it, and the two sheets of shared memory for what goes there and back."""

    def __init__(self, bench: Bench, others: Sequence["Worker"]) -> None:
        self.inbox, self.outbox = Sheet(SHEET), Sheet(SHEET)
        self.pipe, far_end = get_context("fork").Pipe()
        not_its_own = [self.pipe, *(other.pipe for other in others)]
        self.process: BaseProcess = get_context("fork").Process(
            target=_work,
            args=(bench, far_end, self.inbox, self.outbox, not_its_own, os.getpid()),
            daemon=True,
        )
        with warnings.catch_warnings():  # newer Pythons warn of threads; these workers use none of this process's
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        far_end.close()

    def begin(self, task: Task) -> None:
        message, room = self.inbox.write(task.message)
        state, _ = self.inbox.write(task.state(), room)
        self.pipe.send((task.kind, task.round, task.clients, message, state))

    def finish(self) -> Result:
        """The result of the present task; EOFError or OSError if the worker died over it."""
        result, reply, state = self.pipe.recv()
        result.reply, result.state = copied(self.outbox.read(reply)), copied(self.outbox.read(state))
        return result  # type: ignore[no-any-return]

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


class Processes:
    """Persistent worker processes, forked once for the run."""

    def __init__(self, bench: Bench, workers: int) -> None:
        self.bench = bench
        self.workers = workers
        self._all: list[Worker] = []
        self._idle: list[Worker] = []
        self._busy: dict[Connection, tuple[Worker, Task]] = {}
        self._hire()

    def _hire(self) -> None:
        """Fork workers until there are as many as there should be."""
        while len(self._all) < self.workers:
            self._all.append(Worker(self.bench, self._all))
            self._idle.append(self._all[-1])

    def _dismiss(self, worker: Worker) -> None:
        self._all.remove(worker)
        worker.end()

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """The results of the tasks, in the order in which they are done."""
        waiting = deque(sorted(tasks, key=self._size, reverse=True))
        deaths: Counter[tuple[int, ...]] = Counter()
        self._hire()
        try:
            while waiting or self._busy:
                while waiting and self._idle:
                    self._give(waiting.popleft())
                ready = wait(list(self._busy))
                for pipe in [pipe for pipe in self._busy if pipe in ready]:
                    worker, task = self._busy.pop(pipe)
                    try:
                        result = worker.finish()
                    except (EOFError, OSError):
                        self._dismiss(worker)
                        self._hire()
                        deaths[task.clients] += 1
                        if deaths[task.clients] < ATTEMPTS:
                            waiting.appendleft(task)
                            continue
                        result = Result(task.clients, error=f"its worker process died {ATTEMPTS} times over its work")
                    else:
                        self._idle.append(worker)
                    yield result
        finally:  # nobody waits for the rest: let no worker go on with it
            for worker, _ in self._busy.values():
                self._dismiss(worker)
            self._busy = {}

    def _give(self, task: Task) -> None:
        worker = self._idle.pop()
        try:
            worker.begin(task)
        except (BrokenPipeError, ConnectionError):  # it died while it was idle
            self._dismiss(worker)
            self._hire()
            self._give(task)
        else:
            self._busy[worker.pipe] = (worker, task)

    def _size(self, task: Task) -> int:
        first, last = (1, 3) if task.kind.startswith("evaluate") else (0, 1)
        places = [self.bench.data.places[client] for client in task.clients]
        return sum(place[last] - place[first] for place in places)

    def close(self) -> None:
        """End all workers."""
        for worker in self._all:
            worker.end()
        self._all, self._idle, self._busy = [], [], {}


def _work(
    bench: Bench, pipe: Connection, inbox: Sheet, outbox: Sheet, not_its_own: list[Connection], parent: int
) -> None:
    """A worker's life: tasks from the pipe until it closes. Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    for other in not_its_own:
        other.close()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    while True:
        try:
            kind, round, clients, message, state = pipe.recv()
        except EOFError:
            return
        result = bench.do(Task(kind, round, clients, inbox.read(message), partial(dict, inbox.read(state))))
        try:
            reply, room = outbox.write(result.reply)
            state, _ = outbox.write(result.state, room)
        except FedtailorError as error:  # more than fits
            result, reply, state = Result(clients, error=str(error).rstrip(".")), [], []
        result.reply, result.state = {}, {}
        pipe.send((result, reply, state))


def _end_with(parent: int) -> None:
    """End this worker when its parent is gone, even by `kill -9` and even in the middle of a task."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
