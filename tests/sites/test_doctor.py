"""The doctor finds every unsafe default of NVFlare's own kits, and nothing once each is mended as it says."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the extra nvflare is not installed")

from fedtailor._common.errors import FedtailorError
from fedtailor.sites.kits import Finding, doctor, make_kits
from fedtailor.sites.kits.project import project
from fedtailor.sites.kits.tools import nvflare
from tests.sites.kits import certificate_until, plan

SITE_DEFAULTS = {"byoc", "shell", "prying", "classes", "logs", "guard"}
SERVER_DEFAULTS = {"byoc", "shell", "classes", "jobs", "snapshots", "receiver", "heartbeat", "roster"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kits as NVFlare alone makes them."""
    here = tmp_path_factory.mktemp("plain")
    (here / "project.yml").write_text(json.dumps(project(plan(here))))
    nvflare("provision", "-p", here / "project.yml", "-w", here / "work")
    return here / "work" / "heart"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kits as we make them."""
    here = tmp_path_factory.mktemp("made")
    make_kits(plan(here), here / "kits", central=True)
    return here / "kits"


@pytest.fixture
def kits(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "kits"))


def checks(path: Path) -> list[str]:
    return [finding.check for finding in doctor(path)]


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def follow(finding: Finding) -> None:
    """Mend what was found by the words of the doctor alone."""
    said = finding.mend
    if found := re.fullmatch(r"chmod (\d+|go-w) (\S+)", said):
        subprocess.run(["chmod", found[1], found[2]], check=True)
        return
    named = re.match(r"in (\S+\.json)(?: \(first copy (\S+) to it\))? ", said)
    assert named, said
    file, rest = Path(named[1]), said[named.end() :].removesuffix(".")
    if named[2] and not file.exists():
        shutil.copyfile(file.with_name(named[2]), file)

    def change(content: dict[str, Any]) -> None:
        components = {component["id"]: component for component in content.get("components", [])}
        if finding.check in ("byoc", "shell", "prying"):
            for step in rest.split(", and set "):
                what, _, roles = step.removeprefix("set ").partition(' to "none"')
                for role in re.findall('"([^"]+)"', roles):
                    content["permissions"][role] |= dict.fromkeys(re.findall('"([^"]+)"', what), "none")
                if not roles:
                    content["permissions"] |= dict.fromkeys(re.findall('"([^"]+)"', what), "none")
        elif inserted := re.fullmatch(r'put ({.*}) before the others of "components"', rest):
            content["components"].insert(0, json.loads(inserted[1]))
        elif removed := re.fullmatch(r'take the component "(\S+)" out', rest):
            content["components"].remove(components[removed[1]])
        elif removed := re.fullmatch(r'take "(\S+)" out', rest):
            del content[removed[1]]
        else:
            setting = re.fullmatch(r'set "(\S+)"(?: of (\S+))? to (.+)', rest)
            assert setting, rest
            name, inside, value = setting[1], setting[2], json.loads(setting[3])
            target = {
                None: content["servers"][0] if name == "heart_beat_timeout" else content,
                "job_manager": components.get("job_manager", {}).get("args"),
                "snapshot_persistor": content.get("snapshot_persistor", {})
                .get("args", {})
                .get("storage", {})
                .get("args"),
            }[inside]
            target[name] = value

    edit(file, change)


def test_every_unsafe_default_is_found_and_mended(plain: Path, tmp_path: Path) -> None:
    kits = Path(shutil.copytree(plain, tmp_path / "heart"))
    for name, expected in (("cleveland", SITE_DEFAULTS), ("localhost", SERVER_DEFAULTS)):
        found = doctor(kits / "prod_00" / name)
        assert {finding.check for finding in found} == expected
        assert len(found) == len(expected)
    assert checks(kits / "prod_00" / "coordinator@example.org") == []
    found = doctor(kits)
    assert sorted({finding.check for finding in found}) == sorted({*SITE_DEFAULTS, *SERVER_DEFAULTS, "key"})
    while found:
        follow(found[0])
        left = doctor(kits)
        assert len(left) == len(found) - 1, found[0]
        found = left


def test_jobs_still_run_with_the_rights_as_mended(plain: Path, tmp_path: Path) -> None:
    """The doctor's words take rights away, and leave those that a run needs."""
    from nvflare.fuel.sec.authz import AuthzContext, Person, parse_policy_config
    from nvflare.security.security import COMMAND_CATEGORIES

    kit = Path(shutil.copytree(plain / "prod_00" / "cleveland", tmp_path / "kit"))
    for finding in doctor(kit):
        follow(finding)
    policy, _ = parse_policy_config(json.loads((kit / "local" / "authorization.json").read_text()), COMMAND_CATEGORIES)
    lead = Person("coordinator@example.org", "heart", "lead")
    for right in ("submit_job", "abort_job"):
        assert policy.evaluate("cleveland", AuthzContext(right, lead, lead))[0]
    for right in ("byoc", "cat", "show_errors", "shutdown"):
        assert not policy.evaluate("cleveland", AuthzContext(right, lead, lead))[0]


