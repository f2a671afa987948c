"""Secure aggregation at a site: its upload leaves under masks that cancel in the sum (Bonawitz et al. 2017).

A training's upload stays here; what leaves in its place are public keys, signed. Then four steps, each once and in this
order: shares of the secrets behind the masks, sealed for each other site; the masked upload; a signature that says
whose sum is to be opened; and, against enough of these signatures, one share of each site. Double masking: of a site
in the sum its own mask's share, of one that is gone the share of its key, and never both. All secrets are of one
training, in memory alone: a site that was restarted has none, and counts as gone.

The server is not believed. Who may take part follows from the experiment, keys count by signatures of the sites, and
no sum of fewer than the threshold is opened.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedtailor.messages import Agree, Masked, Message, Open, Request, Shares, State, as_bytes, as_tensor, parted
from fedtailor.messages.letters import FaultError
from fedtailor.privacy.masks import (
    KEYS,
    Words,
    add_mask,
    digest_of,
    need_cryptography,
    new_seed,
    pair_mask,
    public_keys,
    sealed,
    sealing_key,
    threshold,
    unsealed,
)
from fedtailor.privacy.secret_shares import BYTES, shared

TITLE = b"fedtailor secure aggregation 1\n"
SIGNATURE = 256  # bytes
STEPS: tuple[type[Request], ...] = (Shares, Masked, Agree, Open)


class Identity(Protocol):
    """A way to prove who one is to other sites."""

    certificate: bytes

    def sign(self, content: bytes) -> bytes:
        """Sign in one's own name."""

    def verify(self, name: str, certificate: bytes, signature: bytes, content: bytes) -> bool:
        """Find out whether the site of this name signed this."""


@dataclass
class Pinned:
    """The identity of a simulated site: everybody's keys are known to all before the first round. A signature has the
    length of a certificate's, so that bytes count alike."""

    key: Any
    roster: Mapping[str, Any]
    certificate: bytes = b""

    def sign(self, content: bytes) -> bytes:
        """Sign with Ed25519."""
        return bytes(self.key.sign(content)).ljust(SIGNATURE, b"\0")

    def verify(self, name: str, certificate: bytes, signature: bytes, content: bytes) -> bool:
        """Compare with the pinned key."""
        from cryptography.exceptions import InvalidSignature

        try:
            self.roster[name].verify(signature.removesuffix(bytes(SIGNATURE - 64)), content)
        except InvalidSignature:
            return False
        return True


def pinned(names: Sequence[str], certificate: bytes = b"") -> dict[str, Pinned]:
    """Make the identities of simulated sites."""
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    keys = {name: Ed25519PrivateKey.generate() for name in names}
    roster = {name: key.public_key() for name, key in keys.items()}
    return {name: Pinned(key, roster, certificate) for name, key in keys.items()}


@dataclass
class _Session:
    """The secrets and the knowledge of a site between a training and the opening of its sum."""

    round: int
    values: Tensor  # the upload, as whole numbers
    called: list[int]  # the clients that take part in this round
    sealing: bytes = field(default_factory=new_seed)  # of the key that shares are sealed with
    pairs: bytes = field(default_factory=new_seed)  # of the key from which come the masks in common with others
    own: bytes = field(default_factory=new_seed)  # of this site's own mask
    steps: int = 0  # that were answered
    keys: dict[int, bytes] = field(default_factory=dict)
    certificates: dict[int, bytes] = field(default_factory=dict)
    digest: bytes = b""  # of all keys of the round: two sites with different ones have nothing in common
    kept: dict[int, bytes] = field(default_factory=dict)  # this site's own shares of its secrets
    sealed: dict[int, bytes] = field(default_factory=dict)  # others' for it
    survivors: list[int] = field(default_factory=list)

    @property
    def public(self) -> bytes:
        """Both public keys, and a commitment to the site's own mask."""
        return public_keys(self.sealing, self.pairs, self.own)

    @property
    def threshold(self) -> int:
        return threshold(len(self.called))


