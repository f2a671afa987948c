"""Keys over time: renewed in place, revoked by a list, refused by name when they are over."""

import json
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra nvflare is not installed")

from fedtailor._common.errors import FedtailorError
from fedtailor.sites.kits import approve, doctor, install, make_kits, renew_kits, request_kit, revoke
from fedtailor.sites.kits.certificates import fingerprint_of, read_certificate
from fedtailor.sites.kits.revocations import REVOKED, is_revoked, issued, read_revoked
from fedtailor.sites.nvflare.launch import check_kit
from tests.cli.calling import Call, call, done, refusal
from tests.cli.calling import contents as all_files
from tests.sites.kits import certificate_until, write_plan

__all__ = ["call"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A coordinator's kits, and a site with a kit and files of its own."""
    here = tmp_path_factory.mktemp("federation")
    make_kits(write_plan(here), here / "kits")
    shutil.copytree(here / "kits" / "cleveland", here / "site")
    site = here / "site" / "site.toml"
    request = request_kit(site)
    answer = approve(here / "kits", request.file, request.fingerprint)
    install(site, answer.file, answer.fingerprint)
    for name in ("secret", "ledger.json", "runs/heart-1/state"):
        (here / "site" / "private" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "site" / "private" / name).write_text(name)
    return here / "kits", site


def test_a_site_renews_its_certificate_and_keeps_all_else(federation: tuple[Path, Path]) -> None:
    kits, site = federation
    before = all_files(site.parent / "private")
    old = read_certificate(site.parent / "kit" / "startup" / "client.crt")
    request = request_kit(site)  # while the site works
    answer = approve(kits, request.file, request.fingerprint, again=True)
    with pytest.raises(FedtailorError, match="give --again if this is to take its place"):
        install(site, answer.file, answer.fingerprint)
    kit = site.parent / "kit"
    process = subprocess.Popen([sys.executable, "-c", "input()", "nvflare", str(kit.resolve())], stdin=subprocess.PIPE)
    try:
        while str(kit) not in Path(f"/proc/{process.pid}/cmdline").read_text():
            time.sleep(0.01)
        with pytest.raises(FedtailorError, match="A process runs with the kit"):
            install(site, answer.file, answer.fingerprint, again=True)
    finally:
        process.kill()
        process.communicate()
    assert read_certificate(kit / "startup" / "client.crt") == old
    install(site, answer.file, answer.fingerprint, again=True)
    new = read_certificate(kit / "startup" / "client.crt")
    assert new.public_key() != old.public_key()
    assert issued(new) >= issued(old)
    assert all_files(site.parent / "private") == before
    assert {path.name for path in site.parent.iterdir()} == {
        *("README.md", "federation.toml", "site.toml", "private", "kit", "cleveland.request.zip")
    }
    assert doctor(site) == []


def test_the_server_and_the_admin_get_new_keys_of_the_same_root(federation: tuple[Path, Path]) -> None:
    kits, site = federation
    revoke(kits, "long-beach")
    parts = {"server": "server", "admin": "client"}
    before = {name: read_certificate(kits / name / "kit" / "startup" / f"{role}.crt") for name, role in parts.items()}
    root = fingerprint_of(read_certificate(kits / "server" / "kit" / "startup" / "rootCA.pem"))
    assert renew_kits(kits).name == "heart"
    for name, role in parts.items():
        startup = kits / name / "kit" / "startup"
        assert read_certificate(startup / f"{role}.crt").public_key() != before[name].public_key()
        assert fingerprint_of(read_certificate(startup / "rootCA.pem")) == root
    assert list(read_revoked(kits / "server" / "kit" / REVOKED)) == ["long-beach"]
    assert doctor(kits) == doctor(site) == []


def test_a_list_says_which_certificates_no_longer_count(federation: tuple[Path, Path], tmp_path: Path) -> None:
    kits, site = federation
    own = read_certificate(site.parent / "kit" / "startup" / "client.crt")
    path = revoke(kits, "cleveland")
    revoked = read_revoked(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert is_revoked(revoked, "cleveland", issued(own))
    assert not is_revoked(revoked, "cleveland", datetime.now(UTC) + timedelta(seconds=1))
    assert not is_revoked(revoked, "zurich", issued(own))
    with pytest.raises(FedtailorError, match="no site in the plan 'zurich'"):
        revoke(kits, "zurich")
    assert read_revoked(tmp_path / "none.json") == {}
    for text in ("", "[]", '{"cleveland": true}', '{"cleveland": "2026-01-01T00:00:00"}'):
        (tmp_path / "list.json").write_text(text)
        with pytest.raises(FedtailorError, match="cannot be read"):  # so nobody is let in
            read_revoked(tmp_path / "list.json")


@pytest.fixture
def central(tmp_path: Path) -> Path:
    make_kits(write_plan(tmp_path), tmp_path / "kits", central=True)
    return tmp_path / "kits"


def test_a_certificate_that_is_over_is_refused_by_name(call: Call, central: Path) -> None:
    kit = central / "cleveland" / "kit"
    check_kit(kit, "client", "cleveland")
    certificate_until(central, kit, -1)
    (central / "cleveland" / "patients.csv").write_text("age,diagnosis\n")
    said = refusal(call, "site", "start", central / "cleveland" / "site.toml")
    ended = datetime.now(UTC) - timedelta(days=1)
    assert said == (
        f"The certificate of cleveland in {kit} expired on {ended:%d %B %Y}: renew it with `fedtailor site request`."
    )
    certificate_until(central, central / "admin" / "kit", -1)
    said = refusal(call, "deploy", "run", central / "server" / "federation.toml")
    assert f"The certificate of coordinator@example.org in {central / 'admin' / 'kit'} expired on " in said
    assert said.endswith("renew it with `fedtailor deploy renew`.")
    assert "has no root key to sign with" in refusal(call, "deploy", "renew", central)


def test_the_coordinator_is_warned_of_a_sites_certificate(
    federation: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kits, _ = federation
    assert doctor(kits) == []
    monkeypatch.setattr("fedtailor.sites.kits.certificates.SOON", 361)
    mends = [found.mend for found in doctor(kits) if found.check == "ends"]
    assert "have cleveland renew it: `fedtailor site request`." in mends
    assert "renew it with `fedtailor deploy renew`." in mends


def test_commands(call: Call, central: Path) -> None:
    said = done(call("deploy", "revoke", central, "cleveland"))
    assert said.startswith(
        f"All certificates of cleveland so far are revoked, by {central}/server/kit/local/revoked.json."
    )
    assert list(json.loads((central / "server" / "kit" / "local" / "revoked.json").read_text())) == ["cleveland"]
    assert doctor(central) == []
