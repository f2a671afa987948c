"""The doctor's checks of NVFlare's settings in a kit: who may do what, which classes run, where files go."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from fedtailor.sites.kits.findings import Finding
from fedtailor.sites.kits.policies import (
    GUARD,
    HEART_BEAT_TIMEOUT,
    ROLES,
    ROSTER,
    SERVER_CLASSES,
    SITE_CLASSES,
    STORAGE,
    read_json,
    roster,
)
from fedtailor.sites.plan import Plan

MOST_SECONDS = 60  # of silence after which a server should take a site for gone
SHELL = ("cat", "grep", "head", "ls", "pwd", "tail")
FLOWER = "server-predeployed-flwr"
# What a site answers to the server's admin beside jobs: its errors, its machine, its logs, its end.
PRYING = (
    *("show_errors", "show_stats", "reset_errors", "sys_info", "report_resources", "report_env"),
    *("restart", "shutdown", "configure_site_log", "configure_job_log", "call", FLOWER),
)
PRYING_SETTINGS = ("operate", "view", "configure_job_log", FLOWER)  # that grant them
SHARED = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))


def check_settings(kit: Path, server: bool, plan: Plan | None) -> Iterator[Finding]:
    """Compare the policies of a server's or a site's kit with the safe ones."""
    authorization, resources = in_force(kit, "authorization.json"), in_force(kit, "resources.json")
    yield from _rights(read_json(authorization), kit, server)
    yield from _classes(read_json(resources), kit, SERVER_CLASSES if server else SITE_CLASSES)
    yield from (_of_server if server else _of_site)(read_json(resources), kit)
    if server:
        yield from _roster(read_json(resources), kit, plan)
    yield from _startup(kit / "startup" / ("fed_server.json" if server else "fed_client.json"), server)
    yield from _beside(kit)


def in_force(kit: Path, name: str) -> Path:
    """The file that NVFlare reads: its default where there is no other."""
    path = kit / "local" / name
    return path if path.exists() else path.with_name(f"{name}.default")


def _set(kit: Path, name: str, what: str) -> str:
    """Say how to change a policy file, which may not be there yet."""
    path = kit / "local" / name
    return f"in {path}{'' if path.exists() else f' (first copy {path.name}.default to it)'} {what}."


def _quoted(names: Sequence[str]) -> str:
    quoted = [f'"{name}"' for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def _rights(policy: dict[str, Any], kit: Path, server: bool) -> Iterator[Finding]:
    from nvflare.fuel.sec.authz import parse_policy_config
    from nvflare.security.security import COMMAND_CATEGORIES

    parsed, error = parse_policy_config(policy, COMMAND_CATEGORIES)
    if error:
        yield Finding("rights", f"The rights in {kit / 'local'} are not valid: {error}.", "make the kit again.")
        return
    roles = sorted({*ROLES, *parsed.roles})
    where = "on the server" if server else "at this site"
    for check, rights, named, may in (
        ("byoc", ("byoc",), ("byoc",), f"ship Python code that runs {where}"),
        ("shell", SHELL, ("shell_commands",), f"read files {where}"),
        ("prying", () if server else PRYING, PRYING_SETTINGS, "read errors and settings of this site, or end it"),
    ):
        allowed = [role for role in roles if any(_granted(parsed, role, right) for right in rights)]
        whole = [role for role in allowed if f"{role}:*" in parsed.role_right_map]
        singly = [role for role in allowed if role not in whole]
        steps = [f'set {_quoted(named)} to "none" for {_quoted(singly)}'] if singly else []
        steps += [f'set {_quoted(whole)} to "none"'] if whole else []
        if steps:
            yield Finding(
                check,
                f"Admins of the server with the role {' or '.join(allowed)} may {may}.",
                _set(kit, "authorization.json", ", and ".join(steps)),
            )


def _granted(policy: Any, role: str, right: str) -> bool:
    """Tell whether anybody with this role has a right."""
    from nvflare.fuel.sec.authz import FalseEvaluator, TrueEvaluator

    conditions = policy.role_right_map.get(f"{role}:*") or policy.role_right_map.get(f"{role}:{right}")
    if conditions is None or any(isinstance(one, TrueEvaluator) for one in conditions.blocked_conditions):
        return False
    allowed = conditions.allowed_conditions
    return not allowed or any(not isinstance(one, FalseEvaluator) for one in allowed)


def _classes(resources: dict[str, Any], kit: Path, ours: list[str]) -> Iterator[Finding]:
    allowed = resources.get("class_allow_list")
    if not isinstance(allowed, list) or not set(map(str, allowed)) <= set(ours):
        yield Finding(
            "classes",
            "A job may name other classes than fedtailor's, or any function of a whole package.",
            _set(kit, "resources.json", f'set "class_allow_list" to {json.dumps(ours)}'),
        )
    if resources.get("class_list_enforcement_mode", "enforce") != "enforce":
        yield Finding(
            "enforcement",
            "Classes that a job may not name are only warned of, and run.",
            _set(kit, "resources.json", 'set "class_list_enforcement_mode" to "enforce"'),
        )


def _of_site(resources: dict[str, Any], kit: Path) -> Iterator[Finding]:
    if resources.get("allow_log_streaming", True) is not False:
        yield Finding(
            "logs",
            "Log files of this site, with the texts of its errors, are sent to the server.",
            _set(kit, "resources.json", 'set "allow_log_streaming" to false'),
        )
    if GUARD not in [component.get("path") for component in _components(resources)]:
        component = json.dumps({"id": "guard", "path": GUARD, "args": {}})
        yield Finding(
            "guard",
            "A server that was tampered with can read files here: NVFlare asks the rights only if the server says so.",
            _set(kit, "resources.json", f'put {component} before the others of "components"'),
        )


def _of_server(resources: dict[str, Any], kit: Path) -> Iterator[Finding]:
    for component in _components(resources):
        if component.get("id") == "job_manager" and _shared(component.get("args", {}).get("uri_root"), kit):
            yield Finding(
                "jobs",
                "Jobs are kept in a directory that all users of the machine share.",
                _set(kit, "resources.json", f'set "uri_root" of job_manager to "{STORAGE}/jobs"'),
            )
        if str(component.get("path")).endswith(".JobLogReceiver") and _shared(
            component.get("args", {}).get("dest_dir", gettempdir()), kit
        ):
            yield Finding(
                "receiver",
                "Logs that sites send are kept in a directory that all users of the machine share.",
                _set(kit, "resources.json", f'take the component "{component.get("id")}" out'),
            )
    storage = resources.get("snapshot_persistor", {}).get("args", {}).get("storage", {}).get("args", {})
    if _shared(storage.get("root_dir"), kit):
        yield Finding(
            "snapshots",
            "Snapshots of jobs are kept in a directory that all users of the machine share.",
            _set(kit, "resources.json", f'set "root_dir" of snapshot_persistor to "{STORAGE}/snapshots"'),
        )
    for server in resources.get("servers", []):
        if server.get("heart_beat_timeout", 600) > MOST_SECONDS:
            yield Finding(
                "heartbeat",
                f"A site counts as present for {server.get('heart_beat_timeout', 600)} s after its last sign of life.",
                _set(kit, "resources.json", f'set "heart_beat_timeout" to {HEART_BEAT_TIMEOUT}'),
            )


def _roster(resources: dict[str, Any], kit: Path, plan: Plan | None) -> Iterator[Finding]:
    found = [one.get("args", {}).get("sites") for one in _components(resources) if one.get("path") == ROSTER]
    if not found:
        component = json.dumps(roster(plan.sites if plan else ["NAME OF A SITE"]))
        yield Finding(
            "roster",
            "Whoever has a certificate of the root may register as a site.",
            _set(kit, "resources.json", f'put {component} before the others of "components"'),
        )
    elif plan and set(found[0]) != set(plan.sites):
        yield Finding(
            "roster",
            "Not exactly the plan's sites may register.",
            _set(kit, "resources.json", f'set "sites" of roster to {json.dumps(plan.sites)}'),
        )


def _components(resources: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in resources.get("components", []) if isinstance(one, dict)]


def _shared(path: Any, kit: Path) -> bool:
    """Tell whether a path is in a directory for everybody, and not in the kit."""
    if not isinstance(path, str) or path.startswith("/proc/self/cwd/"):  # NVFlare works in the kit
        return False
    found = Path(path).resolve()
    inside = found.is_relative_to(kit.resolve())
    return not inside and any(found.is_relative_to(place) for place in (*SHARED, Path(gettempdir()).resolve()))


def _startup(file: Path, server: bool) -> Iterator[Finding]:
    startup = read_json(file)
    if startup.get("require_signed_jobs", True) is not True:
        yield Finding(
            "signed",
            "Jobs are accepted without the signature of an admin.",
            f'in {file} take "require_signed_jobs" out.',
        )
    parts = startup.get("servers", []) if server else [startup.get("client", {})]
    for part in parts:
        if part.get("connection_security", "mtls") != "mtls":
            yield Finding(
                "tls",
                f"The connection is {part['connection_security']!r}: one side does not prove who it is.",
                f'in {file} set "connection_security" to "mtls".',
            )


def _beside(kit: Path) -> Iterator[Finding]:
    """Files that NVFlare reads or runs beside those above."""
    more = [path for part in ("startup", "local") for path in (kit / part).glob("*_resources.json")]
    for path in sorted({*more, *(kit / "local").glob("custom")}):
        what = (
            "Python code in it can be run by jobs"
            if path.is_dir()
            else "it adds to the settings of local/resources.json"
        )
        yield Finding("beside", f"{path.relative_to(kit)} is in the kit: {what}.", f"take {path} away.")
