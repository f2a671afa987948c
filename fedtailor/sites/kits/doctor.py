"""The doctor: looks for what is unsafe in a kit, a site, or all kits of a coordinator, and says how to mend it."""

import os
from collections.abc import Iterator
from pathlib import Path

from fedtailor._common.errors import FedtailorError
from fedtailor.sites.kits.certificates import check_certificates, check_time, fingerprint_of, read_certificate
from fedtailor.sites.kits.exchange import answered_certificate
from fedtailor.sites.kits.findings import Finding
from fedtailor.sites.kits.policies import read_json
from fedtailor.sites.kits.settings_checks import check_settings, in_force
from fedtailor.sites.kits.tools import processes_with
from fedtailor.sites.plan import Plan, read_plan
from fedtailor.sites.site_file import SiteFile, read_site

DEPTH = 4  # directories down to which kits are looked for
SECRETS = ("*.key", "cert.json")
SITE_FILE, PLAN = "site.toml", "federation.toml"


def doctor(path: Path) -> list[Finding]:
    """Look for unsafe settings: of a kit, of a site by its file, or of all kits in a directory."""
    if path.is_file():
        return list(_site(read_site(path)))
    kits = [folder.parent for folder in _below(path) if folder.name == "startup"]
    if not kits:
        raise FedtailorError(f"There is no kit in {path}: give a kit, a site's file, or the directory of one.")
    found: list[Finding] = []
    for kit in kits:
        own = kit.parent / SITE_FILE
        site = read_site(own) if own.exists() else None
        if site and site.path(site.kit).resolve() == kit.resolve():
            found += _site(site)
        else:
            found += _kit(kit, _plan_beside(kit), None)
    found += [finding for folder in _below(path) if folder.name in ("ca", "state") for finding in _secrets(folder)]
    found += [finding for answer in sorted(path.glob("*/*.answer.zip")) for finding in _answered(answer)]
    roots = {fingerprint_of(read_certificate(kit / "startup" / "rootCA.pem")) for kit in kits}
    if len(roots) > 1:
        found.append(
            Finding(
                "root", f"The kits in {path} are of {len(roots)} roots.", "make all of them with the same root again."
            )
        )
    return found


def _answered(answer: Path) -> Iterator[Finding]:
    """Check the time of a certificate that the coordinator signed for a site."""
    name = answer.parent.name
    yield from check_time(answered_certificate(answer), answer, f"have {name} renew it: `fedtailor site request`.")


def _below(path: Path) -> Iterator[Path]:
    """Directories, this one included."""
    yield path
    for folder, names, _ in os.walk(path):
        if len(Path(folder).relative_to(path).parts) >= DEPTH:
            names.clear()
        names.sort()
        yield from (Path(folder) / name for name in names)


def _plan_beside(kit: Path) -> Plan | None:
    file = kit.parent / PLAN
    return read_plan(file, names=False) if file.exists() else None


def _site(site: SiteFile) -> Iterator[Finding]:
    """Check a site by its file: the kit that it names, and whether they are of one federation."""
    kit = site.path(site.kit)
    if not (kit / "startup").is_dir():
        raise FedtailorError(f"The site {site.name} has no kit in {kit}: make it with `fedtailor site request`.")
    try:
        plan = site.read_plan(names=False)
    except FedtailorError as error:
        yield Finding("plan", str(error), "ask the coordinator for the plan, or correct the site's file.")
        plan = None
    yield from _kit(kit, plan, site.name)
    if site.private.is_dir():
        yield from _closed(site.private)


def _kit(kit: Path, plan: Plan | None, name: str | None) -> Iterator[Finding]:
    startup = kit / "startup"
    server, site = (startup / "fed_server.json").exists(), (startup / "fed_client.json").exists()
    if not (server or site or (startup / "fed_admin.json").exists()):
        raise FedtailorError(f"{kit} is no kit of NVFlare's: startup has no fed_server, fed_client or fed_admin.json.")
    if server or site:
        yield from check_settings(kit, server, plan)
        yield from _running(kit)
    if plan:
        name = plan.server if server else name if site else plan.admin
        yield from _leads_to(kit, plan, server, site)
    yield from check_certificates(startup, "server" if server else "client", name)
    yield from _secrets(startup)
    yield from _written_by_others(kit)


def _leads_to(kit: Path, plan: Plan, server: bool, site: bool) -> Iterator[Finding]:
    """Compare the server that a kit is for with the plan's."""
    startup = read_json(kit / "startup" / f"fed_{'server' if server else 'client' if site else 'admin'}.json")
    if server or site:
        one = startup["servers"][0]
        project, target = one["name"], one["service"]["target"]
    else:
        project, target = startup["admin"]["project_name"], f"{startup['admin']['host']}:{startup['admin']['port']}"
    if (project, target) != (plan.name, f"{plan.server}:{plan.port}"):
        yield Finding(
            "plan",
            f"{kit} is for {project} at {target}, and the plan for {plan.name} at {plan.server}:{plan.port}.",
            "ask the coordinator which is right: for a new plan, or a new kit.",
        )


def _secrets(folder: Path) -> Iterator[Finding]:
    """Private keys that others can read."""
    for path in sorted(found for pattern in SECRETS for found in folder.glob(pattern)):
        yield from _closed(path)


def _closed(path: Path) -> Iterator[Finding]:
    if (mode := path.stat().st_mode & 0o777) & 0o077:
        yield Finding(
            "private" if path.is_dir() else "key",
            f"Other users of the machine can read {path} (mode {mode:04o}).",
            f"chmod {'700' if path.is_dir() else '600'} {path}",
        )


def _written_by_others(kit: Path) -> Iterator[Finding]:
    """Policies that other users of the machine can change."""
    for path in sorted({kit, kit / "startup", kit / "local", *(kit / "startup").iterdir(), *(kit / "local").iterdir()}):
        if path.stat().st_mode & 0o022:
            yield Finding("writable", f"Other users of the machine can change {path}.", f"chmod go-w {path}")


def _running(kit: Path) -> Iterator[Finding]:
    """A process of NVFlare's that was started before its policies were last changed does not have them."""
    files = [in_force(kit, name) for name in ("authorization.json", "resources.json")]
    changed = max(file.stat().st_mtime for file in files)
    for process, started in processes_with(kit):
        if started < changed:
            yield Finding(
                "running",
                f"Process {process} runs with this kit and was started before the policies in {kit / 'local'} changed.",
                "end it, and start it again.",
            )
