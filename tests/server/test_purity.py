"""A run is a function of its experiment: nothing else may leak into its numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.methods.ditto import Ditto
from fedtailor.server.records import RoundRecord
from fedtailor.training.predictions import measure, outputs
from tests.helpers import assert_same, defined, final, numbers
from tests.reference.batches import stream

SMALL: dict[str, Any] = {"data": "digits", "clients": 4, "rounds": 3, "epochs": 1, "model": "mlp:8",
                         "engine": "in-process"}  # fmt: skip


class Reading(ft.Method):
    """FedAvg whose clients read the broadcast in different ways when they predict."""

    how: str = "item"

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": client.descend(message["theta"])}

    def personal_model(self, client: ft.Client, message: ft.Message) -> Tensor:
        if self.how == "get":
            return message.get("theta", client.initial)
        if self.how == "unpack":
            return {**message}["theta"]
        return next(iter(message.values())) if self.how == "values" else message["theta"]


@pytest.mark.parametrize("how", ["item", "get", "unpack", "values"])
def test_a_model_that_needs_the_broadcast_is_evaluated_anew_every_round(how: str) -> None:
    result = ft.run(Reading(how=how), **SMALL)
    assert result.clients == ft.run("fedavg", **SMALL).clients
    assert len({record.loss for record in result.rounds}) == 3


class Drawing(ft.Method):
    """A method that draws from PyTorch's own generator, at the client and at the server."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": message["theta"] + 0.01 * torch.randn(len(message["theta"]))}

    def receive(self, server: ft.Server, total: ft.Total) -> None:
        server.state["theta"] = total["theta"] + 0.01 * torch.randn(len(server.initial))


class Dicing(ft.Method):
    """FedAvg that keeps what it draws from the server's stream of each round."""

    def start(self, server: ft.Server) -> None:
        server.state |= {"theta": server.initial, "drawn": torch.zeros(3, 4)}

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": client.descend(message["theta"])}

    def receive(self, server: ft.Server, total: ft.Total) -> None:
        super().receive(server, total)
        drawn = server.state["drawn"].clone()
        drawn[server.round - 1] = torch.rand(4, generator=server.random)
        server.state["drawn"] = drawn


def test_the_server_has_a_random_stream_for_each_round() -> None:
    for seed in (0, 5):
        drawn = ft.run(Dicing(), **SMALL, seed=seed).server_state["drawn"]
        expected = [torch.rand(4, generator=stream(seed, "server", round)) for round in (1, 2, 3)]
        assert torch.equal(drawn, torch.stack(expected))


class Counting(nn.Module):
    """A network that counts its passes in a buffer of its own, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(64, 10)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.dense(x.flatten(1)) / self.passes


def test_draws_and_counters_do_not_depend_on_the_engine() -> None:
    """Which clients a process happened to serve before must not be seen in what it does next."""
    rest = {**SMALL, "engine": "processes"}
    for method, model in ((Drawing(), "mlp:8"), (ft.run, Counting)):
        chosen: Any = "fedavg" if method is ft.run else method
        reference = ft.run(chosen, **{**SMALL, "model": model})
        assert_same(final(reference), final(ft.run(chosen, **{**rest, "model": model}, workers=3)))


def test_a_last_round_that_diverged_is_the_last_round() -> None:
    class Diverging(ft.Method):
        def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
            return {"theta": client.descend(message["theta"])}

        def personal_model(self, client: ft.Client, message: ft.Message) -> Tensor:
            return message["theta"] * (float("nan") if client.round == 3 else 1.0)

    result = ft.run(Diverging(), **SMALL)
    record = result.chosen()
    assert record is not None
    assert record.round == 3
    assert result.loss is None


def test_validation_metrics_come_from_validation_samples() -> None:
    result = ft.run("local", **SMALL, seed=4, validation=0.3)
    run = result.simulation
    for client in range(4):
        found = result.clients[-1].results[client]
        theta = run.personal_model(client)
        for split, (x, y) in (("validation", run.data.validation(client)), ("test", run.data.test(client))):
            expected = measure(outputs(run.terms.network, theta, x), y, run.terms.loss)
            assert defined(found[split]) == pytest.approx(defined(expected), rel=1e-5)
    expected = sum(r["validation"].accuracy for r in result.clients[-1].results.values()) / 4
    assert result.rounds[-1].validation_accuracy == pytest.approx(expected)


def test_a_resumed_run_remembers_its_local_models_numbers(tmp_path: Path) -> None:
    settings = {**SMALL, "participation": 1, "rounds": 5, "evaluation": {"model": "local", "every": 2}}

    def stop(record: RoundRecord) -> None:
        if record.round == 3:
            raise KeyboardInterrupt

    whole = ft.run("fedavg", **settings)
    with pytest.raises(KeyboardInterrupt):
        ft.run("fedavg", out=tmp_path / "run", on_round=stop, **settings)
    resumed = ft.resume(tmp_path / "run")
    assert numbers(resumed.rounds) == numbers(whole.rounds)
    assert whole.rounds[-1].evaluated > 1


def test_new_clients_are_out_of_the_servers_sight() -> None:
    result = ft.run("fedacs", **{**SMALL, "clients": 6}, new_clients=2, quantile=0.1)
    run = result.simulation
    assert run.server.n_clients == 4
    assert run.server.state["S"].shape == (4, 4)
    assert run.data.new == {4, 5}


def test_buffers_are_no_part_of_the_models_geometry() -> None:
    """BatchNorm's running mean, variance and counter would otherwise make all models look alike."""
    settings = {**SMALL, "model": "resnet", "max_train": 12, "rounds": 2}
    run = ft.run("fedacs", **settings).simulation
    parameters = torch.ones(len(run.server.initial), dtype=torch.bool)
    for place in run.server.layout.buffers:
        parameters[place] = False
    vectors = torch.stack([run.state_of(c)["w"][parameters] for c in range(4)]).double()
    cosines = nn.functional.normalize(vectors) @ nn.functional.normalize(vectors).T
    torch.testing.assert_close(run.server.state["S"], cosines.fill_diagonal_(1), rtol=1e-4, atol=1e-5)
    cheap = ft.run("pgfed-ce", **settings).simulation.server
    assert (cheap.state["gradients"][:, ~parameters] == 0).all()


