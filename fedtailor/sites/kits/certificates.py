"""Certificates: read, and compared with what they should be. Needs the extra `nvflare`, which brings cryptography."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509 import Certificate, load_pem_x509_certificate
from cryptography.x509.oid import NameOID

from fedtailor._common.errors import FedtailorError
from fedtailor.sites.kits.findings import Finding

SOON = 30  # days before its end in which a certificate should be renewed


def read_certificate(path: Path, content: bytes | None = None) -> Certificate:
    """Read a certificate from a file, or from its content."""
    try:
        return load_pem_x509_certificate(path.read_bytes() if content is None else content)
    except FileNotFoundError:
        raise FedtailorError(f"There is no certificate {path}.") from None
    except ValueError:
        raise FedtailorError(f"{path} has no certificate, or a damaged one.") from None


def fingerprint_of(certificate: Certificate) -> str:
    """The fingerprint of a certificate, as people read it to each other."""
    return "SHA256:" + certificate.fingerprint(SHA256()).hex(":").upper()


def check_certificates(startup: Path, role: str, name: str | None) -> Iterator[Finding]:
    """Check the certificate of a kit: its time, its owner, its key, and the root that signed it."""
    root, own = read_certificate(startup / "rootCA.pem"), read_certificate(startup / f"{role}.crt")
    how = "site request" if (startup / "fed_client.json").exists() else "deploy renew"
    yield from check_time(own, startup / f"{role}.crt", f"renew it with `fedtailor {how}`.")
    yield from check_time(root, startup / "rootCA.pem", "make all kits again: every certificate hangs on it.")
    again = "make the kit again."
    try:
        own.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        yield Finding("root", f"{startup / role}.crt was not signed by the root in {startup / 'rootCA.pem'}.", again)
    if name and name != (said := _common_name(own)):
        yield Finding("name", f"{startup / role}.crt is for {said!r}, and should be for {name!r}.", again)
    try:
        key = load_pem_private_key((startup / f"{role}.key").read_bytes(), None)
        matches = _public(key.public_key()) == _public(own.public_key())
    except (OSError, ValueError, TypeError):
        matches = False
    if not matches:
        yield Finding("pair", f"{startup / role}.key is missing, damaged, or not the certificate's.", again)


def check_time(certificate: Certificate, path: Path, mend: str) -> Iterator[Finding]:
    """Check whether a certificate is over, or soon will be."""
    now, end = datetime.now(UTC), certificate.not_valid_after_utc
    if now > end or now < certificate.not_valid_before_utc:
        yield Finding(
            "expired", f"{path} is valid from {certificate.not_valid_before_utc:%d %B %Y} to {end:%d %B %Y}.", mend
        )
    elif now + timedelta(days=SOON) > end:
        yield Finding("ends", f"{path} is valid only until {end:%d %B %Y}.", mend)


def _common_name(certificate: Certificate) -> str:
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def _public(key: Any) -> bytes:
    return bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
