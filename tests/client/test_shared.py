"""What clients have in common is for reading only: a method that writes there is refused alike on every engine. What
one client leaves in the network is not for the next one to see."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.method import Batch
from fedtailor.testing import data_are_only_read
from tests.helpers import assert_same, final, numbers

SMALL: dict[str, Any] = {"data": "digits", "clients": 4, "model": "mlp:8", "rounds": 2, "epochs": 1, "max_train": 40}
ENGINES: list[dict[str, Any]] = [
    {"engine": "in-process"},
    *({"engine": "processes", "workers": workers} for workers in (1, 2, 3)),
]


def each_batch(client: ft.Client) -> None:
    for batch in client.batches(batch=None):
        batch.x.zero_()


def each_objective(client: ft.Client) -> None:
    def objective(batch: Batch) -> Tensor:
        batch.y.zero_()
        return batch.loss

    client.descend(client.initial, objective=objective, batch=None)


INPUTS, TARGETS = "the inputs of its samples", "the targets of its samples"
WRITES: dict[str, tuple[Callable[[ft.Client], Any], str]] = {
    "train inputs": (lambda client: client.train_data[0].mul_(2), INPUTS),
    "train targets": (lambda client: client.train_data[1].zero_(), TARGETS),
    "one entry": (lambda client: client.train_data[0].view(-1)[:1].fill_(0.5), INPUTS),
    "validation": (lambda client: client.validation_data[1].fill_(1), TARGETS),
    "initial": (lambda client: client.initial.add_(1), "client.initial"),
    "full batch": (each_batch, INPUTS),
    "objective": (each_objective, TARGETS),
}


class Writing(ft.Method):
    """FedAvg whose client 2 writes where it must not, in training or when it predicts."""

    what: str = "train inputs"
    where: str = "train"
    fail: bool = False

    def _write(self, client: ft.Client, where: str) -> None:
        if client.id == 2 and client.round == 1 and where == self.where:
            WRITES[self.what][0](client)
            if self.fail:
                raise ValueError("and more")

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        self._write(client, "train")
        return {"theta": client.descend(message["theta"])}

    def personal_model(self, client: ft.Client, message: ft.Message) -> Tensor:
        self._write(client, "personal_model")
        return message["theta"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", WRITES)
def test_who_writes_into_what_all_have_ends_the_run(what: str, engine: dict[str, Any]) -> None:
    expected = rf"^Writing, round 1: client 2 wrote into {WRITES[what][1]}, which is for reading only: change a copy"
    with pytest.raises(ft.FedtailorError, match=expected):
        ft.run(Writing(what=what), **SMALL, **engine)


@pytest.mark.parametrize("engine", ENGINES[::2])
@pytest.mark.parametrize("how", [{"where": "personal_model"}, {"fail": True}])
def test_also_when_it_predicts_and_when_it_fails(how: dict[str, Any], engine: dict[str, Any]) -> None:
    with pytest.raises(ft.FedtailorError, match="client 2 wrote into the inputs of its samples"):
        ft.run(Writing(**how), **SMALL, **engine)


def test_also_with_a_debugger() -> None:
    with pytest.raises(ft.FedtailorError, match="client 2 wrote into the inputs of its samples"):
        ft.run(Writing(), debug=True, **SMALL)


class Copying(ft.Method):
    """FedAvg whose clients change copies."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        x, y = client.train_data
        x.clone().zero_()
        y.clone().zero_()
        client.initial.clone().zero_()
        client.initial.requires_grad_()  # of this client's alone
        message["theta"].add_(0)
        return {"theta": client.descend(message["theta"])}


@pytest.mark.parametrize("engine", ENGINES[::2])
def test_copies_may_be_changed(engine: dict[str, Any]) -> None:
    result = ft.run(Copying(), **SMALL, **engine)
    assert_same(final(result), final(ft.run("fedavg", **SMALL, engine="in-process")))
    assert not result.simulation.terms.initial.requires_grad


class Peeping(ft.Method):
    """FedAvg whose clients add what they find in the network: the last client's model, if it is still there."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        network = client.network
        found = network.vector.clone() + network.gradient
        weights = torch.cat([p.detach().flatten() for p in network.module.parameters()])
        assert torch.equal(found.sort().values, weights.sort().values)
        return {"theta": client.descend(message["theta"]) + 0.01 * found}

    def personal_model(self, client: ft.Client, message: ft.Message) -> Tensor:
        return message["theta"] + 0.01 * client.network.vector


def test_what_a_client_leaves_in_the_network_is_gone() -> None:
    reference = ft.run(Peeping(), **SMALL, **ENGINES[0])
    for engine in ENGINES[1:]:
        other = ft.run(Peeping(), **SMALL, **engine)
        assert numbers(other.rounds) == numbers(reference.rounds)
        assert_same(final(other), final(reference))


class Overwriting(nn.Sequential):
    """A network that changes its own inputs."""

    def __init__(self) -> None:
        super().__init__(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 10))


def test_a_network_that_changes_its_inputs_is_refused() -> None:
    with pytest.raises(ft.FedtailorError, match="The model or the loss writes into the samples that it gets"):
        ft.run("fedavg", **{**SMALL, "model": Overwriting})


class Sly(ft.Method):
    """FedAvg that writes by ways which PyTorch does not count."""

    how: str = "data"

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        x = client.train_data[0]
        if self.how == "data":
            x.data[:1] = 0.5
        elif self.how == "NumPy":
            x.numpy()[:1] = 0.5
        else:
            client.initial.data[:1] = 0.5
        return {"theta": client.descend(message["theta"])}


@pytest.mark.parametrize(("how", "said"), [("data", "samples"), ("NumPy", "samples"), ("initial", "client.initial")])
def test_the_common_suite_finds_what_pytorch_does_not_count(how: str, said: str) -> None:
    with pytest.raises(AssertionError, match=f"{said} (was|were) changed"):
        data_are_only_read(Sly(how=how))


def test_one_runs_writing_does_not_reach_the_next_run(tmp_path: Path) -> None:
    """Runs of a comparison have their data in common."""
    settings = {"clients": 4, "model": "mlp:8", "rounds": 1, "epochs": 1, "max_train": 40, "engine": "in-process"}
    table = ft.compare(["tests.client.test_shared:Writing", "fedavg"], seeds=[0], out=tmp_path / "both", **settings)
    assert len(table.failed) == 1
    alone = ft.compare(["fedavg"], seeds=[0], out=tmp_path / "alone", **settings)
    assert table.lines[0].accuracy == alone.lines[0].accuracy
