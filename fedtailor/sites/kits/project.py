"""NVFlare's description of a federation: who takes part, and where the server is. (Its files are YAML, of which JSON is
a part.)"""

from typing import Any

from fedtailor.sites.plan import Plan

SERVER, ADMIN = "server", "admin"
ROLE = "lead"  # of the plan's admin: it may submit jobs, and has no power over participants
DAYS = 360  # that a participant's certificate lasts, and with central provisioning the root's
ROOT_DAYS = 3600  # that the root's certificate lasts


def project(plan: Plan) -> dict[str, Any]:
    """NVFlare's project file: all participants, and how kits are made of it."""
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
    """A participant: the server, the admin, or a site. Each site is an organisation of its own."""
    if name == SERVER:
        return {"name": plan.server, "type": "server", "org": organisation(plan.name)}
    if name == ADMIN:
        return {"name": plan.admin, "type": "admin", "org": organisation(plan.name), "role": ROLE}
    return {"name": name, "type": "client", "org": organisation(name)}


def organisation(name: str) -> str:
    """A name as NVFlare wants it for an organisation."""
    return name.replace("-", "_")


def profile(plan: Plan) -> dict[str, Any]:
    """The profile that all participants share, for NVFlare's tools that sign requests."""
    return {
        "name": plan.name,
        "scheme": "grpc",
        "connection_security": "mtls",
        "server": {"host": plan.server, "fed_learn_port": plan.port, "admin_port": plan.port},
    }
