"""Letters of work at a site: read, checked, done, answered. Of what goes wrong, only the kind is told.

The commit rule: a letter names the version of the state that counts. The site works with exactly that one, whatever
came after it, makes the new one durable before it answers, and keeps none but those that the server may still name.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from fedtailor._common.errors import FedtailorError, lacks_memory
from fedtailor.client.secure_party import Party
from fedtailor.client.sites import Sites
from fedtailor.messages import EvaluateShared, Metrics, NotFinite, Reply, Secure, State, Train
from fedtailor.messages.letters import FaultError, Letter, as_answer, as_request, fault_letter, read_letter
from fedtailor.messages.store import StateLost
from fedtailor.method import weighted
from fedtailor.privacy.fixed_point import DoesNotFitError, encoded

DECIMALS = 2  # of rounded metrics


def silent(text: str) -> None:
    """Write nothing down."""


def free() -> None:
    """Spend nothing."""


@dataclass
class Answering:
    """One site's work by letters: its name and number, its own samples and states."""

    run: str
    name: str
    number: int
    sites: Sites
    tells: str = "exact"  # of its metrics: exact, rounded or none
    log: Callable[[str], None] = silent
    spend: Callable[[], None] = free  # called before each training: it may refuse
    party: Party | None = None  # in secure aggregation

    def work(self, letter: Letter) -> Letter:
        """Do what a letter asks."""
        request, durable = as_request(letter)
        if letter.text("run") != self.run or request.client != self.number:
            raise FaultError("letter", f"The letter is for client {request.client} of the run {letter.text('run')}.")
        store = self.sites.store
        try:
            if isinstance(request, Secure):
                if self.party is None:
                    raise FaultError("refused", "The server asks for secure aggregation, which the plan does not say.")
                return as_answer(letter, self.name, Reply(request.clients, self.party.answer(request)))
            if not isinstance(request, EvaluateShared):  # which works with no state, so names no version
                store.recall(self.number, request.version)
            if isinstance(request, Train):
                store.at(self.number, request.version)  # one that is lost is refused before anything is spent
                self.spend()
            reply = self.sites.handle(request)
            if reply.error:
                self.log(f"Round {request.round}: {reply.error}.")
                return as_answer(letter, self.name, reply, _kind(reply.cause))
            if isinstance(request, Train):
                if self.party is not None:
                    reply.upload = self._held(self.party, request.round, reply.upload)
                store.keep(self.number)
                store.forget(self.number, {durable, request.version, request.round})
        except FedtailorError as error:
            self.log(f"Round {request.round}: {error}")
            return as_answer(letter, self.name, Reply(request.clients), _kind(error))
        return as_answer(letter, self.name, replace(reply, measured=self._told(reply)))

    def _held(self, party: Party, round: int, upload: State) -> State:
        """Hold an upload back as whole numbers, and return the keys that leave in its place."""
        terms, parties = self.sites.terms, party.parties(round)
        alike = terms.privacy is not None and terms.privacy.level == "client"  # then all clients weigh the same
        n_samples = 1 if alike else int(self.sites.data.n_samples[self.number])
        try:
            sums = weighted(terms.method, upload, n_samples, terms.network.layout)
            return party.begin(round, torch.cat([encoded(name, x, parties) for name, x in sums.items()]))
        except DoesNotFitError as error:
            raise FaultError(f"range:{error.name.partition('/')[0]}", f"Round {round}: {error}.") from None

    def _told(self, reply: Reply) -> list[dict[str, Metrics]]:
        """The metrics as far as the site tells them."""
        if self.tells == "exact":
            return reply.measured
        if self.tells == "none":
            return []
        return [{split: rounded(metrics) for split, metrics in of.items()} for of in reply.measured]

    def answer(self, letter: bytes) -> bytes:
        """Answer a letter of work."""
        return answered(letter, self.name, self.work, self.log)


def answered(content: bytes, site: str, act: Callable[[Letter], Letter], log: Callable[[str], None]) -> bytes:
    """Answer a letter, come what may: a fault is written down here, and its kind is told."""
    try:
        return act(read_letter(content)).pack()
    except Exception as error:  # of any kind: the server gets an answer, and none of its text
        log(str(error) if isinstance(error, FedtailorError) else "".join(traceback.format_exception(error)))
        return fault_letter(site, _kind(error, "letter")).pack()


def rounded(metrics: Metrics) -> Metrics:
    """Round metrics to two decimals."""
    changed: dict[str, Any] = {
        each.name: round(value, DECIMALS)
        for each in fields(metrics)
        if isinstance(value := getattr(metrics, each.name), float)
    }
    return replace(metrics, **changed, more={name: round(value, DECIMALS) for name, value in metrics.more.items()})


def _kind(error: BaseException | None, otherwise: str = "work") -> str:
    """The kind of a fault."""
    if isinstance(error, FaultError):
        return error.kind
    if isinstance(error, StateLost):
        return "state"
    if isinstance(error, NotFinite):
        return "numbers"
    if lacks_memory(error):
        return "memory"
    return otherwise
