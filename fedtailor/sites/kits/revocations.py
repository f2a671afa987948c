"""Revoked certificates: those of a site that were signed before a moment. The roster reads the list: NVFlare has none.

A site whose key was stolen is revoked, makes a new key, and its certificate of today is none of those.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from cryptography.x509 import Certificate
from pydantic import AwareDatetime, TypeAdapter, ValidationError

from fedtailor._common.errors import FedtailorError, unknown
from fedtailor._common.files import write_atomically
from fedtailor.sites.plan import read_plan

REVOKED = Path("local") / "revoked.json"  # in the server's kit
_FORMAT = TypeAdapter(dict[str, AwareDatetime])


def revoke(kits: Path, site: str) -> Path:
    """Revoke all certificates that a site has so far; return the list, which is to be in the server's kit."""
    plan = read_plan(kits / "server" / "federation.toml", names=False)
    if site not in plan.sites:
        raise unknown("site in the plan", site, plan.sites)
    path = kits / "server" / "kit" / REVOKED
    revoked = {**read_revoked(path), site: datetime.now(UTC)}
    write_atomically(path, _FORMAT.dump_json(revoked, indent=2))
    path.chmod(0o600)
    return path


def read_revoked(path: Path) -> dict[str, datetime]:
    """Read a list; nobody is revoked without one, and a damaged one is an error."""
    try:
        return _FORMAT.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError):
        raise FedtailorError(f"The list of revoked certificates, {path}, cannot be read: bring it back.") from None


def is_revoked(revoked: Mapping[str, datetime], name: str, issued: datetime) -> bool:
    """Find out whether a certificate of this name, valid from `issued`, is revoked."""
    return name in revoked and issued <= revoked[name]


def issued(certificate: Certificate) -> datetime:
    """The time from which a certificate is valid: that of its signing."""
    return certificate.not_valid_before_utc
