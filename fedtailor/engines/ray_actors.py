"""The transport of a cluster: workers are Ray's actors, each with one core of some node.

An actor gets the sites' data and network once, through the object store, of which each node has one copy. It works with
its own copy of whatever it might write. An actor has work only after it has answered: one that cannot be placed waits,
and nobody waits for it.
"""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from fedtailor._common.errors import FedtailorError, brief
from fedtailor.engines.ray_parcels import Bytes, Label, Parcel, as_bytes, label, pack, pack_sites, unpack, unpack_sites
from fedtailor.engines.ray_session import check_software, connected, software
from fedtailor.engines.transports import keep_freed_memory
from fedtailor.engines.workers import ATTEMPTS, PATIENCE, Workers, put_causes, take_causes
from fedtailor.messages import Reply, Request, State
from fedtailor.messages.transport import Place

PLACEMENT = 120.0  # seconds without any actor that answers, after which the run ends
SHARED = 1 << 17  # bytes from which on a tensor in several messages is put into the object store once

Answer = tuple[Reply, Any, list[tuple[Label, Bytes]], list[tuple[Label, Bytes]]]


class Actor:
    """A worker at its own place: a process with one thread on some node of the cluster."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()

    def ready(self, parcel: Parcel) -> dict[str, str]:
        """Take the sites, and say what they are computed with here."""
        self._parcel, self._sites = parcel, unpack_sites(parcel)
        return software()

    def ping(self, before: Any = None) -> dict[str, str]:
        """Say so again. It is said after the answer `before`, and not at all if that was a failure."""
        return software()

    def work(self, request: Request, labels: Sequence[Label], n_message: int, *contents: Bytes) -> Answer:
        """Do a request. The first tensors are its message, the others the client's state."""
        packed = list(zip(labels, contents, strict=True))
        message, state = unpack(packed[:n_message]), unpack(packed[n_message:])
        reply, after = self._sites.work(replace(request, message=message), state)
        failures, upload = take_causes(reply), pack(reply.upload)
        reply.upload = {}
        return reply, failures, upload, pack(after)


class Remote:
    """An actor as seen from here, and its present task."""

    def __init__(self, actor: Any, parcel: Any, shared: "Shared") -> None:
        self._actor, self._shared = actor, shared
        self.task = actor.ready.remote(parcel)

    def ping(self, before: Any = None) -> None:
        self.task = self._actor.ping.remote(before)

    def begin(self, request: Request, state: State) -> None:
        tensors = [*request.message.items(), *state.items()]
        contents = [*map(self._shared.content, request.message.values()), *map(as_bytes, state.values())]
        labels = [label(name, tensor) for name, tensor in tensors]
        self.task = self._actor.work.remote(replace(request, message={}), labels, len(request.message), *contents)

    def has_news(self) -> bool:
        done, _ = ray.wait([self.task], timeout=0)
        return bool(done)

    def finish(self) -> tuple[Reply, State]:
        try:
            reply, failures, upload, state = ray.get(self.task, timeout=PLACEMENT)
        except RayError as error:
            raise EOFError from error
        put_causes(reply, failures)
        reply.upload = unpack(upload)
        return reply, unpack(state)

    def end(self) -> None:
        ray.kill(self._actor)


