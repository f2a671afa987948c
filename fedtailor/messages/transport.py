"""The way from the server to its sites, as each side sees it. What carries the messages is an engine's business."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from fedtailor.messages import Declaration, Reply, Request, State


class Transport(Protocol):
    """The server's way to its sites."""

    workers: int

    def declare(self) -> list[Declaration]:
        """Ask the sites to join."""

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Send requests and yield the replies as they come."""

    def accept(self, clients: Sequence[int]) -> None:
        """Tell these sites that their round counts."""

    def save(self) -> None:
        """Have the sites make their current states durable."""

    def prune(self) -> None:
        """Tell the sites that the server's checkpoint names the saved states."""

    def restore(self, versions: Mapping[int, int], sweep: bool = True) -> None:
        """Have the sites go back to the states that a checkpoint names."""

    def close(self) -> None:
        """End what was started."""


class Place(Protocol):
    """The sites of one place, as a transport sees them. `work` has no effect, so it may run in another process."""

    def declare(self) -> list[Declaration]: ...

    def without_states(self) -> "Place": ...

    def split(self, requests: Sequence[Request]) -> Sequence[Request]: ...

    def size(self, request: Request) -> int: ...

    def begin(self, request: Request) -> State: ...

    def work(self, request: Request, state: State) -> tuple[Reply, State]: ...

    def finish(self, request: Request, reply: Reply, state: State) -> Reply: ...

    def handle(self, request: Request) -> Reply: ...

    def accept(self, clients: Sequence[int]) -> None: ...

    def save(self) -> None: ...

    def prune(self) -> None: ...

    def restore(self, versions: Mapping[int, int], sweep: bool = True) -> None: ...
