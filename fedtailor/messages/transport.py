"""The way from the server to its sites, as each side sees it. What carries the messages is an engine's business."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from fedtailor.messages import Declaration, Reply, Request, State


class Transport(Protocol):
    """The server's way to its sites."""

    def declare(self) -> list[Declaration]:
        """Ask the sites to join."""

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Send requests and yield the replies as they come."""

    def accept(self, clients: Sequence[int], /) -> None:
        """Tell these sites that their round counts."""

    def save(self) -> None:
        """Have the sites make their current states durable."""

    def prune(self) -> None:
        """Tell the sites that the server's checkpoint names the saved states."""

    def restore(self, versions: Mapping[int, int], sweep: bool = True) -> None:
        """Have the sites go back to the states that a checkpoint names."""

    def close(self) -> None:
        """End what was started."""


class Place(Transport, Protocol):
    """The sites of one place: the transport that does all work in this process, the reference for all others. Workers
    take its requests one by one: `work` has no effect, so it may run in another process."""

    def without_states(self) -> "Place":
        """Return the same sites without their states: all that `work` needs."""

    def on(self, device: torch.device) -> "Place":
        """Return the same sites with samples and network on a device: its worker calls `work` there."""

    def split(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Cut requests that concern several clients into pieces for one pass each."""

    def size(self, request: Request) -> int:
        """Count the samples that a request goes through."""

    def begin(self, request: Request) -> State:
        """Get the state that a request is to work with."""

    def work(self, request: Request, state: State) -> tuple[Reply, State]:
        """Do one request, and return the reply and the state after it."""

    def finish(self, request: Request, reply: Reply, state: State) -> list[Reply]:
        """Keep the new state as a proposal, and return the reply: one for each client that trained together."""


class Relay:
    """A transport that passes everything on to another one, except for what a subclass does itself."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def declare(self) -> list[Declaration]:
        return self._inner.declare()

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        return self._inner.ask(requests)

    def accept(self, clients: Sequence[int], /) -> None:
        self._inner.accept(clients)

    def save(self) -> None:
        self._inner.save()

    def prune(self) -> None:
        self._inner.prune()

    def restore(self, versions: Mapping[int, int], sweep: bool = True) -> None:
        self._inner.restore(versions, sweep)

    def close(self) -> None:
        self._inner.close()
