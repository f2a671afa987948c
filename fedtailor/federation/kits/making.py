"""The coordinator's side: a directory for each role, with the plan, a page to read, and the kits that are made here."""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedtailor.errors import FedtailorError
from fedtailor.experiment import write_toml
from fedtailor.federation.kits.pages import page, site_template
from fedtailor.federation.kits.policies import ROLE, lock_away, secure, write_json
from fedtailor.federation.kits.tools import need_nvflare, nvflare
from fedtailor.federation.plan import Plan, read_plan
from fedtailor.files import make_directory, writing

PLAN = "federation.toml"
KIT = "kit"
CA = "ca"  # the root's key and certificate: who has it can make participants
SERVER, ADMIN = "server", "admin"
TAKEN = (CA, SERVER, ADMIN)  # names of directories that are no site's
PROFILE = "profile.yml"
DAYS = 360  # that a participant's certificate lasts
ROOT_DAYS = 3600


def make_kits(plan: Plan | Path, out: Path, central: bool = False) -> Plan:
    """Make a directory for the server, its admin and every site in a new directory `out`.

    Keys of the server and of the admin are made here, those of sites at the sites (`request_kit`, `approve`,
    `install`). `central` makes all of them here, which is for trials: who has `out` can then pass for any site.
    """
    need_nvflare()
    text = None if isinstance(plan, Plan) else plan.read_text("utf-8")
    plan = plan if isinstance(plan, Plan) else read_plan(plan)
    for name in plan.sites:
        if name.lower() in TAKEN:
            raise FedtailorError(
                f"A site cannot be called {name!r}: its directory would be another's, name it otherwise."
            )
    if os.path.lexists(out):
        raise FedtailorError(f"{out} exists already, and nothing is written over: choose another directory.")
    make_directory(out)
    out.chmod(0o700)
    with writing(out):
        write_json(out / "project.yml", project(plan))
        write_json(out / PROFILE, profile(plan))
        (_provision if central else _distribute)(plan, out)
        for name in (SERVER, ADMIN, *plan.sites):
            here = out / name
            here.mkdir(exist_ok=True)
            (here / PLAN).write_text(text or write_toml(plan.model_dump(mode="json")), encoding="utf-8")
            (here / "README.md").write_text(page(plan, name, central), encoding="utf-8")
            if name in plan.sites:
                (here / "site.toml").write_text(site_template(plan, name), encoding="utf-8")
    return plan


def _provision(plan: Plan, out: Path) -> None:
    with TemporaryDirectory(dir=out) as work:
        nvflare("provision", "-p", (out / "project.yml").resolve(), "-w", Path(work).resolve())
        made = Path(work) / plan.name
        for name, called in {SERVER: plan.server, ADMIN: plan.admin, **{site: site for site in plan.sites}}.items():
            (out / name).mkdir()
            kit = out / name / KIT
            shutil.move(made / "prod_00" / called, kit)
            secure(kit, plan)
        shutil.move(made / "state", out / CA)
    lock_away(out / CA)


def _distribute(plan: Plan, out: Path) -> None:
    nvflare("cert", "init", "--profile", out / PROFILE, "-o", out / CA, "--valid-days", str(ROOT_DAYS))


def project(plan: Plan) -> dict[str, Any]:
    """NVFlare's project file: who takes part, and how kits are made of it."""
    path = "nvflare.lighter.impl"
    return {
        "api_version": 3,
        "name": plan.name,
        "description": f"The federation {plan.name}",
        "participants": [
            {**participant(plan, SERVER), "fed_learn_port": plan.port, "admin_port": plan.port},
            *(participant(plan, name) for name in (ADMIN, *plan.sites)),
        ],
        "builders": [
            {"path": f"{path}.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
            {"path": f"{path}.static_file.StaticFileBuilder", "args": {"config_folder": "config", "scheme": "grpc"}},
            {"path": f"{path}.cert.CertBuilder", "args": {"root_valid_days": DAYS}},
        ],
    }


def participant(plan: Plan, name: str) -> dict[str, Any]:
    """A participant of NVFlare's: the server, the admin, or a site. Each site is an organisation of its own."""
    if name == SERVER:
        return {"name": plan.server, "type": "server", "org": organisation(plan.name)}
    if name == ADMIN:
        return {"name": plan.admin, "type": "admin", "org": organisation(plan.name), "role": ROLE}
    return {"name": name, "type": "client", "org": organisation(name)}


def organisation(name: str) -> str:
    """A name as NVFlare wants it for an organisation."""
    return name.replace("-", "_")


def profile(plan: Plan) -> dict[str, Any]:
    """What all participants share, for NVFlare's tools that sign requests."""
    return {
        "name": plan.name,
        "scheme": "grpc",
        "connection_security": "mtls",
        "server": {"host": plan.server, "fed_learn_port": plan.port, "admin_port": plan.port},
    }
