"""The files in deploy/: what they start are our commands, and what they start cannot do more than it must."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.hospitals.make_data import HOSPITALS, LATER
from tests.cli.calling import Call

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
HARDENED = 2.0  # the most exposure that systemd's own review may find; without any of the settings it is 9.2


def entry_points() -> dict[str, list[str]]:
    """The command of each image and of each unit."""
    found = {}
    for target, words in re.findall(r"^FROM common AS (\w+)$.*?^ENTRYPOINT (\[.*?\])$", dockerfile(), re.M | re.S):
        found[f"image {target}"] = [word.strip('" ') for word in words.strip("[]").split(",")]
    for unit in UNITS:
        (command,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.M)
        found[unit.name] = shlex.split(command)
    return found


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text()


def test_all_of_them_are_looked_at() -> None:
    assert sorted(entry_points()) == [
        *("fedtailor-server.service", "fedtailor-site.service", "image server", "image site")
    ]


@pytest.mark.parametrize("name", sorted(entry_points()))
def test_what_is_started_is_a_command_of_ours(name: str, call: Call) -> None:
    """Where there is no such file, its file is all that it misses."""
    program, *words = entry_points()[name]
    assert Path(program).name == "fedtailor"
    answer = call(*words)
    assert answer.code == 2
    missing = "site.toml" if "site" in words else "server/federation.toml"
    assert re.match(rf"Error: There is no .*{re.escape(missing)}", answer.err), answer


def test_an_image_is_no_root_and_has_a_check_of_its_health() -> None:
    common = dockerfile().partition("AS common")[2]
    assert "USER 10001:10001" in common
    assert not re.search("USER (root|0)", common)
    assert "HEALTHCHECK" in common
    ports = {word for words in entry_points().values() for word in words if word == "9464"}
    assert re.search(r"127\.0\.0\.1:(\d+)/metrics", common)[1] in ports  # type: ignore[index]


def test_the_four_hospitals_have_a_container_each() -> None:
    yaml = pytest.importorskip("yaml")
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"server", *HOSPITALS} - set(LATER)
    targets = set(re.findall(r"^FROM common AS (\w+)$", dockerfile(), re.M))
    for name, service in services.items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["user"].startswith("${FEDTAILOR_UID")
        assert "ports" not in service
        assert "privileged" not in service
        assert service["build"]["target"] in targets
        (volume,) = service["volumes"]
        assert volume.endswith(":/work")
        assert ("coordinator/kits" if name == "server" else name) in volume
    assert compose["networks"]["federation"]["internal"] is True


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_no_fault_and_little_exposure(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    there = tmp_path / unit.name
    there.write_text(unit.read_text().replace("/opt/fedtailor/bin/fedtailor", sys.executable))
    found = subprocess.run(["systemd-analyze", "verify", str(there)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")
    review = ["systemd-analyze", "security", "--offline=true", str(there)]
    said = subprocess.run(review, capture_output=True, text=True, check=True).stdout
    match = re.search(r"Overall exposure level for \S+: (\d+\.\d+)", said)
    assert match, said
    assert float(match[1]) < HARDENED


def test_prometheus_scrapes_loopback_alone() -> None:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in jobs for each in job["static_configs"] for target in each["targets"]]
    assert targets
    assert all(target.startswith("127.0.0.1:") for target in targets)
