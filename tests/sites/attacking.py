"""A federation on loopback that is attacked: strangers with keys of their own, admins, jobs, a server tampered with."""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nvflare.lighter.utils import Identity, generate_cert, generate_keys, serialize_cert, serialize_pri_key

from fedtailor.sites.nvflare.job import PLAN, RUN, SITE, write_job
from tests.sites.loopback import Deployed, wait_for
from tests.sites.parts import tables

LAUNCH = "from fedtailor.sites.nvflare.launch import main; main()"
CLIENT = "nvflare.private.fed.app.client.client_train"
# The owner of a server may change it: here its messages no longer ask sites to look at their rights.
TAMPERED = """
from nvflare.private.defs import RequestHeader
from nvflare.private.fed.server import shell_cmd
asked = shell_cmd.new_message
def quiet(**given):
    message = asked(**{**given, "require_authz": False})
    message.headers.pop(RequestHeader.ADMIN_COMMAND, None)
    return message
shell_cmd.new_message = quiet
"""
# An admin that takes steps, and prints what came of each.
ADMIN = """
import json, os, sys
from nvflare.fuel.flare_api.flare_api import new_secure_session
kit, user, steps = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
found = []
try:
    os.chdir(kit)
    session = new_secure_session(user, kit, timeout=20, auto_login_max_tries=1)
    for kind, value in steps:
        try:
            found.append(session.submit_job(value) if kind == "submit" else
                         session.get_job_meta(value) if kind == "meta" else session.api.do_command(value))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
except Exception as error:
    found.append(f"{type(error).__name__}: {error}")
print("FOUND " + json.dumps(found, default=str), flush=True)
os._exit(0)
"""


class Attacked(Deployed):
    """Two sites and a server."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, tables(("north", "south")), rounds=3)
        self.kits = root / "kits"
        self.root_key = load_pem_private_key(
            json.loads((self.kits / "ca" / "cert.json").read_text())["root_pri_key"].encode(), None
        )
        self._asked = 0

    def start_server(self, tampered: bool = False) -> None:
        """Start the server, as the driver does."""
        environment = {PLAN: str(self.root / "federation.toml"), RUN: str(self.directory), "HOME": str(self._home)}
        kit = str(self.kits / "server" / "kit")
        code = (TAMPERED if tampered else "") + LAUNCH
        log = self.root / "server.log"
        self.running["server"] = self._network.start(sys.executable, "-c", code, "server", kit, log=log, **environment)
        wait_for(lambda: "Server started" in self.said("server"), 60, "the server")

    def start_client(self, name: str, kit: Path, uid: str, plain: bool = True) -> None:
        """Start NVFlare's client with any kit, under any name."""
        given = ["secure_train=true", f"uid={uid}", f"org={uid}", "config_folder=config"]
        words = ["-m", CLIENT, "-m", str(kit), "-s", "fed_client.json", "--set", *given]
        log = self.root / f"{name}.log"
        environment = {"HOME": str(self._home), SITE: str(self.root / "north" / "site.toml")}
        self.running[name] = self._network.start(sys.executable, *words, log=log, **environment)

    def wait_for_sites(self) -> None:
        """Wait until both sites are connected."""
        for name in self.data:
            wait_for(lambda name=name: "Connected to" in self.said(name), 60, name)  # type: ignore[misc]

    def participant(
        self, like: Path, name: str, role: str | None = None, key: Any = None, issuer: str = "trial", **times: Any
    ) -> Path:
        """A kit like another's, with a new key, and a certificate for this name, signed by the root or another key.
        Its `times` are those of NVFlare's generate_cert."""
        kit = self.root / "strangers" / f"{len(list((self.root / 'strangers').glob('*')))}-{name}"
        shutil.copytree(like, kit)
        private, public = generate_keys()
        made = generate_cert(
            subject=Identity(name, name.partition("@")[0], role),
            issuer=Identity(issuer),
            signing_pri_key=key or self.root_key,
            subject_pub_key=public,
            **times,
        )
        (kit / "startup" / "client.crt").write_bytes(serialize_cert(made))
        (kit / "startup" / "client.key").write_bytes(serialize_pri_key(private))
        with suppress(FileNotFoundError):
            file = kit / "startup" / "fed_admin.json"
            content = json.loads(file.read_text())
            content["admin"]["username"] = name
            file.write_text(json.dumps(content))
        return kit

    def admin(
        self, *steps: tuple[str, object], kit: Path | None = None, user: str = "coordinator@example.org"
    ) -> list[Any]:
        """Take steps as an admin; return what came of each."""
        self._asked += 1
        log = self.root / f"admin-{self._asked}.log"
        kit = kit or self.kits / "admin" / "kit"
        words = [str(kit), user, json.dumps(steps, default=str)]
        process = self._network.start(sys.executable, "-c", ADMIN, *words, log=log, HOME=str(self._home))
        with suppress(subprocess.TimeoutExpired):
            process.wait(120)
        last = [line for line in log.read_text().splitlines() if line.startswith("FOUND ")]
        assert last, log.read_text()
        return list(json.loads(last[-1].removeprefix("FOUND ")))

    def job(self, name: str) -> Path:
        """The folder of a job as the driver submits it."""
        folder = self.root / "jobs" / name
        write_job(folder, name, list(self.data))
        return folder


def handshake(federation: Attacked, name: str, kit: Path | None, root: Path) -> int:
    """Open a TLS connection to the server and close it; return openssl's exit code."""
    words = ["openssl", "s_client", "-connect", "localhost:8002", "-CAfile", str(root), "-alpn", "h2"]
    words += ["-tls1_2", "-verify_return_error", "-quiet", "-no_ign_eof"]
    if kit:
        words += ["-cert", str(kit / "startup" / "client.crt"), "-key", str(kit / "startup" / "client.key")]
    return federation._network.start(*words, log=federation.root / f"{name}.log").wait(30)
