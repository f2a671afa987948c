"""Watching secure aggregation: whatever is opened must be the exact sum of what these sites held back."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from torch import Tensor

from fedtailor.client.secure_party import Party
from fedtailor.engines.channel import InMemory
from fedtailor.messages.letters import read_letter
from fedtailor.privacy.fixed_point import decoded
from fedtailor.server.aggregation.secure import SecureAggregator


@dataclass
class Sums:
    """What sites held back, and whose sums were opened or why not, round by round."""

    held: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by round and client
    opened: list[tuple[int, list[int]]] = field(default_factory=list)
    closed: list[tuple[int, str]] = field(default_factory=list)


@contextmanager
def watched() -> Iterator[Sums]:
    """Compare each sum that is opened with the sum of what its sites held back, as whole numbers modulo 2^64."""
    sums, begin, close = Sums(), Party.begin, SecureAggregator.close

    def beginning(party: Party, round: int, values: Tensor) -> Any:
        sums.held[round, party._number] = values.clone()
        return begin(party, round, values)

    def closing(self: SecureAggregator, *given: Any) -> None:
        close(self, *given)
        round = self._server.round
        if self._why:
            assert not self.clients
            sums.closed.append((round, self._why))
            return
        exact = [sum(column) for column in zip(*(sums.held[round, c].tolist() for c in self.clients), strict=True)]
        found = torch.cat([part.flatten() for part in self._summed.values()])
        assert torch.equal(found, decoded(torch.tensor(exact), len(self.participants))), "a wrong sum"
        assert len(self.clients) >= self.needs
        sums.opened.append((round, list(self.clients)))

    with patch.object(Party, "begin", beginning), patch.object(SecureAggregator, "close", closing):
        yield sums


@contextmanager
def on_the_way(change: Callable[[str, str, int, bytes, Callable[[], bytes]], bytes | str]) -> Iterator[list[bytes]]:
    """Change what happens to letters in memory: `change` gets the site's name, what is asked, the round, the letter,
    and a function that has it answered. All that reaches the server is written down."""
    reached: list[bytes] = []

    def ask(
        channel: InMemory, letters: Mapping[str, bytes], deadline: float | None
    ) -> Iterator[tuple[str, bytes | str]]:
        for name, letter in letters.items():
            asked = read_letter(letter)
            kind, round = str(asked.header.get("asked", asked.kind)), int(asked.header.get("round", 0))
            answered = change(name, kind, round, letter, lambda n=name, x=letter: channel._sites[n].answer(x))  # type: ignore[misc]
            if isinstance(answered, bytes):
                reached.append(answered)
            yield name, answered

    with patch.object(InMemory, "ask", ask):
        yield reached


@cache
def _key(name: str) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def certificate(name: str, root: str = "root", key: str = "", days: int = 30) -> bytes:
    """A certificate of a name, signed by a root; expired if `days` is not positive."""
    now, issuer = datetime.now(UTC), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, root)])
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(_key(key or name).public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=90))
        .not_valid_after(now + timedelta(days=days))
        .sign(_key(root), SHA256())
    )
    return made.public_bytes(Encoding.PEM)


def write_kit(site: Path, name: str, root: str = "root", certified: bytes = b"") -> None:
    """Write what secure aggregation needs of a site's kit: as NVFlare makes it, without NVFlare."""
    startup = site / "kit" / "startup"
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "client.crt").write_bytes(certified or certificate(name, root))
    (startup / "rootCA.pem").write_bytes(certificate(root, root))
    plain = _key(name).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (startup / "client.key").write_bytes(plain)
