"""Clients that fail: who and why, each fault told once, and whether they failed because of what they were sent.

A client may fail by itself: its data, its memory, its code. It may also fail because another client uploaded absurd
numbers, which the server averaged and sent to everybody. The largest numbers in messages and uploads tell the two
apart.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedtailor._common.errors import ClientFailure, ClientNote, FedtailorError, warn
from fedtailor.messages import Reply, Size
from fedtailor.method import Server
from fedtailor.server.evaluation import Evaluated
from fedtailor.server.records import RoundRecord, failures, failures_in_words

MAX_FAILED_ROUNDS = 3  # in a row, in which every participant failed
GROWN = 10  # times as large as in rounds without a failure: what a client was sent may be why it fails
OUTLIER = 100  # times as large as the others' in the median: an upload that may be why


@dataclass
class Failures:
    """The failures of a run. `stop` ends it with the first one; those of `hostile` clients never do."""

    title: str
    names: Sequence[str]
    stop: bool
    rounds: int
    hostile: Collection[int] = frozenset()
    _failed_rounds: int = 0  # in a row
    _unmeasured_rounds: int = 0  # the same of evaluations
    _told: set[str] = field(default_factory=set)
    _lines: int = 0  # that were told
    _failed: set[int] = field(default_factory=set)  # clients that failed in this round
    _away: set[int] = field(default_factory=set)  # that failed without an exception when they were last asked: silent
    _untrained: set[int] = field(default_factory=set)  # those of them that have not trained since
    _healthy: dict[str, float] = field(default_factory=dict)  # the largest numbers of all messages, without a failure
    _suspect: str = ""  # the last upload that was far larger than the others'

    def close(
        self,
        round: int,
        sent: Mapping[int, Size],
        received: Mapping[int, Size],
        replies: Mapping[int, Reply],
        server: Server,
    ) -> list[int]:
        """Close a round: name the clients that failed. Return those that failed because of what they were sent.

        `sent` and `received` are the sizes of all messages and of the uploads that were accepted.
        """
        failed = {client: replies[client] for client in sorted(replies) if replies[client].error}
        wrong = {client: why for client in failed if (why := self._wrong(sent[client].largest))}
        if not failed:
            for size in sent.values():
                self._healthy |= {n: most for n, most in size.largest.items() if most > self._healthy.get(n, 0.0)}
        self._find_suspect(round, {client: size.largest for client, size in received.items()})
        faults = {
            client: f"{reply.error}, because of what it was sent ({wrong[client]})" if client in wrong else reply.error
            for client, reply in failed.items()
        }
        self._failed = set(failed)
        self._untrained |= {client for client, reply in failed.items() if reply.cause is None}
        honest = [client for client in failed if client not in self.hostile]
        if self.stop and honest:
            why, cause = faults[honest[0]], failed[honest[0]].cause
            clients = [client for client in honest if faults[client] == why]
            raise FedtailorError(f"{self._who(round, clients)} failed: {why}.") from cause
        for clients in self._news(faults, failed) if failed else ():
            self._tell(round, clients, f"left out: {faults[clients[0]]}", server)
        if len(failed) < len(sent) or not sent:
            self._failed_rounds = 0
        elif honest:
            self._failed_rounds += 1
        if honest and self._failed_rounds == min(MAX_FAILED_ROUNDS, self.rounds):
            last = max(honest)
            raise FedtailorError(
                f"{self.title}: no client could do its work in {self._failed_rounds} rounds in a row: {faults[last]}."
                + (" Training diverges: take a smaller --lr, or --clip 1." if "NaN" in faults[last] else "")
            ) from failed[last].cause
        return list(wrong)

    def close_evaluation(self, round: int, found: Evaluated, trained: Iterable[int], server: Server) -> None:
        """Close a round's evaluation: name the clients that were not measured, and those that are back."""
        failed = {client: reply for client, reply in found.replies.items() if reply.error}
        # A silent client that was left out of the round is not named a second time in it.
        new = {c: reply for c, reply in failed.items() if c not in self._failed or reply.cause is not None}
        honest = [client for client in new if client not in self.hostile]
        if self.stop and honest:
            why, cause = new[honest[0]].error, new[honest[0]].cause
            clients = [client for client in honest if new[client].error == why]
            raise FedtailorError(f"The evaluation of {self._names(clients)} failed: {why}.") from cause
        for clients in self._news({client: reply.error for client, reply in new.items()}, new) if new else ():
            self._tell(round, clients, f"not measured: {new[clients[0]].error}", server)
        for client in found.missing:
            if client in found.replies and client not in failed:
                message = f"Client {self.names[client]} tells no metrics: averages are of the others."
                self._note(f"metrics of client {client}", message, server)
        self._untrained -= (trained := set(trained))
        answered = trained | (found.replies.keys() - failed.keys())
        if back := sorted((self._away & answered) - self._untrained - failed.keys()):
            self._away -= set(back)
            are = "are" if len(back) > 1 else "is"
            self._note(f"back in round {round}", f"{self._who(round, back)} {are} back.", server)
        broken = failed and all(reply.cause is not None for reply in found.replies.values()) and not found.measured
        self._unmeasured_rounds = self._unmeasured_rounds + 1 if broken else 0
        if broken and self._unmeasured_rounds == min(MAX_FAILED_ROUNDS, self.rounds):
            last = failed[max(failed)]
            in_a_row = f"{self._unmeasured_rounds} rounds in a row"
            raise FedtailorError(
                f"{self.title}: no client could be evaluated in {in_a_row}: {last.error}."
            ) from last.cause

    def _news(self, why: Mapping[int, str], failed: Mapping[int, Reply]) -> list[list[int]]:
        """Group the clients that are to be named by their fault. An exception is told once a run, of whomever; a
        client that only does not answer is named whenever it goes silent."""
        news: dict[str, list[int]] = {}
        for client, reply in failed.items():
            gone = reply.cause is None and client not in self._away
            if gone or why[client] not in self._told:
                news.setdefault(why[client], []).append(client)
        self._told |= news.keys()
        self._away |= {client for client, reply in failed.items() if reply.cause is None}
        return list(news.values())

    def _names(self, clients: Sequence[int]) -> str:
        return f"client{'s' if len(clients) > 1 else ''} {', '.join(self.names[client] for client in clients)}"

    def _who(self, round: int, clients: Sequence[int]) -> str:
        return f"{self.title}, round {round}: {self._names(clients)}"

    def _tell(self, round: int, clients: Sequence[int], what: str, server: Server) -> None:
        message = f"{self._who(round, clients)} {what}."
        self._lines += 1
        server.warnings[f"failure {self._lines} in round {round}"] = message
        warn(message, ClientFailure)

    def _note(self, about: str, message: str, server: Server) -> None:
        """Say something once a run."""
        if about not in server.warnings:
            server.warnings[about] = message
            warn(message, ClientNote)

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

    def _find_suspect(self, round: int, uploads: Mapping[int, Mapping[str, float]]) -> None:
        """Look for an upload that is far larger than the others' of this round."""
        for name in {name for sizes in uploads.values() for name in sizes}:
            of_name = {client: sizes[name] for client, sizes in uploads.items() if name in sizes}
            client = max(of_name, key=lambda client: of_name[client])
            others = [size for other, size in of_name.items() if other != client]
            usual = statistics.median(others) if others else 0.0
            if usual and (times := of_name[client] / usual) > OUTLIER:
                whose = f"client {self.names[client]}'s {name!r}"
                self._suspect = f"; {whose} was {times:.3g} times as large as others' in round {round}"
