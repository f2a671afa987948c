"""More of the engine ray: `make test-cluster` runs these tests, in a network of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import Tensor
from torch.nn import functional

import fedtailor as ft
from fedtailor.engines.ray_actors import Actor
from fedtailor.engines.ray_parcels import LARGE, pack_sites
from fedtailor.engines.ray_session import connected
from fedtailor.messages import Train
from fedtailor.methods import CATALOGUE
from fedtailor.server.records import RoundRecord
from tests.engines.cluster.looking import SMALL, actors, check_same, gone, processes
from tests.engines.cluster.methods import Deadly, Net, Stuck
from tests.engines.faults import OutOfReagent, Raising
from tests.engines.place import Pretended


def test_a_method_network_and_loss_of_ones_own(engine: dict[str, Any]) -> None:
    """Defined in a function: they go by value. 13 features a row, so that clients' samples begin anywhere."""

    class Here(ft.Method):
        def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
            return {"theta": client.descend(message["theta"])}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets) + 1e-3 * outputs.square().mean()

    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(n, 13, generator=generator), torch.randint(3, (n,), generator=generator)) for n in (37, 20, 51)
    ]
    settings: dict[str, Any] = {"data": data, "model": Net, "loss": loss, "rounds": 2, "batch": "full"}
    check_same(ft.run(Here(), **engine, **settings), ft.run(Here(), engine="in-process", **settings))


def test_an_exception_arrives_with_its_traceback(engine: dict[str, Any]) -> None:
    with pytest.raises(ft.FedtailorError, match="client 1 failed: OutOfReagent: bottle 7 is empty") as caught:
        ft.run(Raising(), on_failure="stop", **engine, **SMALL)
    assert type(caught.value.__cause__) is OutOfReagent
    assert "in train" in str(caught.value.__cause__.__cause__)


def test_a_run_goes_on_with_another_engine(engine: dict[str, Any], tmp_path: Path) -> None:
    def stop(record: RoundRecord) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.run("ditto", **engine, out=tmp_path / "run", on_round=stop, **SMALL)
    ft.resume(tmp_path / "run", rounds=4, engine="processes", workers=2)
    result = ft.resume(tmp_path / "run", rounds=5, **engine)
    check_same(result, ft.run("ditto", engine="in-process", **{**SMALL, "rounds": 5}))
    assert result.experiment.address == engine["address"]


def test_code_that_nodes_cannot_import_is_named(
    engine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "import fedtailor as ft\nclass Mine(ft.Method):\n    def train(self, client, message):\n        return {}\n"
    )
    (tmp_path / "only_here.py").write_text(source)
    with connected(engine["address"], None):  # the nodes know the paths that this process had then
        monkeypatch.syspath_prepend(tmp_path)
        expected = r"cannot import what the run uses: .*No module named 'only_here'; install it on every node"
        with pytest.raises(ft.FedtailorError, match=expected):
            ft.run("only_here:Mine", **engine, **SMALL)


