"""Kits with NVFlare's real tools: keys made at sites and centrally, certificates, permissions, refusals."""

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra nvflare is not installed")

from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID

from fedtailor._common.errors import FedtailorError
from fedtailor._common.extras import install_command
from fedtailor.sites.kits import Sent, approve, doctor, install, make_kits, request_kit
from fedtailor.sites.kits.certificates import fingerprint_of, read_certificate
from fedtailor.sites.kits.exchange import make_request
from fedtailor.sites.kits.policies import GUARD, ROSTER, SERVER_CLASSES, SITE_CLASSES
from fedtailor.sites.plan import read_plan
from fedtailor.sites.site_file import read_site
from tests.cli.calling import Call, call, done, refusal
from tests.sites.kits import plan, write_plan

__all__ = ["call"]

SITES = ("cleveland", "long-beach")
PRIVATE = b"PRIVATE KEY"


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kits of which only the server's and the admin's keys are made."""
    here = tmp_path_factory.mktemp("coordinator")
    make_kits(write_plan(here), here / "kits")
    return here / "kits"


@pytest.fixture(scope="module")
def sent(coordinator: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Sent]]:
    """Each site's file, at the site, and the request that it made there."""
    made = {}
    for name in SITES:
        place = tmp_path_factory.mktemp(name) / "here"
        shutil.copytree(coordinator / name, place)
        made[name] = place / "site.toml", request_kit(place / "site.toml")
    return made


@pytest.fixture(scope="module")
def joined(coordinator: Path, sent: dict[str, tuple[Path, Sent]]) -> Path:
    """A site's file, after its kit is installed."""
    site, request = sent["cleveland"]
    answer = approve(coordinator, request.file, request.fingerprint)
    install(site, answer.file, answer.fingerprint)
    return site


