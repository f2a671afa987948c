"""A place without methods or data, as a transport sees it: what is asked of it, and in what order, is written down."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType

import torch

from fedtailor._common.errors import FedtailorError
from fedtailor.messages import Declaration, Reply, Request, State


@dataclass
class Pretended:
    """Sites whose clients have so many samples each and reply with their own numbers.

    `dying` maps a client to the number of times that its work kills its process, counted by files in `marks`. `refused`
    clients have no state. `during` is done in the middle of a client's work.
    """

    sizes: list[int]
    dying: Mapping[int, int] = field(default_factory=dict)
    marks: Path = Path()
    refused: set[int] = field(default_factory=set)
    during: Callable[[int], None] = lambda client: None
    events: list[tuple[str, int]] = field(default_factory=list)

    def declare(self) -> list[Declaration]:
        return [Declaration(str(number), size, None, "") for number, size in enumerate(self.sizes)]

    def without_states(self) -> "Pretended":
        return self

    def on(self, device: torch.device) -> "Pretended":
        return self

    def split(self, requests: Sequence[Request]) -> Sequence[Request]:
        return requests

    def size(self, request: Request) -> int:
        return self.sizes[request.client]

    def begin(self, request: Request) -> State:
        if request.client in self.refused:
            raise FedtailorError("The state is not here.")
        self.events.append(("begin", request.client))
        return {"before": torch.tensor(request.client)}

    def work(self, request: Request, state: State) -> tuple[Reply, State]:
        deaths = len(list(self.marks.glob(f"{request.client}-*"))) if self.dying else 0
        if deaths < self.dying.get(request.client, 0):
            (self.marks / f"{request.client}-{deaths}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.during(request.client)
        upload = {"twice": 2 * request.message["x"], "state": state["before"].clone()}
        return Reply(request.clients, upload), {"after": torch.tensor(request.client + 1)}

    def finish(self, request: Request, reply: Reply, state: State) -> list[Reply]:
        self.events.append(("finish", request.client))
        assert reply.error or state["after"] == request.client + 1
        return [reply]

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        done = (self.finish(request, *self.work(request, self.begin(request))) for request in self.split(requests))
        return chain.from_iterable(done)

    def close(self) -> None: ...

    def accept(self, clients: Sequence[int]) -> None:
        self.events += [("accept", client) for client in clients]

    def save(self) -> None: ...

    def prune(self) -> None: ...

    def restore(self, versions: Mapping[int, int], sweep: bool = True) -> None: ...


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail, in place of hanging, if this takes longer."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
