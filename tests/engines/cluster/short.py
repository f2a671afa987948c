"""The engine ray, on two nodes of one core each and on this machine alone.

`tests/engines/test_ray.py` runs these tests, in a network of their own.
"""

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

import fedtailor as ft
from tests.engines.cluster.looking import SMALL, check_same, gone, plain, processes, store_bytes
from tests.engines.cluster.methods import Deadly, Looking, Scribbling, Waiting
from tests.engines.place import within


@pytest.mark.parametrize("method", ["pgfed", "pflego"])
def test_the_same_bits_as_in_process(method: str, engine: dict[str, Any]) -> None:
    check_same(ft.run(method, **engine, **SMALL), plain(method))


def test_asynchronous_rounds_have_the_bits_of_in_process(engine: dict[str, Any]) -> None:
    uneven: dict[str, Any] = {**SMALL, "system": "speeds=lognormal:1:100, availability=0.7:20", "late": "buffer=1"}
    check_same(ft.run("ditto", **engine, **uneven), ft.run("ditto", engine="in-process", **uneven))


def test_a_dead_actor_costs_a_repetition(engine: dict[str, Any], tmp_path: Path) -> None:
    """And of three workers one finds no core: nobody waits for it."""
    result = ft.run(Deadly(marker=str(tmp_path / "died")), workers=3, **engine, **SMALL)
    assert (tmp_path / "died").exists()
    check_same(result, plain())


def test_writing_into_samples_is_noticed(engine: dict[str, Any]) -> None:
    expected = r"^Scribbling, round 2: client 3 wrote into the inputs of its samples, which is for reading only"
    with pytest.raises(ft.FedtailorError, match=expected):
        ft.run(Scribbling(), **engine, **SMALL)


def test_a_dead_node_costs_a_repetition(cluster: Cluster, engine: dict[str, Any], tmp_path: Path) -> None:
    """It is killed while both actors are at work. The other node does what is left."""
    method = Waiting(begun=str(tmp_path), go=str(tmp_path / "go"))
    other = next(node for node in cluster.list_all_nodes() if node is not cluster.head_node)
    killed: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        at_work = {int(path.name.partition("-")[2]) for path in tmp_path.iterdir()}
        cluster.remove_node(other, allow_graceful=False)
        while len(alive := {number for number in at_work if Path(f"/proc/{number}").exists()}) == 2:
            time.sleep(0.02)
        killed.append(len(at_work - alive))
        (tmp_path / "go").touch()

    killer = threading.Thread(target=kill)
    killer.start()
    result = ft.run(method, **engine, **SMALL)
    killer.join()
    assert killed == [1]
    begun = [path.name.partition("-")[0] for path in tmp_path.iterdir() if path.name != "go"]
    assert len(begun) == SMALL["clients"] + 1  # one of them twice
    check_same(result, plain())


def test_on_this_machine_samples_are_there_once_and_nothing_is_left(cluster: Cluster, tmp_path: Path) -> None:
    """Two actors read 20 MB of the object store's memory. Afterwards all is as before."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(5_000, 256, generator=generator), torch.arange(5_000) % 3) for _ in range(4)]
    settings: dict[str, Any] = {"data": data, "model": "mlp:8", "rounds": 2, "steps": 2}
    kept = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    before, environment, folders = processes(), dict(os.environ), folders_of_ray()
    stored: list[int] = []
    try:
        result = ft.run(
            Looking(note=str(tmp_path / "note")),
            engine="ray",
            workers=2,
            on_round=lambda record: stored.extend(store_bytes()),
            **settings,
        )
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, kept)
    samples = sum(x.nbytes for x, _ in data)
    assert samples <= max(stored) <= 1.1 * samples
    notes = [list(map(int, line.split())) for line in (tmp_path / "note").read_text().splitlines()]
    assert len({process for process, *_ in notes}) == 2
    for _, threads, address, size, written in notes:
        assert (threads, address) == (1, 0)
        assert size >= samples >> 10
        assert written == 0
    assert gone(processes() - before)
    assert dict(os.environ) == environment
    assert folders_of_ray() == folders
    assert (Path.home() / ".ray/auth_token").stat().st_mode & 0o077 == 0
    check_same(result, ft.run("fedavg", engine="in-process", **settings))
    with pytest.raises(ft.FedtailorError, match=r"^Ray was started in this process before, with a token"):
        ft.run("fedavg", engine="ray", address=cluster.address, **SMALL)  # it would get no answer from its actors


def folders_of_ray() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("fedtailor-ray-*"))


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:7", r"^There is no Ray cluster at 127\.0\.0\.1:7: ConnectionRefusedError: .*\.$"),
        ("nowhere.invalid:6379", r"^There is no Ray cluster at nowhere\.invalid:6379: gaierror: .*\.$"),
        ("somewhere", r"^The address 'somewhere' is not that of a Ray cluster's head: write host:port\.$"),
        ("ray://127.0.0.1:10001", r"^The address 'ray://127\.0\.0\.1:10001' is not that of a Ray cluster's head"),
    ],
)
def test_where_no_cluster_is(address: str, says: str) -> None:
    with within(30), pytest.raises(ft.FedtailorError, match=says):
        ft.run("fedavg", engine="ray", address=address, **SMALL)
    assert not ray.is_initialized()