class Shared:
    """Tensors that are in several messages: each goes to the object store once."""

    def __init__(self) -> None:
        self._counts: Counter[Any] = Counter()
        self._put: dict[Any, Any] = {}

    def expect(self, requests: Sequence[Request]) -> None:
        """Count the tensors in these messages, and let go of those before."""
        self._put = {}
        self._counts = Counter(_identity(tensor) for request in requests for tensor in request.message.values())

    def content(self, tensor: Tensor) -> Any:
        """The bytes of a tensor, or where in the object store they are."""
        identity = _identity(tensor)
        if tensor.nbytes < SHARED or self._counts[identity] < 2:
            return as_bytes(tensor)
        if identity not in self._put:
            self._put[identity] = ray.put(as_bytes(tensor))
        return self._put[identity]


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class Actors(Workers[Remote]):
    """Actors of a cluster, or of this machine. `workers` is their number [one for each CPU of the cluster]."""

    def __init__(self, sites: Place, workers: int | None, deadline: float | None, address: str | None) -> None:
        super().__init__(sites, workers or 1, deadline)
        self._starting: set[Remote] = set()  # these have not answered yet
        self._lost = 0  # actors that ended before they answered, since one did
        self._last_seen = time.monotonic()  # when there was an actor that answered
        self._shared = Shared()
        self._end = ExitStack()
        try:
            self._end.enter_context(connected(address, workers))
            self.workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
            self._class = ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(Actor)
            self._parcel = ray.put(_packed(sites))
            self._last_seen = time.monotonic()
            self._hire()
            while not self._idle:
                self._wait(PATIENCE)
        except BaseException:
            self.close()
            raise

    def _expect(self, requests: Sequence[Request]) -> None:
        self._shared.expect(requests)

    def _hire(self) -> None:
        while len(self._all) < self.workers:
            self._all.append(Remote(self._class.remote(), self._parcel, self._shared))
            self._starting.add(self._all[-1])

    def _at_work(self) -> list[Remote]:
        return [worker for worker in super()._at_work() if worker not in self._starting]

    def _dismiss(self, worker: Remote) -> None:
        """End an actor. With it a whole node may be gone: those without work have to answer now to get some."""
        super()._dismiss(worker)
        for other in self._starting:
            other.ping(other.task)
        for other in self._idle:
            other.ping()
        self._starting.update(self._idle)
        self._idle = []

    def _wait(self, seconds: float) -> list[Remote]:
        tasks = {worker.task: worker for worker in (*self._busy, *self._starting)}
        done, _ = ray.wait(list(tasks), timeout=seconds)
        ready = [tasks[task] for task in done]
        for worker in ready:
            if worker in self._starting:
                self._welcome(worker)
        if self._idle or self._busy:
            self._last_seen = time.monotonic()
        elif time.monotonic() - self._last_seen > PLACEMENT:
            free, there = (which().get("CPU", 0) for which in (ray.available_resources, ray.cluster_resources))
            raise FedtailorError(
                f"No worker of the cluster answered for {PLACEMENT:g} s ({free:g} of {there:g} CPUs are free): wait "
                "until there is room for some, or choose another --address."
            )
        return [worker for worker in ready if worker in self._busy]

    def _welcome(self, worker: Remote) -> None:
        """Take the first answer of an actor, or replace it."""
        self._starting.remove(worker)
        try:
            check_software(ray.get(worker.task))
        except RayTaskError as error:
            raise _refusal(error) from error
        except RayError as error:
            self._dismiss(worker)
            self._lost += 1
            if self._lost > ATTEMPTS * self.workers:
                raise FedtailorError(f"The workers of the cluster end before they begin: {brief(error)}.") from error
            self._hire()
        else:
            self._idle.append(worker)
            self._lost = 0

    def close(self) -> None:
        """End all actors, and Ray if it was started here."""
        with self._end:
            if ray.is_initialized():
                super().close()
        self._starting = set()


def _packed(sites: Place) -> Parcel:
    try:
        return pack_sites(sites.without_states())
    except Exception as error:  # of the user's own objects
        raise FedtailorError(
            f"The method, network, loss or data cannot be sent to a cluster: {brief(error)}; use --engine processes."
        ) from error


def _refusal(error: RayTaskError) -> FedtailorError:
    """Say why an actor could not take the sites."""
    cause = error.cause
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if isinstance(cause, ImportError | AttributeError):
        return FedtailorError(
            f"A node of the cluster cannot import what the run uses: {brief(cause)}; install it on every node, or "
            "define it in the script itself."
        )
    return FedtailorError(f"A node of the cluster cannot take the data: {brief(cause)}.")
