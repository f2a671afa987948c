"""The transport to sites elsewhere: requests become letters, answers become replies.

A site makes its new state durable before it answers, and lets go of older ones by what the next letter says. So of the
commit rule's four words only `accept` and `prune` have something to remember here, and nothing is sent for them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fedtailor.engines.channel import Channel
from fedtailor.messages import NEVER, Declaration, EvaluateShared, Reply, Request
from fedtailor.messages.letters import as_letter, as_reply


class Remote:
    """Sites behind a channel: client number i is the site names[i]. A letter is answered within `deadline` seconds."""

    def __init__(
        self,
        channel: Channel,
        run: str,
        names: Sequence[str],
        declared: Sequence[Declaration],
        deadline: float | None = None,
    ) -> None:
        self._channel, self._run, self._names, self._declared = channel, run, list(names), list(declared)
        self._deadline = deadline
        self._proposed: dict[int, int] = {}
        self._accepted: dict[int, int] = {}
        self._durable: dict[int, int] = {}

    def declare(self) -> list[Declaration]:
        """Return what the sites declared when they joined."""
        return self._declared

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Send each client's request in a letter, and yield the replies as they come."""
        waiting = {self._names[request.client]: request for request in _single(requests)}
        letters = {
            name: as_letter(request, self._run, self._durable.get(request.client, NEVER)).pack()
            for name, request in waiting.items()
        }
        for name, answer in self._channel.ask(letters, self._deadline):
            if (request := waiting.pop(name, None)) is None:
                continue
            if isinstance(answer, str):
                yield Reply(request.clients, error=answer)
                continue
            reply = as_reply(answer, request, self._run, name)
            if reply.version != NEVER:
                self._proposed[request.client] = reply.version
            yield reply

    def accept(self, clients: Sequence[int]) -> None:
        """Remember which states count."""
        for client in clients:
            if client in self._proposed:
                self._accepted[client] = self._proposed.pop(client)

    def save(self) -> None:
        """Do nothing: a site saves its state before it answers."""

    def prune(self) -> None:
        """Remember which states the server's checkpoint names."""
        self._durable = dict(self._accepted)

    def restore(self, versions: Mapping[int, int], sweep: bool = True) -> None:
        """Go back to the states that a checkpoint names; letters name them."""
        self._proposed, self._accepted, self._durable = {}, dict(versions), dict(versions)

    def close(self) -> None:
        """End nothing: the channel is its owner's."""


def _single(requests: Sequence[Request]) -> Iterator[Request]:
    """Cut requests for several clients into one each: they live in different places."""
    for request in requests:
        if isinstance(request, EvaluateShared):
            yield from (replace(request, client=client, others=()) for client in request.clients)
        else:
            yield request
