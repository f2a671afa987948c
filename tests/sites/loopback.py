"""A federation with real keys on loopback, in a network namespace of its own: NVFlare's server listens everywhere."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from fedtailor.sites.kits import make_kits
from fedtailor.sites.nvflare.processes import descendants, end
from tests.sites.parts import Federation

ROOT = os.geteuid() == 0
COMMAND = "from fedtailor.cli import main; main()"


class Namespace:
    """A network with nothing but loopback. The processes in it end with it."""

    def __init__(self) -> None:
        script = "ip link set lo up && echo ready && exec sleep infinity"
        self._keeper = subprocess.Popen(
            ["unshare", "-n" if ROOT else "-rn", "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout
        if self._keeper.stdout.readline() != "ready\n":
            raise OSError(self._keeper.communicate()[1].strip() or "unshare failed")
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, log: Path, **environment: str) -> "subprocess.Popen[bytes]":
        """Start a process in the namespace."""
        user = [] if ROOT else ["-U", "--preserve-credentials"]
        with open(log, "ab") as output:
            process = subprocess.Popen(
                ["nsenter", "-t", str(self._keeper.pid), *user, "-n", *command],
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
        time.sleep(0.05)


class Deployed(Federation):
    """A federation whose sites, server and driver are the commands that people run."""

    def __init__(
        self,
        root: Path,
        data: Mapping[str, pd.DataFrame] | None = None,
        method: str = "pgfed",
        plan: Mapping[str, Any] | None = None,
        **experiment: Any,
    ) -> None:
        given = {"admin": "coordinator@example.org", "join": 120.0, "deadline": 120.0, **(plan or {})}
        super().__init__(root, data, method, given, **experiment)
        make_kits(root / "federation.toml", root / "kits", central=True)
        for name in self.data:
            (root / "kits" / name / "kit").rename(root / name / "kit")
        self.directory = root / "runs" / "trial"
        self._home = root / "home"
        self._home.mkdir()
        self._network = Namespace()
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Deployed":
        return self

    def __exit__(self, *_: object) -> None:
        self._network.close()

    def start_sites(self) -> None:
        """Start all sites."""
        for name in self.data:
            self.start_site(name)

    def start_site(self, name: str, **environment: str) -> None:
        """Run `fedtailor site start`."""
        self._start(name, "site", "start", str(self.root / name / "site.toml"), **environment)

    def start_driver(self, **environment: str) -> None:
        """Run `fedtailor deploy run`."""
        self._start("driver", "deploy", "run", str(self.root / "federation.toml"), **environment)

    def start_server(self, directory: Path) -> None:
        """Start the server as a service that stays, and wait until it listens."""
        log, plan = self.root / "server.log", self.root / "federation.toml"
        words = ("-m", "fedtailor.sites.nvflare.launch", "server", str(self.root / "kits" / "server" / "kit"))
        given = {"HOME": str(self._home), "FEDTAILOR_PLAN": str(plan), "FEDTAILOR_RUN": str(directory)}
        before = log.stat().st_size if log.exists() else 0
        self.running["server"] = self._network.start(sys.executable, *words, log=log, **given)
        wait_for(lambda: "Server started" in self.said("server")[before:], 60, "the start of the server")

    def _start(self, name: str, *words: str, **environment: str) -> None:
        log = self.root / f"{name}.log"
        self.running[name] = self._network.start(
            sys.executable, "-c", COMMAND, *words, log=log, HOME=str(self._home), **environment
        )

    def said(self, name: str) -> str:
        """What a command has printed."""
        return (self.root / f"{name}.log").read_text()

    @property
    def rounds(self) -> int:
        """The rounds that are done."""
        with suppress(FileNotFoundError):
            return (self.directory / "rounds.jsonl").read_bytes().count(b"\n")
        return 0

    def wait_for_round(self, number: int, seconds: float = 120) -> None:
        """Wait until a round is done."""
        wait_for(lambda: self.rounds >= number or self._failed(), seconds, f"round {number}")
        assert not self._failed(), self.said("driver")

    def wait_for_end(self, seconds: float = 120) -> None:
        """Wait until the driver has ended, with all rounds done."""
        assert self.running["driver"].wait(seconds) == 0, self.said("driver")

    def _failed(self) -> bool:
        return self.running["driver"].poll() not in (None, 0)

    def kill(self, name: str, *words: str) -> None:
        """Kill -9 one of the processes that a command started, by the words of its command line."""
        os.kill(self.find(name, *words), signal.SIGKILL)

    def kill_all(self, name: str) -> None:
        """Kill -9 a command and all that it started."""
        process = self.running.pop(name)
        for pid in (process.pid, *descendants(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def find(self, name: str, *words: str) -> int:
        """Find one of the processes that a command started, by the words of its command line."""
        for pid in descendants(self.running[name].pid):
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if all(word in line for word in words):
                    return pid
        raise AssertionError(f"{name} has no process with {words}")
