"""NVFlare's server and client as processes of ours: `python -m` this module is one of them, ended with its parent."""

import os
import runpy
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedtailor._common.errors import FedtailorError
from fedtailor.sites.nvflare.processes import end_with_parent

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

MODULE = "fedtailor.sites.nvflare.launch"
HEARTBEAT = 4  # seconds between a client's signs of life; the server misses it after 15
LONG = 50_000_000  # bytes of a log
Role = Literal["server", "client", "admin"]


def launch(role: Role, name: str, kit: Path, log: Path, **environment: str) -> "subprocess.Popen[bytes]":
    """Start NVFlare's server or client with the start-up kit of this name. What it prints is added to `log`."""
    check_kit(kit, role, name)
    if any(character.isspace() for character in str(kit.resolve())):
        raise FedtailorError(f"NVFlare cannot run in a path with spaces: move the kit of {name} out of {kit}.")
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, role, str(kit.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to handle
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )


def trim(log: Path) -> None:
    """Begin a long log anew. (NVFlare keeps logs of its own in the kit.)"""
    with suppress(FileNotFoundError):
        if log.stat().st_size > LONG:
            os.truncate(log, 0)


def check_kit(kit: Path, role: Role, name: str) -> None:
    """Refuse what is no kit, that of another participant, and one whose certificate is over."""
    found, _ = identity(kit, role)
    if found != name:
        raise FedtailorError(f"The kit in {kit} is that of {found}, and not of {name}: take the right one.")
    if (end := certificate(kit, role).not_valid_after_utc) < datetime.now(UTC):
        how = "`fedtailor site request`" if role == "client" else "`fedtailor deploy renew`"
        raise FedtailorError(f"The certificate of {name} in {kit} expired on {end:%d %B %Y}: renew it with {how}.")


def certificate(kit: Path, role: str) -> "Certificate":
    """The certificate of a kit."""
    from cryptography import x509

    file = kit / "startup" / ("server.crt" if role == "server" else "client.crt")
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError):
        raise FedtailorError(
            f"{kit} is no kit of a {role}: {file} is missing or damaged. See `fedtailor deploy doctor`."
        ) from None


def identity(kit: Path, role: str) -> tuple[str, str]:
    """The name and the organisation that the certificate of a kit says."""
    from cryptography.x509.oid import NameOID

    subject = certificate(kit, role).subject
    found = [subject.get_attributes_for_oid(kind) for kind in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME)]
    name, organisation = (str(values[0].value) if values else "" for values in found)
    return name, organisation


def main() -> None:
    """Be NVFlare's server or client until it ends."""
    role, kit = sys.argv[1], Path(sys.argv[2])
    end_with_parent()
    name, organisation = identity(kit, role)
    module = f"nvflare.private.fed.app.{role}.{role}_train"
    own = [] if role == "server" else [f"uid={name}", f"heart_beat_interval={HEARTBEAT}"]
    settings = ["secure_train=true", f"org={organisation}", "config_folder=config", *own]
    sys.argv = [module, "-m", str(kit), "-s", f"fed_{role}.json", "--set", *settings]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
