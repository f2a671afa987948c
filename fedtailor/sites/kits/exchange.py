"""Keys that are made where they are used: a site asks, the coordinator signs, the site installs.

A request and its answer go by mail or any other way: neither has a secret. Both sides read a fingerprint to each other
(by telephone), so that nobody in between can put keys of his own in their place.
"""

import hmac
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cryptography.x509 import Certificate

from fedtailor._common.errors import FedtailorError, shown, unknown
from fedtailor._common.files import make_directory, writing
from fedtailor.sites.kits.certificates import fingerprint_of, read_certificate
from fedtailor.sites.kits.policies import lock_away, secure, write_json
from fedtailor.sites.kits.project import DAYS, organisation, participant
from fedtailor.sites.kits.revocations import REVOKED
from fedtailor.sites.kits.tools import nvflare, processes_with
from fedtailor.sites.plan import Plan, read_plan
from fedtailor.sites.site_file import read_site

PLAN = "federation.toml"
CA, PROFILE = "ca", "profile.yml"  # in the coordinator's directory
REQUEST = "request"  # in a site's private directory: its key, until the kit is there
LARGEST = 10**6  # bytes of a request or an answer; they have a few thousand


@dataclass(frozen=True)
class Sent:
    """A file to send, and the fingerprint to tell over another way."""

    file: Path
    fingerprint: str
    site: str


def request_kit(site: Path) -> Sent:
    """Make a site's key, and a request to send to the coordinator. The key stays in the site's directory."""
    own = read_site(site)
    plan, folder, file = own.read_plan(names=False), own.private / REQUEST, own.here / f"{own.name}.request.zip"
    if os.path.lexists(folder):
        raise FedtailorError(
            f"{own.name} has asked already, with a key in {folder}: send {file}, or remove the directory to ask again."
        )
    make_directory(own.private)
    own.private.chmod(0o700)
    try:
        with writing(folder):
            made = make_request(plan, own.name, folder)
    except FedtailorError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    with writing(file):
        file.unlink(missing_ok=True)
        made.rename(file)
    return Sent(file, request_fingerprint(file), own.name)


def approve(kits: Path, request: Path, fingerprint: str | None = None, again: bool = False) -> Sent:
    """Sign a site's request; write the answer beside the site's plan. Refuse a request by anybody else.

    `again` signs for a site that has an answer already: it lost its key, or its certificate ends.
    """
    plan = read_plan(kits / "server" / PLAN, names=False)
    need_root_key(kits)
    with TemporaryDirectory() as work:
        mine = Path(work) / "request.zip"  # what is looked at is what is signed
        with _reading(request, "request"):
            shutil.copyfile(request, mine)
        meta = _meta(mine, "request.json", "request", request)
        name = str(meta.get("name"))
        if name not in plan.sites:
            raise unknown("site in the plan", name, plan.sites)
        wanted = {"project": plan.name, "kind": "site", "cert_type": "client", "org": organisation(name)}
        for what, value in wanted.items():
            if meta.get(what) != value:
                raise FedtailorError(
                    f"The request {request} is none of this federation: its {what} is {shown(meta.get(what))}, "
                    f"not {value!r}."
                )
        _compare(fingerprint, request_fingerprint(mine), f"The request of {name}")
        answer = kits / name / f"{name}.answer.zip"
        if answer.exists() and not again:
            raise FedtailorError(
                f"{name} has an answer already, {answer}: give --again if it lost its key or renews its certificate."
            )
        sign(kits, mine, answer)
    return Sent(answer, fingerprint_of(read_certificate(kits / CA / "rootCA.pem")), name)


def install(site: Path, answer: Path, fingerprint: str, again: bool = False) -> Path:
    """Make a site's kit of its key and the coordinator's answer, with the safe policies set.

    `again` puts it in the place of the site's kit so far, whose certificate ends. Nothing else at the site changes.
    """
    own = read_site(site)
    plan, kit, folder = own.read_plan(names=False), own.path(own.kit), own.private / REQUEST
    if os.path.lexists(kit) and not again:
        raise FedtailorError(f"There is a kit in {kit} already: give --again if this is to take its place.")
    check_idle(kit)
    if not folder.is_dir():
        raise FedtailorError(
            f"{own.name} has not asked for a kit, or has it: begin with `fedtailor site request {site}`."
        )
    meta = _meta(answer, "signed.json", "answer")
    if meta.get("name") != own.name:
        raise FedtailorError(f"The answer {answer} is for {shown(meta.get('name'))}, and this site is {own.name!r}.")
    server = meta.get("server")
    where = f"{server.get('host')}:{server.get('fed_learn_port')}" if isinstance(server, dict) else "nowhere"
    if where != f"{plan.server}:{plan.port}":
        raise FedtailorError(
            f"The answer {answer} leads to the server {where}, and the plan to {plan.server}:{plan.port}."
        )
    root = read_certificate(answer, _member(answer, "rootCA.pem", "answer"))
    _compare(fingerprint, fingerprint_of(root), f"The answer {answer}")
    with writing(kit):
        replace_kit(plan, own.name, folder, answer, fingerprint, kit)
    with writing(folder):
        shutil.rmtree(folder)
    return kit


