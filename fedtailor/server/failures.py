"""Clients that fail: who and why, each fault told once, and whether they failed because of what they were sent.

A client may fail by itself: its data, its memory, its code. It may also fail because another client uploaded absurd
numbers, which the server averaged and sent to everybody. The largest numbers in messages and uploads tell the two
apart.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from fedtailor.errors import FedtailorError, warn
from fedtailor.messages import Message, Reply, largest
from fedtailor.method import Server
from fedtailor.server.records import RoundRecord, failures, failures_in_words

MAX_FAILED_ROUNDS = 3  # in a row, in which every participant failed
GROWN = 10  # times as large as in rounds without a failure: what a client was sent may be why it fails
OUTLIER = 100  # times as large as the others' in the median: an upload that may be why


class ClientFailure(UserWarning):
    """A client was left out of a round."""


class Failures:
    """The failures of a run. `stop` ends it with the first one."""

    def __init__(self, title: str, names: Sequence[str], stop: bool, rounds: int) -> None:
        self.title, self.names, self.stop = title, names, stop
        self._most_rounds = min(MAX_FAILED_ROUNDS, rounds)
        self._failed_rounds = 0  # in a row
        self._told: set[str] = set()
        self._healthy: dict[str, float] = {}  # the largest numbers of all messages in rounds without a failure
        self._uploads: dict[int, dict[str, float]] = {}  # and of this round's uploads, by client
        self._suspect = ""  # the last upload that was far larger than the others'

    def note(self, client: int, upload: Message) -> None:
        """Note how large an upload is; refuse one with NaN or infinite numbers."""
        sizes = largest(upload)
        for name, size in sizes.items():
            if not math.isfinite(size):
                raise ValueError(f"its upload has NaN or infinite numbers in {name!r}")
        self._uploads[client] = sizes

    def close(
        self, round: int, messages: Mapping[int, Message], replies: Mapping[int, Reply], server: Server
    ) -> list[int]:
        """Close a round: name the clients that failed. Return those that failed because of what they were sent."""
        failed = {client: replies[client] for client in sorted(replies) if replies[client].error}
        sizes = _largest_of_all(messages)
        wrong = {client: why for client in failed if (why := self._wrong(sizes[client]))}
        if not failed:
            for of_client in sizes.values():
                self._healthy |= {n: size for n, size in of_client.items() if size > self._healthy.get(n, 0.0)}
        self._find_suspect(round)
        last = None
        for client, reply in failed.items():
            why = f"{reply.error}, because of what it was sent ({wrong[client]})" if client in wrong else reply.error
            last = (why, reply.cause)
            if why not in self._told:
                self._told.add(why)
                alike = [c for c in failed if failed[c].error == reply.error and wrong.get(c) == wrong.get(client)]
                self._tell(round, alike, why, reply.cause, server)
        self._failed_rounds = self._failed_rounds + 1 if failed and len(failed) == len(messages) else 0
        if last is not None and self._failed_rounds == self._most_rounds:
            why, cause = last
            raise FedtailorError(
                f"{self.title}: no client could do its work in {self._failed_rounds} rounds in a row: {why}."
                + (" Training diverges: take a smaller --lr, or --clip 1." if "NaN" in why else "")
            ) from cause
        return list(wrong)

    def _tell(self, round: int, clients: list[int], why: str, cause: BaseException | None, server: Server) -> None:
        names = ", ".join(self.names[client] for client in clients)
        who = f"{self.title}, round {round}: client{'s' if len(clients) > 1 else ''} {names}"
        if self.stop:
            raise FedtailorError(f"{who} failed: {why}.") from cause
        message = f"{who} left out: {why}."
        server.warnings[f"failure {len(self._told)} in round {round}"] = message
        warn(message, ClientFailure)

    def count(self, rounds: Sequence[RoundRecord]) -> None:
        """Say at the end how often clients failed, if a fault came again after it was told."""
        failed = failures(rounds)
        if sum(times for times, _ in failed.values()) > len(failed):
            words = failures_in_words([failed], len(self.names))
            warn(f"{self.title}: {words}.", ClientFailure)

    def _wrong(self, sizes: Mapping[str, float]) -> str:
        """Say what is wrong with a message: NaN, or numbers far larger than in rounds without a failure."""
        for name, size in sizes.items():
            if not math.isfinite(size):
                return f"{name!r} is not finite{self._suspect}"
            if (before := self._healthy.get(name)) and size > GROWN * before:
                return f"{name!r} is {size / before:.3g} times as large as before{self._suspect}"
        return ""

    def _find_suspect(self, round: int) -> None:
        """Look for an upload that is far larger than the others' of this round."""
        for name in {name for sizes in self._uploads.values() for name in sizes}:
            of_name = {client: sizes[name] for client, sizes in self._uploads.items() if name in sizes}
            client = max(of_name, key=lambda client: of_name[client])
            others = [size for other, size in of_name.items() if other != client]
            usual = statistics.median(others) if others else 0.0
            if usual and (times := of_name[client] / usual) > OUTLIER:
                whose = f"client {self.names[client]}'s {name!r}"
                self._suspect = f"; {whose} was {times:.3g} times as large as others' in round {round}"
        self._uploads = {}


def _largest_of_all(messages: Mapping[int, Message]) -> dict[int, dict[str, float]]:
    """Find the largest number of each message's tensors. What all clients are sent is looked at once."""
    known: dict[int, float] = {}
    for message in messages.values():
        for name, tensor in message.items():
            if id(tensor) not in known:
                known[id(tensor)] = largest({name: tensor})[name]
    return {client: {n: known[id(tensor)] for n, tensor in message.items()} for client, message in messages.items()}
