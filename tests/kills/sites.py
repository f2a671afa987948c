"""A federation of processes, a server and its sites: each is killed at an operation on a file, and started again.

Whoever is killed is started anew while the others go on, as at real sites. The bits are those of a federation that
nothing stopped, and a site's ledger has every training that began.
"""

import json
import os
import random
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Client, Listener
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import checksum
from fedtailor.client.sites import Sites
from fedtailor.messages import Train
from fedtailor.server.checkpoint import read_manifest
from fedtailor.sites.coordinator import STATUS, Coordinator
from fedtailor.sites.ledger import Ledger
from fedtailor.sites.local_site import LocalSite
from fedtailor.sites.plan import read_plan
from fedtailor.sites.site_file import read_site
from tests.helpers import files
from tests.kills.engine import (
    MEMORY,
    Attempt,
    Child,
    Ended,
    Operations,
    Stop,
    clock,
    die_with_parent,
    fault_of,
    random_stop,
)
from tests.kills.runs import kept
from tests.sites.parts import Federation, table

SERVER, NAMES = "server", ("north", "south")
PATIENCE = 60  # seconds for a letter
PLANS: dict[str, dict[str, Any]] = {
    "pgfed": {"checkpoint_every": 1},
    "ditto": {"checkpoint_every": 2},
    "scaffold": {"participation": 0.5, "rounds": 4},
    "private": {"method": "fedavg", "privacy": "sample, clip=1.0, noise=1.0", "site": {"epsilon": 1e6}},
}
Operated = dict[str, list[str]]  # the operations of each


def federation(plan: str, folder: Path) -> None:
    """Make the directories of a federation."""
    data = {name: table(seed, rows=40, numbers=2) for seed, name in enumerate(NAMES)}
    Federation(folder, data, **{"method": plan, "rounds": 3, "model": "mlp:4", **PLANS[plan]})
    (folder / SERVER).mkdir()


# --- processes ---


def prepare(operations: Operations) -> None:
    """Make a process of the federation that its parent does not leave behind, and whose secrets are always the same."""
    die_with_parent()
    clock()
    secrets.token_hex = lambda size=None: "0" * 2 * (size or 4)
    secrets.token_bytes = lambda size=None: bytes(size or 32)
    operations.watch()


def address(folder: Path, name: str) -> str:
    """The address of a site: a socket without a file."""
    return f"\0{folder}/{name}"


def site_at_work(folder: Path, name: str, stop: Stop | None = None) -> Child:
    """Start a site: it answers letters, and counts trainings in a file that is not its own. At an empty letter it ends,
    and returns its operations."""
    operations = Operations(folder / name, stop)

    def work() -> list[str]:
        counted, handle = os.open(folder / f"trainings-{name}", os.O_CREAT | os.O_APPEND | os.O_WRONLY), Sites.handle

        def counting(sites: Sites, request: Any) -> Any:
            if isinstance(request, Train):
                os.write(counted, b".")
            return handle(sites, request)

        Sites.handle = counting  # type: ignore[method-assign]
        site = LocalSite(read_site(folder / name / "site.toml"))
        with Listener(address(folder, name)) as letters:
            while True:
                with letters.accept() as pipe, suppress(OSError, EOFError):  # a server that is killed waits no longer
                    if not (letter := pipe.recv_bytes()):
                        return operations.done
                    pipe.send_bytes(site.answer(letter))

    return Child(work, lambda: prepare(operations))