def need_root_key(kits: Path) -> None:
    """Refuse to sign without the root's key."""
    if not (kits / CA / "rootCA.key").exists():
        raise FedtailorError(f"{kits} has no root key to sign with: its kits were all made at once (--central).")


def make_request(plan: Plan, name: str, folder: Path) -> Path:
    """Make a key and a request of a participant in a new folder; return the request."""
    with TemporaryDirectory() as work:
        definition = Path(work) / "participant.yml"
        own = participant(plan, name)
        write_json(definition, {"name": plan.name, "participants": [own]})
        nvflare("cert", "request", "-p", definition, "--out", folder.resolve())
    lock_away(folder)
    return folder / f"{own['name']}.request.zip"


def sign(kits: Path, request: Path, answer: Path) -> None:
    """Sign a request with the root's key."""
    words = ("-c", (kits / CA).resolve(), "--profile", (kits / PROFILE).resolve(), "--out", answer.resolve())
    nvflare("cert", "approve", request.resolve(), *words, "--valid-days", str(DAYS), "--force")


def package(plan: Plan, name: str, folder: Path, answer: Path, fingerprint: str, kit: Path) -> None:
    """Make a kit of a request's key and its answer."""
    make_directory(kit.parent)
    with TemporaryDirectory(dir=kit.parent) as work:
        named = Path(work).resolve() / f"{name}.signed.zip"  # as NVFlare wants it
        shutil.copyfile(answer, named)
        words = ("--request-dir", folder.resolve(), "-w", named.parent, "--fingerprint", fingerprint)
        nvflare("package", named, *words)
        made = Path(work) / plan.name / "prod_00" / participant(plan, name)["name"]
        secure(made, plan)
        made.rename(kit)


def replace_kit(plan: Plan, name: str, folder: Path, answer: Path, fingerprint: str, kit: Path) -> None:
    """Make a kit in the place of another one, which is removed once the new one is whole."""
    with TemporaryDirectory(dir=kit.parent if kit.parent.is_dir() else None) as work:
        new, old = Path(work) / "new", Path(work) / "old"
        package(plan, name, folder, answer, fingerprint, new)
        if os.path.lexists(kit):
            if (kit / REVOKED).exists():
                shutil.copy(kit / REVOKED, new / REVOKED)
            kit.rename(old)
        make_directory(kit.parent)
        new.rename(kit)


def check_idle(kit: Path) -> None:
    """Refuse to change a kit with which a process runs."""
    if next(processes_with(kit), None):
        raise FedtailorError(f"A process runs with the kit in {kit}: stop it first, and start it again afterwards.")


def request_fingerprint(request: Path) -> str:
    """The fingerprint of a request: that of its public key, which NVFlare compares with the key itself."""
    digest = str(_meta(request, "request.json", "request").get("public_key_sha256")).upper()
    return "SHA256:" + ":".join(re.findall("..", digest))


def answered_certificate(answer: Path) -> Certificate:
    """The certificate in an answer."""
    name = str(_meta(answer, "signed.json", "answer").get("name"))
    return read_certificate(answer, _member(answer, f"{name}.crt", "answer"))


def _compare(given: str | None, found: str, what: str) -> None:
    if given is not None and not hmac.compare_digest(_plain(given), _plain(found)):
        raise FedtailorError(
            f"{what} has another fingerprint than the one you gave: it is not what the other side sent, do not use it."
        )


def _plain(fingerprint: str) -> bytes:
    return re.sub(r"[^0-9A-F]", "", re.sub(r"^\s*SHA-?256", "", fingerprint.upper())).encode()


@contextmanager
def _reading(file: Path, what: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise FedtailorError(f"There is no {what} {file}.") from None
    except (OSError, zipfile.BadZipFile, KeyError, ValueError, RuntimeError):
        raise FedtailorError(f"{file} is no {what} of `fedtailor {_MADE_BY[what]}`.") from None


_MADE_BY = {"request": "site request", "answer": "deploy approve"}


def _member(file: Path, member: str, what: str, called: Path | None = None) -> bytes:
    with _reading(called or file, what), zipfile.ZipFile(file) as archive:
        if archive.getinfo(member).file_size > LARGEST:
            raise ValueError
        return archive.read(member)


def _meta(file: Path, member: str, what: str, called: Path | None = None) -> dict[str, Any]:
    with _reading(called or file, what):
        meta = json.loads(_member(file, member, what, called))
        if not isinstance(meta, dict):
            raise ValueError
        return meta