def test_a_cluster_without_room_is_not_waited_for(engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtailor.engines.ray_actors.PLACEMENT", 2.0)
    with connected(engine["address"], None):
        others = [ray.remote(num_cpus=1)(Actor).remote() for _ in range(2)]
        ray.get([other.ping.remote() for other in others])
        expected = r"^No worker of the cluster answered for 2 s \(0 of 2 CPUs are free\): wait until"
        with pytest.raises(ft.FedtailorError, match=expected):
            ft.run("fedavg", **engine, **SMALL)


def test_an_actor_that_writes_changes_nothing_for_others(engine: dict[str, Any]) -> None:
    """Not even through NumPy, where PyTorch does not notice it."""
    shared = torch.zeros(LARGE, dtype=torch.float32)

    class Careless(Pretended):
        def work(self, request: Any, state: Any) -> Any:
            shared.numpy()[:] += 1
            return super().work(replace_message(request, shared), state)

    def replace_message(request: Any, tensor: Tensor) -> Any:
        return Train(request.round, request.client, {"x": tensor[:2].clone()})

    with connected(engine["address"], None):
        parcel = ray.put(pack_sites(Careless([1])))
        workers = [ray.remote(num_cpus=0)(Actor).remote() for _ in range(2)]
        ray.get([worker.ready.remote(parcel) for worker in workers])
        labels, contents = [("before", "int64", ())], [torch.tensor(0).view(-1).view(torch.uint8).numpy()]
        for times in (1, 2):
            for worker in workers:
                _, _, upload, _ = ray.get(worker.work.remote(Train(1, 0, {}), labels, 0, *contents))
                assert upload[0][1].view("float32").tolist() == [2.0 * times] * 2
        _, memories = ray.get(parcel)
        assert max(map(len, memories)) == shared.nbytes
        assert not any(memory.any() for memory in memories if len(memory) == shared.nbytes)


def test_a_script_whose_method_is_in_main(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import fedtailor as ft\n"
        "class Mine(ft.Method):\n"
        "    def train(self, client, message):\n"
        "        return {'theta': client.descend(message['theta'])}\n"
        "settings = dict(data='digits', clients=3, model='mlp:8', rounds=2)\n"
        "one = ft.run(Mine, engine='ray', workers=1, **settings)\n"
        "other = ft.run('fedavg', engine='in-process', **settings)\n"
        "assert one.server_state['theta'].equal(other.server_state['theta'])\n"
        "print('same')\n"
    )
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert found.stdout == "same\n", found.stderr
    assert all("Failed to determine local IP" in line for line in found.stderr.splitlines())  # there is none


def test_the_benchmark_stays_alive() -> None:
    command = [sys.executable, "-m", "benchmarks.cluster", "--repeat", "1", "--requests", "2"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\n4,500,010 " in found.stdout


@pytest.mark.parametrize("method", CATALOGUE)
def test_every_method_has_the_same_bits(method: str, engine: dict[str, Any]) -> None:
    settings = {**SMALL, "epochs": 1, "participation": 0.5, "keep_momentum": True, "momentum": 0.5}
    check_same(ft.run(method, **engine, **settings), ft.run(method, engine="in-process", **settings))


def test_samples_that_are_read_when_a_batch_needs_them(engine: dict[str, Any], tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", random.normal(size=(600, 13)).astype("float32"))
    np.save(tmp_path / "y.npy", random.integers(3, size=600))
    settings: dict[str, Any] = {"data": tmp_path, "clients": 4, "model": "mlp:8", "rounds": 2}
    check_same(ft.run("fedper", **engine, **settings), ft.run("fedper", engine="in-process", **settings))


def test_a_client_that_never_answers_is_left_out_at_the_deadline(engine: dict[str, Any], tmp_path: Path) -> None:
    expected = r"round 2: client 3 left out: it did not answer within 3 s\."
    with pytest.warns(ft.ClientNote, match="3 is back"), pytest.warns(ft.ClientFailure, match=expected):
        result = ft.run(Stuck(note=str(tmp_path / "note")), deadline=3.0, **engine, **SMALL)
    assert [record.failed for record in result.rounds] == [[], [3], []]
    processes = set(map(int, (tmp_path / "note").read_text().split()))
    assert len(processes) == 2  # what it forked ended with it
    assert gone(processes)


def test_a_client_that_kills_every_worker_is_left_out(engine: dict[str, Any]) -> None:
    left_out = "client 3 left out: its worker process died 3 times"
    with pytest.warns(ft.ClientNote, match="3 is back"), pytest.warns(ft.ClientFailure, match=left_out):
        result = ft.run(Deadly(), **engine, **SMALL)
    assert [record.failed for record in result.rounds] == [[], [3], []]


def test_idle_actors_that_die_are_no_clients_fault(engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are killed: after round 1, when one of them had no work yet, and after round 3, when both were known to be
    there. A request may be given to one, but then not to the other one too."""
    monkeypatch.setattr("fedtailor.engines.workers.ATTEMPTS", 2)

    def kill(record: RoundRecord) -> None:
        while len(idle := actors(b"ray::Actor")) < 2:
            time.sleep(0.05)
        if record.round in (1, 3):
            for number in idle:
                os.kill(number, signal.SIGKILL)
            assert gone(idle)

    settings: dict[str, Any] = {**SMALL, "rounds": 4, "participation": 1, "evaluation": {"every": 0}}
    result = ft.run("fedavg", workers=2, on_round=kill, **engine, **settings)
    check_same(result, ft.run("fedavg", engine="in-process", **settings))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_no_process(how: signal.Signals, tmp_path: Path) -> None:
    before, out = processes(), tmp_path / "run"
    options = ["--clients", "6", "--rounds", "1000", "--checkpoint-every", "3", "--engine", "ray", "--workers", "1"]
    command = [sys.executable, "-m", "fedtailor", "run", "ditto", *options, "--out", str(out)]

    def hear_interrupts() -> None:  # also where the tests themselves run in the background, deaf to Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, preexec_fn=hear_interrupts, **pipes) as run:
        deadline = time.monotonic() + 120
        while not (out / "rounds.jsonl").exists() or (out / "rounds.jsonl").read_text().count("\n") < 5:
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(how)
        _, errors = run.communicate(timeout=60)
    if how == signal.SIGKILL:
        assert run.returncode == -signal.SIGKILL
    else:
        assert run.returncode == 130
        assert f"fedtailor resume {out}" in errors.replace("\n", "")
    assert gone(processes() - before, 120)  # two of Ray's own look for their server for a minute
    assert len(ft.load(out).rounds) < 1000