class Letters:
    """The server's way to sites that may be killed: then a letter is sent again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ask(self, letters: Mapping[str, bytes], deadline: float | None) -> Iterator[tuple[str, bytes | str]]:
        for name, letter in letters.items():
            yield name, self._answer(name, letter)

    def _answer(self, name: str, letter: bytes) -> bytes:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                with Client(address(self._folder, name)) as pipe:
                    pipe.send_bytes(letter)
                    return b"" if not letter else pipe.recv_bytes()
            except (OSError, EOFError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.005)


def server_at_work(folder: Path, stop: Stop | None = None) -> Child:
    """Start the server, or start it again."""
    operations = Operations(folder / SERVER, stop)

    def work() -> tuple[Mapping[str, object], list[str]]:
        Coordinator(read_plan(folder / "federation.toml"), folder / SERVER / "run", Letters(folder)).run()
        return outcome(folder), operations.done

    return Child(work, lambda: prepare(operations))


def outcome(folder: Path) -> Mapping[str, object]:
    """Everything that server and sites keep: of sites, the states that count, and their models."""
    manifest = read_manifest(folder / SERVER / "run" / "checkpoint")
    assert manifest is not None
    found = kept(folder / SERVER)
    status = json.loads((folder / SERVER / "run" / STATUS).read_bytes())
    found[f"run/{STATUS}"] = {part: status[part] for part in ("phase", "round", "sites")}  # all else tells of kills
    for number, name in enumerate(NAMES):
        state = f"client-{number}-round-{manifest.clients.get(number)}.safetensors"
        for path, content in files(folder / name).items():
            if path.endswith((state, "toml", "csv")) or "/models/" in path:
                found[f"{name}/{path}"] = checksum(content)
    return found


def supervised(folder: Path, stops: Mapping[str, Stop]) -> tuple[Ended, int, Operated]:
    """Let a federation come to its end: who is killed is started again. Return how the server ended, the number of
    kills, and the operations of those who were not killed."""
    started = {name: site_at_work(folder, name, stops.get(name)) for name in NAMES}
    server, kills, operated = server_at_work(folder, stops.get(SERVER)), 0, Operated()
    while True:
        server.process.join(0.01)
        for name, site in started.items():
            if not site.process.is_alive():
                kills += site.end().killed
                started[name] = site_at_work(folder, name)
        if not server.process.is_alive():
            ended = server.end()
            if not ended.killed:
                break
            kills, server = kills + 1, server_at_work(folder)
    for name, site in started.items():
        Letters(folder)._answer(name, b"")
        operated[name] = site.end().value
    if ended.value:
        value, operated[SERVER] = ended.value
        ended = Ended(ended.code, value, ended.raised)
    return ended, kills, operated


# --- kills ---


@cache
def whole(plan: str) -> tuple[Mapping[str, object], Operated]:
    """What comes out of a federation that nothing stops, and the operations of each."""
    with TemporaryDirectory(dir=MEMORY) as place:
        folder = Path(place)
        federation(plan, folder)
        ended, _, operated = supervised(folder, {})
        assert not ended.raised, ended.raised
        assert ended.code == 0
        return ended.value, operated


def attempt(rng: random.Random, folder: Path) -> Attempt:
    """Kill a site, the server, or both."""
    plan, who = rng.choice(sorted(PLANS)), rng.sample((SERVER, *NAMES), rng.choice((1, 1, 2)))
    expected, operated = whole(plan)
    federation(plan, folder)
    chosen = {name: random_stop(rng, operated[name]) for name in who}
    ended, kills, _ = supervised(folder, {name: stop for name, (stop, _) in chosen.items()})
    what = "; ".join(f"{name}, {where}" for name, (_, where) in chosen.items())
    if plan == "private":  # its noise is never the same
        expected, ended = {}, Ended(ended.code, {}, ended.raised)
    return Attempt(f"{plan}: {what}", kills, fault_of(ended, expected) or lost_trainings(folder, kills))


def lost_trainings(folder: Path, kills: int) -> str:
    """Compare the ledgers with the trainings that began: one that was killed may have been written down and not begun,
    and none may have begun that was not."""
    if "privacy" not in (folder / "federation.toml").read_text():
        return ""
    for name in NAMES:
        begun = len((folder / f"trainings-{name}").read_bytes())
        try:
            written = Ledger(folder / name / "private").read().trainings
        except FedtailorError as error:
            return str(error)
        if not begun <= written <= begun + kills:
            return f"{name} began {begun} trainings, and its ledger has {written}"
    return ""
