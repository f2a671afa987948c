"""Federations over NVFlare that take minutes (`make test-sites`): processes killed in turn, and the same bits."""

import json
import os
import re
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor.engines.result import RunResult
from fedtailor.engines.runs import load
from tests.sites.loopback import Deployed, impossible, wait_for
from tests.sites.parts import close_metrics, same_server

pytestmark = [
    pytest.mark.sites,
    pytest.mark.skipif(find_spec("nvflare") is None, reason="NVFlare is not installed"),
    pytest.mark.skipif(bool(impossible()), reason=impossible() or "possible"),
]
JOB = "nvflare.private.fed.app.client.worker_process"  # a site's part of a job
WORKER = "fedtailor.sites.nvflare.worker"
SERVER = "fedtailor.sites.nvflare.launch"


def check_against_simulation(federation: Deployed, **more: Any) -> RunResult:
    """Compare a deployed run with the simulation of the same data: vectors to the bit."""
    real, simulated = load(federation.directory), federation.simulated(**more)
    assert real.finished == simulated.finished
    assert same_server(real.simulation, simulated.simulation)
    assert close_metrics(real, simulated)
    for number in range(len(federation.data)):
        assert torch.equal(federation.personal(number, real), simulated.simulation.personal_model(number))
    return real


@pytest.mark.parametrize("method", ["pgfed", "pflego"])
def test_three_sites_have_the_bits_of_a_simulation(method: str, tmp_path: Path) -> None:
    with Deployed(tmp_path, method=method, rounds=5) as federation:
        federation.start_sites()
        federation.start_driver()
        federation.wait_for_end()
    check_against_simulation(federation)


def test_secure_aggregation_has_the_bits_of_that_in_memory(tmp_path: Path) -> None:
    """The masks are other random numbers, the keys those of the kits: the sums have the same bits."""
    with Deployed(tmp_path, method="ditto", rounds=5, secure=True) as federation:
        federation.start_sites()
        federation.start_driver()
        federation.wait_for_end(300)
    real = check_against_simulation(federation, engine="sites-in-memory")
    assert all(not record.failed and not record.warnings for record in real.rounds)
    for name in federation.data:
        (opened,) = (tmp_path / name / "private" / "runs").glob("*/opened.json")
        assert len(json.loads(opened.read_text())["rounds"]) == 5


def test_everything_is_killed_in_turn(tmp_path: Path) -> None:
    """A site's worker, a site's part of the job, a whole site and the server: as if nothing had happened."""
    with Deployed(tmp_path, rounds=60) as federation:
        federation.start_sites()
        federation.start_driver()
        federation.wait_for_round(8)
        federation.kill("north", WORKER)
        federation.wait_for_round(16)
        federation.kill("north", JOB)
        federation.wait_for_round(28)
        federation.kill_all("south")
        federation.start_site("south")
        federation.wait_for_round(40)
        federation.kill("driver", SERVER)
        federation.wait_for_round(48)
        federation.kill_all("driver")
        federation.start_driver()
        federation.wait_for_end()
    real = check_against_simulation(federation)
    assert all(not record.failed and not record.missing for record in real.rounds)
    said = federation.said("driver")
    assert "a process of the job ended" in said
    assert "south came back" in said
    assert "the server's process ended" in said


def test_a_silent_site_is_left_out_and_comes_back(tmp_path: Path) -> None:
    with Deployed(tmp_path, rounds=40, plan={"deadline": 20.0}) as federation:
        federation.start_sites()
        federation.start_driver()
        federation.wait_for_round(5)
        federation.kill_all("west")
        wait_for(lambda: "The run goes on without west" in federation.said("driver"), 120, "patience with west")
        before = federation.rounds
        federation.wait_for_round(before + 3)
        federation.start_site("west")
        wait_for(lambda: "west came back" in federation.said("driver"), 60, "the return of west")
        federation.wait_for_end()
        assert "west takes part" in federation.said("west")
    real = load(federation.directory)
    told = re.findall(r"Round (\d+) of 40", federation.said("driver"))
    assert [int(number) for number in told] == list(range(1, 41))  # none was done twice
    left_out = [record.round for record in real.rounds if record.failed]
    assert "west left out: it is not connected" in str(real.rounds[left_out[0] - 1].warnings)
    assert all(record.failed == [2] for record in real.rounds if record.failed)
    assert left_out[-1] < 40
    assert real.simulation.loop.versions[2] == 40
    assert (tmp_path / "west" / "private" / "models").is_dir()


