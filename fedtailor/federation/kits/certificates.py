"""Certificates: read, and compared with what they should be."""

from pathlib import Path
from typing import TYPE_CHECKING

from fedtailor.errors import FedtailorError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate


def read_certificate(path: Path, content: bytes | None = None) -> "Certificate":
    """Read a certificate from a file, or from its content."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes() if content is None else content)
    except FileNotFoundError:
        raise FedtailorError(f"There is no certificate {path}.") from None
    except ValueError:
        raise FedtailorError(f"{path} has no certificate, or a damaged one.") from None


def fingerprint_of(certificate: "Certificate") -> str:
    """The fingerprint of a certificate, as people read it to each other."""
    from cryptography.hazmat.primitives.hashes import SHA256

    return "SHA256:" + certificate.fingerprint(SHA256()).hex(":").upper()