@pytest.fixture(scope="module")
def central(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kits that were all made at once."""
    here = tmp_path_factory.mktemp("central")
    make_kits(plan(here), here / "kits", central=True)
    return here / "kits"


@pytest.fixture
def restored(coordinator: Path) -> Iterator[Path]:
    """The coordinator's directory, for a test that leaves answers in it."""
    before = set(coordinator.rglob("*"))
    yield coordinator
    for path in set(coordinator.rglob("*")) - before:
        path.unlink()


def all_kits(kits: Path) -> list[Path]:
    return sorted(path.parent for path in kits.rglob("startup"))


def check_kit(kit: Path, name: str, root: str) -> None:
    """Check a kit's certificate with openssl and with cryptography, its key and its permissions."""
    role = "server" if name == "localhost" else "client"
    certificate, key = kit / "startup" / f"{role}.crt", kit / "startup" / f"{role}.key"
    openssl = ["openssl", "verify", "-x509_strict", "-CAfile", str(kit / "startup" / "rootCA.pem"), str(certificate)]
    assert subprocess.run(openssl, capture_output=True, check=False).returncode == 0
    found = read_certificate(certificate)
    found.verify_directly_issued_by(read_certificate(kit / "startup" / "rootCA.pem"))
    assert fingerprint_of(read_certificate(kit / "startup" / "rootCA.pem")) == root
    assert found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == name
    assert (found.not_valid_after_utc - found.not_valid_before_utc).days in (359, 360)
    own = load_pem_private_key(key.read_bytes(), None)
    assert own.public_key() == found.public_key()
    for path in (kit, *kit.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_keys_of_server_and_admin_are_made_here_and_no_others(coordinator: Path) -> None:
    root = fingerprint_of(read_certificate(coordinator / "ca" / "rootCA.pem"))
    assert all_kits(coordinator) == [coordinator / "admin" / "kit", coordinator / "server" / "kit"]
    check_kit(coordinator / "server" / "kit", "localhost", root)
    check_kit(coordinator / "admin" / "kit", "coordinator@example.org", root)
    role = read_certificate(coordinator / "admin" / "kit" / "startup" / "client.crt").subject
    assert role.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)[0].value == "lead"
    keys = [path for path in coordinator.rglob("*") if path.is_file() and PRIVATE in path.read_bytes()]
    assert sorted(str(path.relative_to(coordinator)) for path in keys) == [
        "admin/kit/startup/client.key",
        "ca/rootCA.key",
        "server/kit/startup/server.key",
    ]
    assert (coordinator / "ca" / "rootCA.key").stat().st_mode & 0o777 == 0o600
    assert coordinator.stat().st_mode & 0o777 == (coordinator / "ca").stat().st_mode & 0o777 == 0o700


def test_a_site_makes_its_own_key_and_gets_a_kit(coordinator: Path, joined: Path) -> None:
    root = fingerprint_of(read_certificate(coordinator / "ca" / "rootCA.pem"))
    check_kit(joined.parent / "kit", "cleveland", root)
    assert not (joined.parent / "private" / "request").exists()  # the key is in the kit, and nowhere else
    assert doctor(joined) == []
    assert doctor(coordinator) == []


def test_the_key_never_leaves_the_site(coordinator: Path, joined: Path, sent: dict[str, tuple[Path, Sent]]) -> None:
    secret = (joined.parent / "kit" / "startup" / "client.key").read_text().splitlines()[1].encode()
    left = [sent["cleveland"][1].file, coordinator / "cleveland" / "cleveland.answer.zip"]
    for file in left:
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                assert PRIVATE not in archive.read(name)
                assert secret not in archive.read(name)
    assert not [path for path in coordinator.rglob("*") if path.is_file() and secret in path.read_bytes()]


def test_another_fingerprint_is_refused(coordinator: Path, restored: Path, sent: dict[str, tuple[Path, Sent]]) -> None:
    site, request = sent["long-beach"]
    wrong = request.fingerprint[:-2] + ("00" if request.fingerprint[-2:] != "00" else "11")
    with pytest.raises(FedtailorError, match="another fingerprint than the one you gave"):
        approve(coordinator, request.file, wrong)
    assert not (coordinator / "long-beach" / "long-beach.answer.zip").exists()
    answer = approve(coordinator, request.file, request.fingerprint.lower().removeprefix("sha256:"))
    for wrong in (request.fingerprint, "", answer.fingerprint[:-1]):
        with pytest.raises(FedtailorError, match="another fingerprint than the one you gave"):
            install(site, answer.file, wrong)
    assert not (site.parent / "kit").exists()


def test_a_request_of_another_name_is_refused(
    coordinator: Path, restored: Path, sent: dict[str, tuple[Path, Sent]], tmp_path: Path
) -> None:
    """A site of another plan, a name that is another's in the request's own words, a second request under one name."""
    write_plan(tmp_path, (coordinator / "server" / "federation.toml").read_text().replace("cleveland", "zurich"))
    (tmp_path / "site.toml").write_text('name = "zurich"\ndata = "x.csv"\n')
    with pytest.raises(FedtailorError, match="no site in the plan 'zurich'"):
        approve(coordinator, request_kit(tmp_path / "site.toml").file)

    forged = tmp_path / "forged.zip"
    with zipfile.ZipFile(sent["long-beach"][1].file) as source, zipfile.ZipFile(forged, "w") as target:
        for name in source.namelist():
            content = source.read(name).replace(b"long-beach", b"cleveland").replace(b"long_beach", b"cleveland")
            target.writestr(name.replace("long-beach", "cleveland"), content)
    with pytest.raises(FedtailorError, match="NVFlare's `cert approve` refused"):
        approve(coordinator, forged, again=True)

    first = approve(coordinator, sent["long-beach"][1].file)
    with pytest.raises(FedtailorError, match="has an answer already"):
        approve(coordinator, sent["long-beach"][1].file)
    assert approve(coordinator, sent["long-beach"][1].file, again=True) == first


def test_a_request_of_another_federation_is_refused(coordinator: Path, tmp_path: Path) -> None:
    write_plan(tmp_path, (coordinator / "server" / "federation.toml").read_text().replace('"heart"', '"lung"'))
    (tmp_path / "site.toml").write_text('name = "cleveland"\ndata = "x.csv"\n')
    with pytest.raises(FedtailorError, match="none of this federation: its project is 'lung', not 'heart'"):
        approve(coordinator, request_kit(tmp_path / "site.toml").file)


def test_an_answer_for_another_site_is_refused(
    coordinator: Path, restored: Path, sent: dict[str, tuple[Path, Sent]], joined: Path, tmp_path: Path
) -> None:
    answer = approve(coordinator, sent["long-beach"][1].file)
    own = tmp_path / "site"
    shutil.copytree(joined.parent, own, ignore=shutil.ignore_patterns("kit"))
    (own / "private" / "request").mkdir()
    with pytest.raises(FedtailorError, match="is for 'long-beach', and this site is 'cleveland'"):
        install(own / "site.toml", answer.file, answer.fingerprint)


def test_an_answer_to_another_request_is_refused(
    coordinator: Path, restored: Path, sent: dict[str, tuple[Path, Sent]], tmp_path: Path
) -> None:
    """The site's key is not the one that was signed."""
    own = tmp_path / "site"
    shutil.copytree(sent["long-beach"][0].parent, own, ignore=shutil.ignore_patterns("private"))
    request_kit(own / "site.toml")
    answer = approve(coordinator, sent["long-beach"][1].file)
    with pytest.raises(FedtailorError, match=r"NVFlare's `package` refused: .*request"):
        install(own / "site.toml", answer.file, answer.fingerprint)
    assert not (own / "kit").exists()


def test_all_at_once(central: Path) -> None:
    root = fingerprint_of(read_certificate(central / "server" / "kit" / "startup" / "rootCA.pem"))
    names = {"server": "localhost", "admin": "coordinator@example.org", **{site: site for site in SITES}}
    for folder, name in names.items():
        check_kit(central / folder / "kit", name, root)
    assert (central / "ca" / "cert.json").stat().st_mode & 0o777 == 0o600
    assert (central / "ca").stat().st_mode & 0o777 == central.stat().st_mode & 0o777 == 0o700
    assert doctor(central) == []
    assert "for trials only" in (central / "cleveland" / "README.md").read_text()
    with pytest.raises(FedtailorError, match="has no root key to sign with"):
        approve(central, central / "project.yml")


def test_what_a_site_is_sent(coordinator: Path) -> None:
    """Its page, the plan as it was written, and a file to fill in: nothing is secret."""
    here = coordinator / "cleveland"
    assert sorted(path.name for path in here.iterdir() if path.suffix != ".zip") == [
        "README.md",
        "federation.toml",
        "site.toml",
    ]
    assert "a comment that sites should see" in (here / "federation.toml").read_text()
    site = read_site(here / "site.toml")
    assert (site.name, site.kit, site.read_plan()) == ("cleveland", "kit", read_plan(here / "federation.toml"))
    page = (here / "README.md").read_text()
    assert len(page.splitlines()) <= 20
    assert "one outgoing connection, to localhost, port 8002" in page
    assert "port 8002, incoming" in (coordinator / "server" / "README.md").read_text()


@pytest.mark.parametrize("way", ["central", "coordinator"])
def test_policies(way: str, request: pytest.FixtureRequest, joined: Path) -> None:
    kits: Path = request.getfixturevalue(way)
    site = joined if way == "coordinator" else kits / "cleveland" / "site.toml"
    for kit, classes in ((kits / "server" / "kit", SERVER_CLASSES), (site.parent / "kit", SITE_CLASSES)):
        rights = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]
        assert {role: right for role, right in rights.items() if role != "lead"} == dict.fromkeys(
            ("project_admin", "org_admin", "member"), "none"
        )
        for never in ("byoc", "shell_commands", "operate", "download_job", "clone_job", "server-predeployed-flwr"):
            assert rights["lead"][never] == "none"
        assert rights["lead"]["submit_job"] == "n:coordinator@example.org"
        resources = json.loads((kit / "local" / "resources.json").read_text())
        assert resources["class_allow_list"] == classes
        assert "/tmp" not in (kit / "local" / "resources.json").read_text()
        assert not list(kit.rglob("*.sh"))
        assert not (kit / "local" / "authorization.json.default").exists()


