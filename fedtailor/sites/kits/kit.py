"""The coordinator's side: a directory for each role, with the plan, a page to read, and the kits that are made here."""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import make_directory, writing
from fedtailor._common.toml import write_toml
from fedtailor.sites.kits.certificates import fingerprint_of, read_certificate
from fedtailor.sites.kits.exchange import (
    CA,
    PLAN,
    PROFILE,
    check_idle,
    make_request,
    need_root_key,
    replace_kit,
    sign,
)
from fedtailor.sites.kits.pages import page, site_template
from fedtailor.sites.kits.policies import lock_away, secure, write_json
from fedtailor.sites.kits.project import ADMIN, ROOT_DAYS, SERVER, participant, profile, project
from fedtailor.sites.kits.tools import nvflare
from fedtailor.sites.plan import Plan, read_plan

KIT = "kit"
PROJECT = "project.yml"
TAKEN = (CA, SERVER, ADMIN)  # names of directories that are no site's


def make_kits(plan: Plan | Path, out: Path, central: bool = False) -> Plan:
    """Make a directory for the server, its admin and every site in a new directory `out`.

    Keys of the server and of the admin are made here, those of sites at the sites (`request_kit`, `approve`,
    `install`). `central` makes all of them here, which is for trials: who has `out` can then pass for any site.
    """
    source = None if isinstance(plan, Plan) else plan
    plan = plan if isinstance(plan, Plan) else read_plan(plan)
    for name in plan.sites:
        if name.lower() in TAKEN:
            raise FedtailorError(f"A site cannot be called {name!r}, as the kits of others are: name it otherwise.")
    if os.path.lexists(out):
        raise FedtailorError(f"{out} exists already, and nothing is written over: choose another directory.")
    text = source.read_text("utf-8") if source else write_toml(plan.model_dump(mode="json"))
    make_directory(out)
    with writing(out):
        out.chmod(0o700)
        write_json(out / PROJECT, project(plan))
        write_json(out / PROFILE, profile(plan))
        for name in (SERVER, ADMIN, *plan.sites):
            here = out / name
            here.mkdir()
            (here / PLAN).write_text(text, encoding="utf-8")
            (here / "README.md").write_text(page(plan, name, central), encoding="utf-8")
            if name in plan.sites:
                (here / "site.toml").write_text(site_template(plan, name), encoding="utf-8")
    try:
        with writing(out):
            (_all_at_once if central else _own_only)(plan, out)
    except BaseException:
        shutil.rmtree(out)
        raise
    return plan


def _all_at_once(plan: Plan, out: Path) -> None:
    """Make all keys here, with NVFlare's central provisioning; lock away what it leaves of them."""
    with TemporaryDirectory(dir=out) as work:
        nvflare("provision", "-p", (out / PROJECT).resolve(), "-w", Path(work).resolve())
        made = Path(work) / plan.name
        for name in (SERVER, ADMIN, *plan.sites):
            kit = made / "prod_00" / participant(plan, name)["name"]
            secure(kit, plan)
            kit.rename(out / name / KIT)
        (made / "state").rename(out / CA)
    lock_away(out / CA)


def _own_only(plan: Plan, out: Path) -> None:
    """Make the root's key, and those of the server and the admin, as a site does."""
    nvflare(
        *("cert", "init", "--profile", (out / PROFILE).resolve(), "-o", (out / CA).resolve()),
        *("--valid-days", str(ROOT_DAYS)),
    )
    lock_away(out / CA)
    _make_own(plan, out)


def _make_own(plan: Plan, out: Path) -> None:
    """Make the kits of the server and the admin, in the place of those that are there."""
    root = fingerprint_of(read_certificate(out / CA / "rootCA.pem"))
    for name in (SERVER, ADMIN):
        with TemporaryDirectory(dir=out) as work:
            folder, answer = Path(work) / "request", Path(work) / "answer.zip"
            sign(out, make_request(plan, name, folder), answer)
            replace_kit(plan, name, folder, answer, root, out / name / KIT)


def renew_kits(out: Path) -> Plan:
    """Make new keys and certificates of the server and the admin, with the same root: sites need nothing new."""
    plan = read_plan(out / SERVER / PLAN, names=False)
    need_root_key(out)
    for name in (SERVER, ADMIN):
        check_idle(out / name / KIT)
    with writing(out):
        _make_own(plan, out)
    return plan