def test_only_the_same_objects_go_on(tmp_path: Path) -> None:
    ft.run(Ditto(lam=0.1), out=tmp_path / "ditto", **SMALL)
    with pytest.raises(ft.FedtailorError, match="not the run's method"):
        ft.resume(tmp_path / "ditto", method=Ditto(lam=9.0), rounds=4)
    ft.resume(tmp_path / "ditto", method=Ditto(lam=0.1), rounds=4)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    ft.run("fedavg", out=tmp_path / "net", **{**SMALL, "model": network})
    with pytest.raises(ft.FedtailorError, match="network is not the one"):
        ft.resume(tmp_path / "net", model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), rounds=4)
    assert len(ft.resume(tmp_path / "net", model=network, rounds=4).rounds) == 4


def test_a_directory_has_one_writer_in_a_process_too(tmp_path: Path) -> None:
    def again(record: RoundRecord) -> None:
        with pytest.raises(ft.FedtailorError, match="Another run of this process"):
            ft.resume(tmp_path / "run")

    ft.run("fedavg", out=tmp_path / "run", on_round=again, **SMALL)
    (tmp_path / "run/rounds.jsonl").write_text("")
    with pytest.raises(ft.FedtailorError, match="does not have all rounds up to 3"):
        ft.resume(tmp_path / "run")


@pytest.mark.parametrize("where", ["send", "state", "key"])
def test_anything_but_named_tensors_is_refused_at_the_server_too(where: str) -> None:
    class Sloppy(ft.Method):
        def send(self, server: ft.Server, client: int) -> ft.Message:
            return {"theta": server.state["theta"], **({"rate": 0.1} if where == "send" else {})}

        def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
            return {"theta": client.descend(message["theta"])}

        def receive(self, server: ft.Server, total: ft.Total) -> None:
            super().receive(server, total)
            if where != "send":
                server.state["n" if where == "state" else 3] = 1 if where == "state" else server.initial

    with pytest.raises(ft.FedtailorError, match="messages and states are named tensors"):
        ft.run(Sloppy(), **SMALL)


def test_momentum_is_kept_for_parts_of_one_model() -> None:
    class InTurn(ft.Method):
        def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
            theta = client.descend(message["theta"], part=client.head)
            return {"theta": client.descend(theta, part=client.body)}

    result = ft.run(InTurn(), **SMALL, momentum=0.9, keep_momentum=True)
    velocity, server = result.client_state(0)["momentum/theta"], result.simulation.server
    assert len(velocity) == len(server.initial)
    assert velocity[server.head].abs().sum() > 0
    assert velocity[server.body].abs().sum() > 0