def test_a_late_answer_is_dropped(tmp_path: Path) -> None:
    """A site that takes too long misses rounds, and takes part again, with the same job."""
    with Deployed(tmp_path, rounds=30, plan={"deadline": 15.0}) as federation:
        federation.start_sites()
        federation.start_driver()
        federation.wait_for_round(3)
        worker = federation.find("west", WORKER)
        os.kill(worker, signal.SIGSTOP)
        wait_for(
            lambda: '"failed": [2]' in (federation.directory / "rounds.jsonl").read_text(), 60, "a round without west"
        )
        os.kill(worker, signal.SIGCONT)
        federation.wait_for_end()
        assert federation.said("driver").count("The run goes on") == 0
    real = load(federation.directory)
    failed = [record.round for record in real.rounds if record.failed]
    assert failed == list(range(failed[0], failed[-1] + 1))
    assert 3 < failed[0] <= failed[-1] < 30
    assert real.simulation.loop.versions == dict.fromkeys(range(3), 30)
    assert "west left out: it did not answer within 15 s" in str(real.rounds[failed[0] - 1].warnings)


def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    with Deployed(tmp_path, rounds=12) as federation:
        federation.start_sites()
        federation.start_driver()
        federation.wait_for_round(4)
        server = federation.find("driver", SERVER)
        federation.running["driver"].send_signal(signal.SIGINT)
        assert federation.running["driver"].wait(60) == 130
        stopped = federation.rounds
        assert "the same command goes on" in federation.said("driver")
        assert not Path(f"/proc/{server}").exists()
        federation.start_driver()
        federation.wait_for_end()
        assert f"Round {stopped + 1} of 12" in federation.said("driver")
        assert f"Round {stopped} of 12" not in federation.said("driver").split("the same command")[1]
        for name in federation.data:
            process = federation.running[name]
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert "Ended. The same command goes on." in federation.said(name)
    check_against_simulation(federation)


def test_a_server_that_runs_already_is_used_and_not_ended(tmp_path: Path) -> None:
    with Deployed(tmp_path, rounds=2) as federation:
        federation.start_sites()
        federation.start_server(tmp_path / "elsewhere")
        federation.start_driver()
        assert federation.running["driver"].wait(200) == 2
        assert "does not write to" in federation.said("driver")
        federation.kill_all("server")
        federation.start_server(federation.directory)
        federation.start_driver()
        federation.wait_for_end()
        assert "The server runs already." in federation.said("driver")
        assert federation.running["server"].poll() is None
    check_against_simulation(federation)


def test_a_slow_site_holds_nobody_up(tmp_path: Path) -> None:
    """Asynchronous rounds: the server moves after two replies, and a stopped site's comes in when it can."""
    with Deployed(tmp_path, method="fedper", rounds=40, late="buffer=2") as federation:
        federation.start_sites()
        federation.start_driver()
        federation.wait_for_round(3)
        worker = federation.find("west", WORKER)
        stopped = federation.rounds
        while federation.rounds < stopped + 2:  # until it stops while it trains, and not while it is measured
            os.kill(worker, signal.SIGCONT)
            time.sleep(0.2)
            os.kill(worker, signal.SIGSTOP)
            stopped = federation.rounds
            time.sleep(5)
        federation.wait_for_round(stopped + 12)
        os.kill(worker, signal.SIGCONT)
        federation.wait_for_end()
    real = load(federation.directory)
    assert all(record.failed == [] for record in real.rounds)
    assert max(record.stale.get(2, 0) for record in real.rounds) >= 10
    assert sum(2 in record.participants for record in real.rounds) >= 3
    for name in federation.data:
        assert (tmp_path / name / "private" / "models").is_dir()
