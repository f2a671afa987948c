"""Dishonest sites and servers over NVFlare on loopback, and the server's files and logs without a cell of any table
(`make test-sites`). docs/security.md has the table."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedtailor.engines.runs import load
from fedtailor.sites.ledger import Ledger
from tests.sites.lies import LIES, NUMBER, TEXT, forms, with_canary
from tests.sites.loopback import Deployed, impossible

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.sites,
    pytest.mark.skipif(find_spec("nvflare") is None, reason="NVFlare is not installed"),
    pytest.mark.skipif(bool(impossible()), reason=impossible() or "possible"),
]

# What Python runs first in the processes of one side: it changes what fedtailor does in the one that counts.
LYING = f"""
import pathlib
if b"fedtailor.sites.nvflare.worker" in pathlib.Path("/proc/self/cmdline").read_bytes():
    from fedtailor.sites.local_site import LocalSite
    from fedtailor.messages.letters import read_letter
    from fedtailor.client.sites import Site
    from tests.sites.lies import LIES

    changes, honest, work = [change for change, _ in LIES.values()], LocalSite.answer, Site.work

    def answer(self, letter):
        asked, given = read_letter(letter).header, honest(self, letter)
        number = asked.get("round", 0) - 2
        return changes[number](given) if asked.get("asked") == "train" and 0 <= number < len(changes) else given

    def telling(self, request, state):
        if request.round == len(changes) + 2:
            raise ValueError("{TEXT} {NUMBER}")
        return work(self, request, state)

    LocalSite.answer, Site.work = answer, telling
"""
ASKING = """
import pathlib
if b"runner_process" in pathlib.Path("/proc/self/cmdline").read_bytes():
    from fedtailor.sites import coordinator

    honest = coordinator._for_sites
    coordinator._for_sites = lambda prepared: honest(prepared).model_copy(update={"method": "os:system"})
"""


def first_run(folder: Path, code: str) -> str:
    """Make a directory for PYTHONPATH whose code every Python runs first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return f"{folder}:{ROOT}"


def canaries(federation: Deployed) -> list[str]:
    """The files of the server, and what its commands printed, with a cell of a table in them."""
    places = [federation.root / "kits", federation.directory, federation.root / "driver.log"]
    files = [path for place in places for path in (place.rglob("*") if place.is_dir() else [place]) if path.is_file()]
    assert len(files) > 20
    return [str(path) for path in files if any(form in path.read_bytes() for form in forms())]


def test_a_site_that_lies_in_every_round(tmp_path: Path) -> None:
    rounds = len(LIES) + 3
    with Deployed(tmp_path, with_canary(), rounds=rounds) as federation:
        for name in federation.data:
            lying = {"PYTHONPATH": first_run(tmp_path / "lying", LYING)} if name == "south" else {}
            federation.start_site(name, **lying)
        federation.start_driver()
        federation.wait_for_end(600)
    real = load(federation.directory)
    assert [record.failed for record in real.rounds] == [[], *[[1]] * (rounds - 2), []]
    told = [text for record in real.rounds for text in record.warnings.values()]
    for _, words in LIES.values():
        assert any(words in text for text in told), words
    assert TEXT in (tmp_path / "south" / "private" / "site.log").read_text()
    assert canaries(federation) == []


def test_a_server_that_asks_sites_to_import_something(tmp_path: Path) -> None:
    with Deployed(tmp_path, rounds=3) as federation:
        federation.start_sites()
        federation.start_driver(PYTHONPATH=first_run(tmp_path / "asking", ASKING))
        assert federation.running["driver"].wait(300) == 2
    assert "the site does not allow what was asked" in federation.said("driver")
    for name in federation.data:
        assert "The method os:system is not of the catalogue" in (tmp_path / name / "private" / "site.log").read_text()
    assert json.loads((federation.directory / "status.json").read_text())["phase"] == "stopped"


def test_a_server_that_begins_the_plan_again(tmp_path: Path) -> None:
    """Another run directory, and so another name of the run: the sites' data have no privacy left for it, whoever was
    started again in between."""
    private = {"privacy": "sample, clip=1.0, noise=1.0", "on_failure": "stop"}
    with Deployed(tmp_path, method="fedavg", rounds=2, **private) as federation:
        federation.start_sites()
        federation.start_driver()
        federation.wait_for_end(300)
        ledgers = [Ledger(tmp_path / name / "private") for name in federation.data]
        assert [ledger.read().trainings for ledger in ledgers] == [2, 2, 2]
        federation.directory.rename(tmp_path / "runs" / "before")
        federation.kill_all("north")
        federation.start_site("north")
        federation.start_driver()
        assert federation.running["driver"].wait(300) == 2
    assert "the site does not allow what was asked" in federation.said("driver")
    assert [ledger.read().trainings for ledger in ledgers] == [2, 2, 2]
    assert len(list((tmp_path / "north" / "private" / "runs").iterdir())) == 2
    assert "The privacy of this site's data is spent" in (tmp_path / "north" / "private" / "site.log").read_text()
