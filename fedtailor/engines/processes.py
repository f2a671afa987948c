"""The transport of worker processes: one thread each, tensors through shared memory.

Workers are forked from this process, so they have its data without a copy and any method, network or loss of the
user's, wherever it was defined.
"""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from fedtailor._common.errors import FedtailorError, explained
from fedtailor.engines.shared_memory import Sheet
from fedtailor.engines.workers import Workers, put_causes, take_causes
from fedtailor.messages import Reply, Request, State, copied, moved
from fedtailor.messages.transport import Place

SHEET = 4 << 30  # bytes of address space a worker shares each way; memory is taken only as tensors fill it


class Worker:
    """One forked process, the pipe to it, and the two sheets of shared memory for what goes there and back."""

    def __init__(self, sites: Place, others: Sequence["Worker"], device: torch.device | None = None) -> None:
        self.device = device
        self.inbox, self.outbox = Sheet(SHEET), Sheet(SHEET)
        self.pipe, far_end = get_context("fork").Pipe()
        not_its_own = [self.pipe, *(other.pipe for other in others)]
        self.process: BaseProcess = get_context("fork").Process(
            target=_work,
            args=(sites, far_end, self.inbox, self.outbox, not_its_own, os.getpid(), device),
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

    def has_news(self) -> bool:
        return not self.process.is_alive() or self.pipe.poll()

    def finish(self) -> tuple[Reply, State]:
        if not self.process.is_alive() and not self.pipe.poll():  # nor would its pipe be closed if it forked a process
            raise EOFError
        reply, upload, state, failures = self.pipe.recv()
        put_causes(reply, failures)
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


class Processes(Workers[Worker]):
    """Persistent worker processes, forked once for the run. With `devices`, each of these has a worker, which computes
    there; samples and network are moved there by the worker, once, as a process that has used CUDA cannot fork."""

    def __init__(
        self, sites: Place, workers: int, deadline: float | None = None, devices: Sequence[torch.device] = ()
    ) -> None:
        super().__init__(sites, len(devices) or workers, deadline)
        self._devices = devices
        self._hire()

    def _free_device(self) -> torch.device | None:
        """Find a device without a worker; None if workers compute where they are."""
        free = list(self._devices)
        for worker in self._all:
            if worker.device is not None:
                free.remove(worker.device)
        return free[0] if free else None

    def _hire(self) -> None:
        while len(self._all) < self.workers:
            try:
                self._all.append(Worker(self._sites, self._all, self._free_device()))
            except OSError as error:  # a limit of processes, or of memory (ulimit)
                raise FedtailorError(
                    f"A worker process cannot be started ({error.strerror}; each needs {2 * SHEET / 1e9:.0f} GB of "
                    "address space): use fewer --workers, or --engine in-process."
                ) from error
            self._idle.append(self._all[-1])

    def _wait(self, seconds: float) -> list[Worker]:
        ready = wait([worker.pipe for worker in self._busy], seconds)
        return [worker for worker in self._busy if worker.pipe in ready or not worker.process.is_alive()]


def _work(
    sites: Place,
    pipe: Connection,
    inbox: Sheet,
    outbox: Sheet,
    not_its_own: list[Connection],
    parent: int,
    device: torch.device | None,
) -> None:
    """A worker's life: requests from the pipe until it closes. Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    for other in not_its_own:
        other.close()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    do = sites.work if device is None else _at_device(sites, device)
    with suppress(EOFError, ConnectionError):  # its parent is gone
        while True:
            request, message, state = pipe.recv()
            reply, after = do(replace(request, message=inbox.read(message)), dict(inbox.read(state)))
            try:
                upload, room = outbox.write(reply.upload)
                places, _ = outbox.write(after, room)
            except FedtailorError as error:  # more than fits
                reply, upload, places = Reply(request.clients, error=str(error).rstrip(".")), [], []
            failures, reply.upload = take_causes(reply), {}
            pipe.send((reply, upload, places, failures))


def _at_device(sites: Place, device: torch.device) -> Callable[[Request, State], tuple[Reply, State]]:
    """Return what a worker of a device does: what it gets is sent there, and what comes of it fetched. A device that
    cannot be used is the reply to every request."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        there = sites.on(device)
    except Exception as error:  # PyTorch's, of any kind
        failed = f"the device {device} cannot be used ({explained(error)})"
        return lambda request, state: (Reply(request.clients, error=failed), {})

    def do(request: Request, state: State) -> tuple[Reply, State]:
        reply, after = there.work(replace(request, message=moved(request.message, device)), moved(state, device))
        reply.upload = moved(reply.upload, "cpu")
        return reply, moved(after, "cpu")

    return do


def _end_with(parent: int) -> None:
    """End this worker, with all that it forked, when its parent is gone: even by `kill -9`, even in the middle of a
    task."""
    while os.getppid() == parent:
        time.sleep(0.5)
    with suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