SPOILED: dict[str, tuple[str, str, Callable[[dict[str, Any]], object]]] = {
    "classes": ("cleveland", "local/resources.json", lambda c: c["class_allow_list"].append("fedtailor.")),
    "enforcement": ("server", "local/resources.json", lambda c: c.update(class_list_enforcement_mode="warn")),
    "logs": ("cleveland", "local/resources.json", lambda c: c.pop("allow_log_streaming")),
    "guard": ("cleveland", "local/resources.json", lambda c: c["components"].pop(0)),
    "signed": ("cleveland", "startup/fed_client.json", lambda c: c.update(require_signed_jobs=False)),
    "tls": ("server", "startup/fed_server.json", lambda c: c["servers"][0].update(connection_security="clear")),
    "byoc": ("cleveland", "local/authorization.json", lambda c: c["permissions"]["lead"].update(byoc="o:site")),
    "shell": ("server", "local/authorization.json", lambda c: c["permissions"].update(stranger=["any"])),
    "prying": ("cleveland", "local/authorization.json", lambda c: c["permissions"]["lead"].update(show_errors="any")),
    "roster": ("server", "local/resources.json", lambda c: c["components"][0]["args"]["sites"].append("zurich")),
    "plan": (
        "cleveland",
        "startup/fed_client.json",
        lambda c: c["servers"][0]["service"].update(target="elsewhere:8002"),
    ),
}


@pytest.mark.parametrize("check", SPOILED)
def test_a_setting_that_was_changed_is_found(check: str, kits: Path) -> None:
    name, file, change = SPOILED[check]
    edit(kits / name / "kit" / file, change)
    found = checks(kits)
    assert set(found) == ({"byoc", "shell"} if check == "shell" else {check})


def test_files_beside_the_policies_are_found(kits: Path) -> None:
    local = kits / "cleveland" / "kit" / "local"
    (local / "more__p_resources.json").write_text("{}")
    (local / "custom").mkdir()
    assert checks(kits / "cleveland" / "site.toml") == ["beside", "beside"]


def test_permissions(kits: Path) -> None:
    site, kit = kits / "cleveland" / "site.toml", kits / "cleveland" / "kit"
    (kit / "startup" / "client.key").chmod(0o640)
    (kits / "ca" / "cert.json").chmod(0o644)
    (kit / "local" / "authorization.json").chmod(0o602)
    (kits / "cleveland" / "private").mkdir(exist_ok=True)
    (kits / "cleveland" / "private").chmod(0o755)
    found = doctor(kits)
    assert sorted(finding.check for finding in found) == ["key", "key", "private", "writable"]
    for finding in found:
        follow(finding)
    assert doctor(kits) == doctor(site) == []


@pytest.mark.parametrize(("days", "expected"), [(-1, ["expired"]), (29, ["ends"]), (31, []), (100, ["expired"])])
def test_the_end_of_a_certificate(days: int, expected: list[str], kits: Path) -> None:
    certificate_until(kits, kits / "cleveland" / "kit", days)
    assert checks(kits / "cleveland" / "site.toml") == expected


def test_a_certificate_of_another(kits: Path, plain: Path) -> None:
    """Another site's, and another root's."""
    here, there = kits / "cleveland" / "kit" / "startup", kits / "long-beach" / "kit" / "startup"
    for name in ("client.crt", "client.key"):
        shutil.copyfile(there / name, here / name)
    assert checks(kits / "cleveland" / "site.toml") == ["name"]
    shutil.copyfile(plain / "prod_00" / "cleveland" / "startup" / "client.crt", here / "client.crt")
    assert checks(kits / "cleveland" / "site.toml") == ["root", "pair"]
    shutil.copyfile(plain / "prod_00" / "cleveland" / "startup" / "client.key", here / "client.key")
    shutil.copyfile(plain / "prod_00" / "cleveland" / "startup" / "rootCA.pem", here / "rootCA.pem")
    assert checks(kits / "cleveland" / "site.toml") == []
    assert checks(kits) == ["root"]  # not that of the others


def test_a_plan_without_the_site(kits: Path) -> None:
    file = kits / "cleveland" / "federation.toml"
    file.write_text(file.read_text().replace('"cleveland"', '"zurich"'))
    assert checks(kits / "cleveland" / "site.toml") == ["plan"]


def test_a_process_that_was_started_before_its_policies(kits: Path) -> None:
    kit = kits / "cleveland" / "kit"
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "nvflare", str(kit.resolve())], stdout=subprocess.DEVNULL
    )
    try:
        while str(kit) not in Path(f"/proc/{process.pid}/cmdline").read_text():
            time.sleep(0.01)
        assert checks(kit) == []
        os.utime(kit / "local" / "resources.json", (time.time() + 5,) * 2)
        found = doctor(kit)
        assert [finding.check for finding in found] == ["running"]
        assert f"Process {process.pid} " in found[0].what
    finally:
        process.kill()
        process.wait()
    assert checks(kit) == []


def test_no_kit(tmp_path: Path, made: Path) -> None:
    with pytest.raises(FedtailorError, match="There is no kit in"):
        doctor(tmp_path)
    (tmp_path / "startup").mkdir()
    with pytest.raises(FedtailorError, match="is no kit of NVFlare's"):
        doctor(tmp_path)
    bare = tmp_path / "bare"
    shutil.copytree(made / "cleveland", bare, ignore=shutil.ignore_patterns("kit"))
    with pytest.raises(FedtailorError, match="has no kit in"):
        doctor(bare / "site.toml")