def test_the_classes_that_jobs_may_name_are_there() -> None:
    from nvflare.fuel.utils.class_loader import load_class

    for path in (*SITE_CLASSES, *SERVER_CLASSES, GUARD, ROSTER):
        assert isinstance(load_class(path), type)


def test_refusals(coordinator: Path, joined: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FedtailorError, match="exists already, and nothing is written over"):
        make_kits(plan(tmp_path), coordinator)
    with pytest.raises(FedtailorError, match="A site cannot be called 'Admin'"):
        make_kits(plan(tmp_path, "name = 'x'\nsites = ['Admin']\nexperiment = {}"), tmp_path / "kits")
    assert not (tmp_path / "kits").exists()
    none = tmp_path / "none.zip"
    with pytest.raises(FedtailorError, match="There is no request"):
        approve(coordinator, none)
    none.write_bytes(b"no zip at all")
    with pytest.raises(FedtailorError, match=r"none.zip is no request of `fedtailor site request`"):
        approve(coordinator, none)
    with zipfile.ZipFile(none, "w") as archive:
        archive.writestr("request.json", "[]")
    with pytest.raises(FedtailorError, match=r"none.zip is no request of `fedtailor site request`"):
        approve(coordinator, none)
    with pytest.raises(FedtailorError, match=r"There is a kit in .* already"):
        install(joined, none, "")
    bare = tmp_path / "bare"
    shutil.copytree(coordinator / "long-beach", bare)
    with pytest.raises(FedtailorError, match="has not asked for a kit"):
        install(bare / "site.toml", none, "")
    text = (bare / "site.toml").read_text()
    (bare / "site.toml").write_text(text.replace("long-beach", "zurich"))
    with pytest.raises(FedtailorError, match="has no site 'zurich'"):
        request_kit(bare / "site.toml")


