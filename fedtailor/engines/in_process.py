"""The transport that does all work in this process, one request after the other: the reference for all others."""

from collections.abc import Iterator, Sequence

from fedtailor.messages import Reply, Request
from fedtailor.messages.transport import Place


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
