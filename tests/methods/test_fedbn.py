"""FedBN against its slow reference with plain PyTorch, its limit cases, its bytes and its new clients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.methods.fedbn import FedBN
from tests.helpers import digits, final
from tests.methods.problems import EXACT, MOMENTUM, SMALL, close, who
from tests.reference.batches import batches
from tests.reference.fedbn import fedbn

RESNET: dict[str, Any] = {**SMALL, "model": "resnet", "max_train": 12, "rounds": 2, "epochs": 1}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.LayerNorm(5),
                         nn.Linear(5, 10))  # fmt: skip


LOCAL = ("1.", "4.")  # the normalisation layers' names begin so


def test_a_slow_version_comes_to_the_same_state_dicts() -> None:
    """`torch.optim.SGD` on a copy for each client; all but the normalisation layers is averaged by samples."""
    data = [(x.double(), y) for x, y in digits([17, 9, 23, 12, 14, 11])]
    module = network()
    how: dict[str, Any] = {"rounds": 4, "participation": 2, "epochs": 2, "batch": 5, "drop_last": True, "seed": 1}
    result = ft.run(FedBN(), data=data, model=module, lr=0.2, weight_decay=0.01, **how, **EXACT)
    partitioned = [result.data.client(i).train for i in range(6)]

    def order(number: int, i: int) -> list[Tensor | None]:
        return batches(len(partitioned[i][1]), 1, number, i, epochs=2, batch=5, drop_last=True)

    shared, own = fedbn(module.double(), LOCAL, partitioned, who(result), order, lr=0.2, weight_decay=0.01)
    assert set(own) < set(range(6))  # somebody was never called
    assert len(own) > 2
    for client in range(6):
        found = result.personal(client)
        for name, tensor in {**shared, **own.get(client, {})}.items():
            close(found[name].double(), tensor.double())


@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_without_normalisation_layers_it_is_fedavg(more: dict[str, Any]) -> None:
    ours, average = ft.run("fedbn", **SMALL, **more), ft.run("fedavg", **SMALL, **more)
    assert torch.equal(final(ours)["server/shared"], final(average)["server/theta"])
    assert ours.clients == average.clients  # also the bytes


@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_with_nothing_but_normalisation_layers_it_is_local(more: dict[str, Any]) -> None:
    how: dict[str, Any] = {**SMALL, **more, "data": digits([20] * 6), "model": nn.LayerNorm(64)}
    ours, local = ft.run(FedBN(), **how), ft.run("local", **how)
    for client in range(6):
        assert torch.equal(ours.personal_vector(client), local.personal_vector(client))
    assert {record.bytes_up + record.bytes_down for record in ours.rounds} == {0}


def test_only_what_lies_outside_the_normalisation_layers_travels() -> None:
    result = ft.run("fedbn", **RESNET)
    run = result.simulation
    names = {name for name in result.personal(0) if "num_batches" not in name}
    tensors = {name: tensor for name, tensor in run.terms.network.module.state_dict().items() if name in names}
    norms = {name.rpartition(".")[0] for name in names if name.endswith("running_mean")}
    assert len(norms) == 9
    size = sum(tensor.numel() for name, tensor in tensors.items() if name.rpartition(".")[0] not in norms)
    assert result.rounds[-1].bytes_up == result.rounds[-1].bytes_down == 3 * 4 * size
    assert len(run.server.state["shared"]) == size


def test_each_client_has_its_own_normalisation_layers_and_all_share_the_rest() -> None:
    result = ft.run("fedbn", **{**RESNET, "participation": "all"})
    one, other = result.personal(0), result.personal(1)
    differ = {name for name in one if "num_batches" not in name and not torch.equal(one[name], other[name])}
    norms = {name.rpartition(".")[0] for name in one if name.endswith("running_mean")}
    assert {name.rpartition(".")[0] for name in differ} == norms
    for layer in norms:
        assert {f"{layer}.{name}" for name in ("weight", "bias", "running_mean", "running_var")} <= differ


def test_new_clients_begin_with_the_first_normalisation_layers_and_need_fine_tuning() -> None:
    how: dict[str, Any] = {"data": digits([100] * 6), "model": network(), "rounds": 6, "lr": 0.1, "new_clients": 2}
    how |= {"engine": "in-process"}
    plain = ft.run(FedBN(), **how, evaluation={"clients": "new"})
    tuned = ft.run(FedBN(), **how, evaluation={"clients": "new", "fine_tune": 20})
    run = plain.simulation
    for client in run.data.new:
        theta = run.personal_model(client)
        for place in run.server.layout.norm_layers:
            assert torch.equal(theta[place], run.server.initial[place])
            theta[place] = 0
        assert torch.equal(theta[theta != 0], run.server.state["shared"][run.server.state["shared"] != 0])
    assert plain.accuracy is not None
    assert tuned.accuracy is not None
    assert tuned.accuracy > plain.accuracy + 0.1
