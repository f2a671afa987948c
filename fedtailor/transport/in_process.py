"""The transport that does all work in this process, one request after the other: the reference for all others."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from fedtailor.messages import Declaration, Reply, Request, State


class Place(Protocol):
    """The sites of one place, as a transport sees them. `work` has no effect, so it may run in another process."""

    def declare(self) -> list[Declaration]: ...

    def without_states(self) -> "Place": ...

    def split(self, requests: Sequence[Request]) -> Iterator[Request]: ...

    def size(self, request: Request) -> int: ...

    def begin(self, request: Request) -> State: ...

    def work(self, request: Request, state: State) -> tuple[Reply, State]: ...

    def finish(self, request: Request, reply: Reply, state: State) -> Reply: ...

    def handle(self, request: Request) -> Reply: ...

    def accept(self, clients: Sequence[int]) -> None: ...

    def save(self) -> None: ...

    def prune(self) -> None: ...

    def restore(self, versions: Mapping[int, int], sweep: bool = True) -> None: ...


class InProcess:
    """Sites in this process."""

    workers = 1

    def __init__(self, sites: Place) -> None:
        self._sites = sites
        self.declare, self.accept = sites.declare, sites.accept
        self.save, self.prune, self.restore = sites.save, sites.prune, sites.restore

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Send requests and yield the replies as they come."""
        for request in self._sites.split(requests):
            yield self._sites.handle(request)

    def close(self) -> None:
        """End nothing."""
