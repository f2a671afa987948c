"""Revoked, expired and of another version: sites that a running federation refuses (`make test-sites`)."""

import re
import time
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("nvflare") is None:
    pytest.skip("the extra nvflare is not installed", allow_module_level=True)

from fedtailor._common.version import __version__
from fedtailor.sites.kits import revoke
from tests.sites.attacking import Attacked, handshake
from tests.sites.loopback import Deployed, impossible, wait_for
from tests.sites.parts import tables

pytestmark = [pytest.mark.sites, pytest.mark.skipif(bool(impossible()), reason=impossible() or "possible")]
REVOKED = "the certificate of south is revoked"


def connected(federation: Attacked) -> str:
    """The sites that the server counts as connected."""
    (answer,) = federation.admin(("command", "check_status server"))
    return str(answer)


def test_a_revoked_certificate(tmp_path: Path) -> None:
    """The site at work is thrown out, and does not come back: not by its token, after a restart of the server, or by
    registering. With a new certificate it does."""
    with Attacked(tmp_path) as federation:
        federation.start_server()
        federation.start_sites()
        federation.wait_for_sites()
        assert "south" in connected(federation)
        revoke(federation.kits, "south")
        wait_for(lambda: REVOKED in federation.said("server"), 60, "the refusal of a sign of life")
        wait_for(lambda: "south" not in connected(federation), 120, "the end of south")
        assert "north" in connected(federation)

        federation.kill_all("server")
        refused = federation.said("server").count(REVOKED)
        federation.start_server()
        wait_for(lambda: federation.said("server").count(REVOKED) > refused, 120, "the refusal after a restart")
        wait_for(lambda: "north" in connected(federation), 120, "north")
        assert "south" not in connected(federation)

        federation.kill_all("south")
        federation.start_site("south")
        refusal = f"failed to verify client identity: NotAuthenticated: {REVOKED}"
        wait_for(lambda: refusal in federation.said("server"), 120, "the refusal of a registration")
        wait_for(lambda: "The server refuses this site" in federation.said("south"), 120, "what south is told")
        assert "south" not in connected(federation)
        federation.kill_all("south")

        time.sleep(1)  # certificates have whole seconds
        renewed = federation.participant(federation.root / "south" / "kit", "south")
        federation.start_client("renewed", renewed, "south")
        wait_for(lambda: "Successfully registered" in federation.said("renewed"), 120, "the renewed certificate")
        time.sleep(10)  # signs of life of the new token count
        assert "south" in connected(federation)


def test_an_expired_certificate(tmp_path: Path) -> None:
    with Attacked(tmp_path) as federation:
        federation.start_server()
        own = federation.root / "south" / "kit"
        begun = datetime.now(UTC) - timedelta(days=361)
        kit = federation.participant(own, "south", not_valid_before=begun, not_valid_after=begun + timedelta(days=360))
        assert handshake(federation, "fresh", own, own / "startup" / "rootCA.pem") == 0
        assert handshake(federation, "over", kit, own / "startup" / "rootCA.pem") == 1
        assert "CERTIFICATE_VERIFY_FAILED: certificate has expired" in federation.said("server")
        own.rename(own.with_name("fresh"))
        kit.rename(own)
        federation.start_site("south")  # which does not even try
        assert federation.running["south"].wait(60) == 2
        said = " ".join(federation.said("south").split())
        assert re.search(
            r"The certificate of south in \S+ expired on .+: renew it with `fedtailor site request`\.", said
        )


def test_another_version(tmp_path: Path) -> None:
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "sitecustomize.py").write_text(
        "import fedtailor._common.version as version\nversion.__version__ = '0.0.9'\n"
    )
    with Deployed(tmp_path / "f", tables(("north", "south")), rounds=2) as federation:
        root = str(Path(__file__).parents[2])
        federation.start_site("north")
        federation.start_site("south", PYTHONPATH=f"{tmp_path / 'older'}:{root}")
        federation.start_driver()
        assert federation.running["driver"].wait(400) == 2
        said = " ".join(federation.said("driver").split())
        words = f"south: it has fedtailor '0.0.9', but the server '{__version__}': install the same on both."
        assert f"1 of 2 sites did not join: {words}" in said