def test_a_second_request_does_not_replace_the_key(sent: dict[str, tuple[Path, Sent]]) -> None:
    site, _ = sent["long-beach"]
    key = (site.parent / "private" / "request" / "long-beach.key").read_bytes()
    with pytest.raises(FedtailorError, match="has asked already"):
        request_kit(site)
    assert (site.parent / "private" / "request" / "long-beach.key").read_bytes() == key
    assert (site.parent / "private").stat().st_mode & 0o777 == 0o700


def test_nothing_is_left_when_nvflare_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtailor.sites.kits.kit.ROOT_DAYS", -1)
    with pytest.raises(FedtailorError, match="NVFlare's `cert init` refused"):
        make_kits(plan(tmp_path), tmp_path / "kits")
    assert not (tmp_path / "kits").exists()


def test_without_nvflare() -> None:
    code = (
        "import sys; sys.modules['nvflare'] = None\n"
        "from fedtailor._common.errors import FedtailorError\n"
        "try:\n    import fedtailor.sites.kits\n"
        "except FedtailorError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"Real sites need NVFlare: install it with {install_command('nvflare')}.\n"


def test_the_tools_leave_nothing_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    make_request(plan(tmp_path), "cleveland", tmp_path / "request")  # of which NVFlare keeps a note
    assert not list((tmp_path / "home").iterdir())


def test_commands_of_both_sides(call: Call, coordinator: Path, restored: Path, tmp_path: Path) -> None:
    shutil.copytree(coordinator / "long-beach", tmp_path / "here")
    said = done(call("site", "request", "here/site.toml"))
    assert "The key of long-beach is made, and stays here." in said
    told = said.split()[-1]
    assert told.startswith("SHA256:")

    said = done(call("deploy", "approve", coordinator, "here/long-beach.request.zip"))
    assert told in said
    root = said.split()[-1]
    assert root == fingerprint_of(read_certificate(coordinator / "ca" / "rootCA.pem"))

    answer = coordinator / "long-beach" / "long-beach.answer.zip"
    assert "another fingerprint" in refusal(call, "site", "install", "here/site.toml", answer, "--fingerprint", told)
    assert "The kit is in here/kit." in done(call("site", "install", "here/site.toml", answer, "--fingerprint", root))
    assert done(call("deploy", "doctor", "here/site.toml")) == "here/site.toml: nothing found.\n"

    (tmp_path / "here" / "kit" / "startup" / "client.key").chmod(0o644)
    found = call("deploy", "doctor", "here")
    assert found.code == 1
    assert "1. Other users of the machine can read here/kit/startup/client.key (mode 0644)." in found.out
    assert "Mend it: chmod 600 here/kit/startup/client.key" in found.out


def test_command_of_the_coordinator(call: Call, tmp_path: Path) -> None:
    write_plan(tmp_path)
    said = done(call("deploy", "plan", "federation.toml", "--out", "kits", "--central"))
    assert "The kits of heart are in kits: 2 sites, the server and its admin." in said
    assert "All of the catalogue: method pgfed, network mlp, loss cross-entropy." in said
    assert "use it for trials only" in said
    assert "kits exists already" in refusal(call, "deploy", "plan", "federation.toml", "--out", "kits")
    named = (tmp_path / "federation.toml").read_text().replace('"pgfed"', '"hospital.methods:Ours"')
    (tmp_path / "federation.toml").write_text(named)
    said = done(call("deploy", "plan", "federation.toml", "--out", "others", "--central"))
    assert "Named code: hospital.methods:Ours. Each site must have it installed, and name it under allow" in said
