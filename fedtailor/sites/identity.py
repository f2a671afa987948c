"""A real site's identity in secure aggregation: the key and the certificate of its kit.

Other sites know it by the plan: its name is in the roster, and its certificate was signed by the root whose fingerprint
each of them was told when its kit was installed. The server has no part in that, and cannot put keys of its own between
two sites.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import read_sealed, seal, write_atomically

OPENED = "opened.json"  # in the directory of a run


class Certified:
    """The identity of a site with this start-up kit."""

    def __init__(self, kit: Path, name: str) -> None:
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from cryptography.x509 import load_pem_x509_certificate

        startup = kit / "startup"
        try:
            self.certificate = (startup / "client.crt").read_bytes()
            self._root = load_pem_x509_certificate((startup / "rootCA.pem").read_bytes())
            key = load_pem_private_key((startup / "client.key").read_bytes(), None)
        except (OSError, ValueError, TypeError):
            raise FedtailorError(
                f"Secure aggregation needs the site's keys, and {kit} is no kit of a site (see `fedtailor deploy "
                "doctor`)."
            ) from None
        if not isinstance(key, RSAPrivateKey):
            raise FedtailorError(f"The key in {startup} is not of RSA, as NVFlare makes it: make the kit again.")
        self._key = key
        if not self.verify(name, self.certificate, self.sign(b"trial"), b"trial"):
            raise FedtailorError(f"The key and the certificate in {startup} are not {name}'s: take the right kit.")

    def sign(self, content: bytes) -> bytes:
        """Sign with the kit's key: RSA-PSS with SHA-256."""
        return bytes(self._key.sign(content, *_scheme()))

    def verify(self, name: str, certificate: bytes, signature: bytes, content: bytes) -> bool:
        """Find out whether the certificate is this site's, is of the same root and valid now, and signed this."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
        from cryptography.x509 import load_pem_x509_certificate
        from cryptography.x509.oid import NameOID

        try:
            found = load_pem_x509_certificate(certificate)
            found.verify_directly_issued_by(self._root)
            names = [entry.value for entry in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
            if names != [name] or not found.not_valid_before_utc <= datetime.now(UTC) <= found.not_valid_after_utc:
                return False
            key = found.public_key()
            if not isinstance(key, RSAPublicKey):
                return False
            key.verify(signature, content, *_scheme())
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True


def _scheme() -> tuple[Any, Any]:
    from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
    from cryptography.hazmat.primitives.hashes import SHA256

    return PSS(MGF1(SHA256()), PSS.DIGEST_LENGTH), SHA256()


class Opened:
    """Whose sum was opened in each round of a run, in a file: a restart does not make a site forget it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / OPENED

    def __call__(self, round: int, survivors: str) -> str:
        """Remember whose sum is opened, unless a sum of this round was opened before; return what counts."""
        rounds: dict[str, str] = {}
        if self._path.exists():
            rounds = dict(read_sealed(self._path, _rounds))
        if (known := rounds.setdefault(str(round), survivors)) == survivors:
            write_atomically(self._path, seal({"rounds": rounds}))
        return known


def _rounds(content: bytes) -> dict[str, str]:
    import json

    return dict(json.loads(content)["rounds"])