class Party:
    """One site in secure aggregation. `called` says who takes part in a round. `opened` remembers whose sum was opened
    in a round, and returns what it remembered first: a round that is done again is opened for the same sites only, as
    the difference of two sums would be an upload."""

    def __init__(
        self,
        run: str,
        names: Sequence[str],
        number: int,
        identity: Identity,
        called: Callable[[int], list[int]],
        opened: Callable[[int, str], str] | None = None,
    ) -> None:
        self._run, self._names, self._number = run, names, number
        self._identity, self._called = identity, called
        remembered: dict[int, str] = {}
        self._opened = opened or remembered.setdefault
        self._session: _Session | None = None

    def parties(self, round: int) -> int:
        """Count the sites that take part in a round."""
        return len(self._called(round))

    def begin(self, round: int, values: Tensor) -> State:
        """Hold an upload back; return the keys that leave in its place. What was held before is forgotten."""
        session = self._session = _Session(round, values, self._called(round))
        if self._number not in session.called:
            raise FaultError("refused", f"This site does not take part in round {round}.")
        signature = self._identity.sign(self._text(session, self._number, session.public))
        content = {"key": session.public, "signature": signature, "certificate": self._identity.certificate}
        return {name: as_tensor(each) for name, each in content.items()}

    def answer(self, request: Request) -> State:
        """Take the next step. One that is not the next ends the session, and nothing of it is left to be asked for."""
        session, self._session = self._session, None
        if session is None or session.round != request.round:
            raise FaultError("secure", f"Round {request.round} of secure aggregation is not open here (any more).")
        if not isinstance(request, STEPS[session.steps]):
            raise FaultError("refused", f"The server asks for {type(request).__name__} out of turn.")
        session.steps += 1
        step = (self._shares, self._masked, self._agree, self._open)[session.steps - 1]
        try:
            answer = step(session, request.message)
        except (ValueError, KeyError, TypeError) as error:
            raise FaultError("letter", f"The letter of secure aggregation is wrong: {error}") from None
        self._session = session if session.steps < len(STEPS) else None
        return answer

    # --- the steps ---

    def _shares(self, session: _Session, message: Message) -> State:
        """Check everybody's keys, and seal shares of both secrets for each site."""
        numbers = sorted({int(name.partition("/")[0]) for name in message})
        self._check(session, numbers, session.called)
        for number, given in parted(message, numbers).items():
            key, signature, certificate = (as_bytes(given[name]) for name in ("key", "signature", "certificate"))
            signed = self._identity.verify(
                self._names[number], certificate, signature, self._text(session, number, key)
            )
            if len(key) != KEYS or not signed:
                raise FaultError("refused", f"The keys of {self._names[number]} are not signed by it.")
            session.keys[number], session.certificates[number] = key, certificate
        if session.keys[self._number] != session.public:
            raise FaultError("refused", "The server has other keys of this site than its own.")
        session.digest = digest_of(session.keys)
        places = [number + 1 for number in numbers]
        own, pairs = (shared(seed, session.threshold, places) for seed in (session.own, session.pairs))
        leaving: State = {}
        for number in numbers:
            both = own[number + 1] + pairs[number + 1]
            if number == self._number:
                session.kept = {number: both}
            else:
                about = self._about(session, self._number, number)
                leaving[str(number)] = as_tensor(sealed(self._sealing_key(session, number), both, about))
        return leaving

    def _masked(self, session: _Session, message: Message) -> State:
        """Mask the upload: with the site's own mask, and with one for each site that has shared its secrets."""
        session.sealed = {int(name): as_bytes(tensor) for name, tensor in message.items()}
        numbers = sorted({*session.sealed, self._number})
        self._check(session, numbers, [*session.keys])
        total: Words = session.values.numpy().view(np.uint64).copy()
        session.values = torch.zeros(0, dtype=torch.int64)
        add_mask(total, session.own, 1)
        for number in numbers:
            if number != self._number:
                mask = pair_mask(session.pairs, session.keys[number], session.digest)
                add_mask(total, mask, 1 if self._number < number else -1)
        return {"masked": torch.from_numpy(total.view(np.int64))}

    def _agree(self, session: _Session, message: Message) -> State:
        """Sign whose sum is to be opened."""
        session.survivors = sorted({int(number) for number in message["survivors"].tolist()})
        self._check(session, session.survivors, [*session.sealed, self._number])
        digest = sha256(self._survivors(session.survivors)).hexdigest()
        if self._opened(session.round, digest) != digest:
            raise FaultError(
                "refused", f"Round {session.round} was opened for other sites before: the difference is an upload."
            )
        return {"signature": as_tensor(self._identity.sign(self._list_text(session)))}

    def _open(self, session: _Session, message: Message) -> State:
        """Hand out one share of each site, if enough of those in the sum signed for it."""
        signed = [
            number
            for number in session.survivors
            if str(number) in message
            and self._identity.verify(
                self._names[number],
                session.certificates[number],
                as_bytes(message[str(number)]),
                self._list_text(session),
            )
        ]
        if len(signed) < session.threshold:
            raise FaultError(
                "refused", f"Only {len(signed)} sites signed for this sum, and {session.threshold} are needed."
            )
        found = dict(session.kept)
        for number, content in session.sealed.items():
            about = self._about(session, number, self._number)
            both = unsealed(self._sealing_key(session, number), content, about)
            if both is not None and len(both) == 2 * BYTES:
                found[number] = both
        return {
            str(number): as_tensor(both[:BYTES] if number in session.survivors else both[BYTES:])
            for number, both in found.items()
        }

    # --- what is signed, sealed and agreed on ---

    def _check(self, session: _Session, numbers: Sequence[int], allowed: Sequence[int]) -> None:
        """Refuse sites that have no part in this, a list without this site, and one that is too short."""
        if not set(numbers) <= set(allowed) or self._number not in numbers:
            raise FaultError("refused", f"The sites of round {session.round} are not those that take part in it.")
        if len(numbers) < session.threshold:
            raise FaultError(
                "refused", f"The server asks for the sum of {len(numbers)} sites, fewer than {session.threshold}."
            )

    def _sealing_key(self, session: _Session, number: int) -> bytes:
        return sealing_key(session.sealing, session.keys[number], session.digest)

    def _text(self, session: _Session, number: int, key: bytes) -> bytes:
        """The text that a site signs for its keys."""
        return TITLE + f"keys\n{self._run}\n{session.round}\n{self._names[number]}\n".encode() + key

    def _list_text(self, session: _Session) -> bytes:
        """The text that a site signs for a sum."""
        about = TITLE + f"sum\n{self._run}\n{session.round}\n".encode() + session.digest
        return about + self._survivors(session.survivors)

    @staticmethod
    def _survivors(numbers: Sequence[int]) -> bytes:
        return ",".join(map(str, numbers)).encode()

    @staticmethod
    def _about(session: _Session, sender: int, receiver: int) -> bytes:
        return session.digest + b"%d>%d" % (sender, receiver)
