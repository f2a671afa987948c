"""The policies of a kit: what a server's admin may do at a site, and which classes a job may name.

As NVFlare provisions a kit, an admin may ship code to every site, read files there, and read its error texts. Here a
site runs jobs of the plan's admin, made of our own two classes, and answers nothing else.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtailor._common.errors import FedtailorError
from fedtailor.sites.kits.project import ROLE
from fedtailor.sites.plan import Plan

ROLES = ("project_admin", "org_admin", "lead", "member")  # that a certificate can give
# All classes that a job may name, in full: a prefix would let it call whatever is in the modules behind it.
SITE_CLASSES = ["fedtailor.sites.nvflare.executor.FedtailorExecutor"]
SERVER_CLASSES = ["fedtailor.sites.nvflare.controller.FedtailorController"]
GUARD = "fedtailor.sites.kits.guard.Guard"
ROSTER = "fedtailor.sites.kits.roster.Roster"
STORAGE = "/proc/self/cwd/storage"  # in the kit, wherever that lies: the server works in its kit's directory
HEART_BEAT_TIMEOUT = 15  # seconds without a sign of life after which a site counts as gone; NVFlare's own: 600
DEFAULTS = ("authorization.json.default", "resources.json.default")  # in force again if ours were lost
LEFT_OUT = (  # of what NVFlare puts into a kit: other ways to start it, samples
    *("startup/start.sh", "startup/sub_start.sh", "startup/stop_fl.sh", "startup/fl_admin.sh"),
    *("startup/readme.txt", "startup/system_info.ipynb", "readme.txt", "local/privacy.json.sample"),
)
STREAMERS = ("site_log_streamer", "log_receiver")  # components that carry logs from sites to the server


def authorization(plan: Plan, server: bool) -> dict[str, Any]:
    """The rights of roles here: the plan's admin submits and ends jobs, and sees whether sites are there."""
    admin = f"n:{plan.admin}"
    rights = {
        "submit_job": admin,
        "manage_job": admin,
        "configure_job_log": "none",
        "view": admin if server else "none",
        "check_status": admin,
        "operate": "none",
        "shell_commands": "none",
        "clone_job": "none",
        "download_job": "none",
        "byoc": "none",
        "server-predeployed-flwr": "none",
    }
    return {"format_version": "1.0", "permissions": {role: rights if role == ROLE else "none" for role in ROLES}}


def site_resources(given: dict[str, Any]) -> dict[str, Any]:
    """NVFlare's settings of a site, made safe."""
    guard = {"id": "guard", "path": GUARD, "args": {}}
    return {
        **given,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": SITE_CLASSES,
        "allow_log_streaming": False,
        "components": [guard, *_without_streamers(given)],
    }


def server_resources(given: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """NVFlare's settings of a server, made safe."""
    server = {
        **given["servers"][0],
        "heart_beat_timeout": HEART_BEAT_TIMEOUT,
        "max_num_clients": max(100, 2 * len(plan.sites)),
    }
    components = [roster(plan.sites), *_without_streamers(given)]
    for component in components:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = f"{STORAGE}/jobs"
    given["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = f"{STORAGE}/snapshots"
    return {
        **given,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": SERVER_CLASSES,
        "servers": [server],
        "components": components,
    }


def roster(sites: Sequence[str]) -> dict[str, Any]:
    """The component of a server that lets only these sites register."""
    return {"id": "roster", "path": ROSTER, "args": {"sites": list(sites)}}


def secure(kit: Path, plan: Plan) -> None:
    """Set the policies of a kit that NVFlare made, and close it to other users of the machine."""
    local, startup = kit / "local", kit / "startup"
    server = (startup / "fed_server.json").exists()
    if server or (startup / "fed_client.json").exists():
        given = json.loads((local / "resources.json.default").read_text("utf-8"))
        write_json(local / "authorization.json", authorization(plan, server))
        write_json(local / "resources.json", server_resources(given, plan) if server else site_resources(given))
        for name in DEFAULTS:
            (local / name).unlink()
    for name in LEFT_OUT:
        (kit / name).unlink(missing_ok=True)
    lock_away(kit)


def lock_away(directory: Path) -> None:
    """Close a directory to other users of the machine, and every file in it."""
    for path in (directory, *directory.rglob("*")):
        if path.is_dir():
            path.chmod(0o700)
        elif not path.is_symlink():
            path.chmod(0o600)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file of NVFlare's."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of NVFlare's; refuse what is none."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise FedtailorError(f"There is no file {path}: this is no whole kit, make it again.") from None
    except ValueError:
        raise FedtailorError(f"{path} is not valid JSON: mend it, or make the kit again.") from None
    if not isinstance(content, dict):
        raise FedtailorError(f"{path} is not valid: it must have names and values.")
    return content


def _without_streamers(given: dict[str, Any]) -> list[dict[str, Any]]:
    return [component for component in given["components"] if component["id"] not in STREAMERS]
