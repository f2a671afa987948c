"""A plan and sites for the tests of kits."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedtailor.sites.plan import Plan, read_plan

PLAN = """
name = "heart"  # a comment that sites should see
server = "localhost"
port = 8002
sites = ["cleveland", "long-beach"]
classes = ["no", "yes"]
[experiment]
method = "pgfed"
rounds = 3
"""


def write_plan(folder: Path, text: str = PLAN) -> Path:
    """Write a plan."""
    path = folder / "federation.toml"
    path.write_text(text)
    return path


def plan(folder: Path, text: str = PLAN) -> Plan:
    """The plan, read."""
    return read_plan(write_plan(folder, text))


def moved(kits: Path, name: str, to: Path) -> Path:
    """Take a site's directory to the site, as mail does; return the site's file there."""
    (kits / name).rename(to / name)
    return to / name / "site.toml"


def certificate_until(kits: Path, kit: Path, days: float) -> None:
    """Give a kit a certificate that ends in some days, signed by the same root."""
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

    from fedtailor.sites.kits.certificates import read_certificate

    root = read_certificate(kit / "startup" / "rootCA.pem")
    key = load_pem_private_key(json.loads((kits / "ca" / "cert.json").read_text())["root_pri_key"].encode(), None)
    own, end = read_certificate(kit / "startup" / "client.crt"), datetime.now(UTC) + timedelta(days=days)
    made = x509.CertificateBuilder(
        root.subject, own.subject, own.public_key(), own.serial_number, end - timedelta(days=90), end
    ).sign(key, SHA256())  # type: ignore[arg-type]
    (kit / "startup" / "client.crt").write_bytes(made.public_bytes(Encoding.PEM))
