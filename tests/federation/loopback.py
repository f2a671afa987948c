"""A provisioned federation on loopback, inside a network namespace of its own: NVFlare's server listens everywhere."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedtailor.federation.nvflare.processes import end

ADMIN = "coordinator@example.org"
BUILDERS = "nvflare.lighter.impl"
ROOTS = os.geteuid() == 0


class Namespace:
    """A network with nothing but loopback. The processes in it end with it."""

    def __init__(self) -> None:
        script = "ip link set lo up && echo ready && exec sleep infinity"
        self._keeper = subprocess.Popen(
            ["unshare", "-n" if ROOTS else "-rn", "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout
        if self._keeper.stdout.readline() != "ready\n":
            raise OSError(self._keeper.communicate()[1].strip() or "unshare failed")
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, log: Path, **environment: str) -> "subprocess.Popen[bytes]":
        """Start a Python process in the namespace."""
        user = [] if ROOTS else ["-U", "--preserve-credentials"]
        enter = ["nsenter", "-t", str(self._keeper.pid), *user, "-n"]
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [*enter, sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End all that was started."""
        for process in self._processes:
            end(process)
        self._keeper.kill()
        self._keeper.communicate()


def impossible() -> str:
    """Say why no namespace can be made here; nothing if one can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)}"
    try:
        Namespace().close()
    except OSError as error:
        return f"no network namespace can be made: {error}"
    return ""


def wait_for(happened: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until something has happened."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.1)


class Federation:
    """A plan, kits, and a directory for each site, below one directory."""

    def __init__(self, root: Path, sites: Sequence[str], port: int = 8002) -> None:
        self.root, self.sites = root, list(sites)
        self.run = root / "run"
        home = root / "home"
        home.mkdir(parents=True)
        self.environment = {"HOME": str(home)}
        self.kits = provision(root, sites, port, self.environment)
        self.port = port
        self.network = Namespace()

    def write_plan(self, **settings: Any) -> None:
        """Write the plan, and a file for each site, without its data."""
        experiment = settings.pop("experiment")
        top = {"name": "trial", "server": "localhost", "port": self.port, "admin": ADMIN, "sites": self.sites}
        text = _toml({**top, **settings}) + "[experiment]\n" + _toml(experiment)
        (self.root / "federation.toml").write_text(text)

    def write_site(self, site: str, **settings: Any) -> Path:
        """Write a site's file."""
        folder = self.root / site
        folder.mkdir(exist_ok=True)
        given = {"name": site, "plan": "../federation.toml", "kit": str(self.kits / site), **settings}
        (folder / "site.toml").write_text(_toml(given))
        return folder / "site.toml"

    def start_site(self, site: str) -> "subprocess.Popen[bytes]":
        """Run `fedtailor site start`."""
        code = "import sys; from pathlib import Path; from fedtailor.federation.nvflare.client import stay_connected; "
        code += "stay_connected(Path(sys.argv[1]), lambda line: print(line, flush=True))"
        file = self.root / site / "site.toml"
        return self.network.start("-c", code, str(file), log=self.log(site), **self.environment)

    def start_driver(self) -> "subprocess.Popen[bytes]":
        """Run `fedtailor deploy run`."""
        code = "import sys; from pathlib import Path; from fedtailor.federation.nvflare.driver import Driver; "
        code += "Driver(*map(Path, sys.argv[1:]), tell=lambda line: print(line, flush=True)).run()"
        paths = self.root / "federation.toml", self.run, self.kits / "localhost", self.kits / ADMIN
        return self.network.start("-c", code, *map(str, paths), log=self.log("driver"), **self.environment)

    def log(self, name: str) -> Path:
        """The output of a command."""
        return self.root / f"{name}.log"

    @property
    def rounds(self) -> int:
        """The rounds that are done."""
        with suppress(FileNotFoundError):
            return (self.run / "rounds.jsonl").read_bytes().count(b"\n")
        return 0

    def close(self) -> None:
        """End all that was started."""
        self.network.close()


def provision(root: Path, sites: Sequence[str], port: int, environment: dict[str, str]) -> Path:
    """Make the kits of a server, sites and an admin, with safe policies."""
    participants = [
        {"name": "localhost", "type": "server", "org": "trial", "fed_learn_port": port, "admin_port": port},
        *({"name": site, "type": "client", "org": "trial"} for site in sites),
        {"name": ADMIN, "type": "admin", "org": "trial", "role": "project_admin"},
    ]
    builders = [
        {"path": f"{BUILDERS}.workspace.WorkspaceBuilder"},
        {"path": f"{BUILDERS}.static_file.StaticFileBuilder", "args": {"config_folder": "config", "scheme": "http"}},
        {"path": f"{BUILDERS}.cert.CertBuilder"},
        {"path": f"{BUILDERS}.signature.SignatureBuilder"},
    ]
    project = {"api_version": 3, "name": "trial", "description": "", "participants": participants, "builders": builders}
    (root / "project.yml").write_text(json.dumps(project))  # JSON is YAML
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "provisioned"]
    subprocess.run(command, cwd=root, env={**os.environ, **environment}, check=True, capture_output=True)
    kits = root / "provisioned" / "trial" / "prod_00"
    for name in ("localhost", *sites):
        _make_safe(kits / name)
    return kits


def _make_safe(kit: Path) -> None:
    local = kit / "local"
    rights = json.loads((local / "authorization.json.default").read_text())
    rights["permissions"] = {
        "project_admin": {"submit_job": "any", "manage_job": "any", "view": "any", "byoc": "none", "operate": "any"}
        | {"shell_commands": "none"}
    }
    (local / "authorization.json").write_text(json.dumps(rights))
    resources = json.loads((local / "resources.json.default").read_text())
    resources["class_allow_list"] = ["fedtailor."]
    if "client" in resources:
        resources["allow_log_streaming"] = False
        resources["components"] = [c for c in resources["components"] if c["id"] != "site_log_streamer"]
    else:
        resources["servers"][0]["heart_beat_timeout"] = 15
        resources["components"] = [c for c in resources["components"] if c["id"] != "log_receiver"]
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(kit / "snapshots")
        for component in resources["components"]:
            if component["id"] == "job_manager":
                component["args"]["uri_root"] = str(kit / "jobs")
    (local / "resources.json").write_text(json.dumps(resources))


def _toml(settings: dict[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
