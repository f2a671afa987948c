"""pFedSim against its slow reference, its limit cases, its errors, and whom it finds similar."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.method import Server, Total
from fedtailor.methods.pfedsim import PFedSim
from fedtailor.training.layout import Layout
from tests.helpers import digits
from tests.methods.parts import SMALL, absent, normed, personal, server, state
from tests.methods.problems import MOMENTUM, close, on_a_network, watched, who
from tests.reference.pfedsim import SlowPFedSim

BODY = 6 * 64 + 6


@pytest.mark.parametrize(("warm", "lr"), [(0, 0.2), (2, 0.2), (3, 2.0)])
def test_follows_its_formulas(warm: int, lr: float) -> None:
    """With warm rounds and without, and with a rate that makes classifiers different."""
    method, log = watched(PFedSim, warm_rounds=warm)
    result, problem = on_a_network(method, rounds=9, participation=3, lr=lr)
    slow = SlowPFedSim(problem, BODY, lambda head: head[:60].view(10, 6), warm, lr)
    close(server(result), slow.run(who(result)))
    for at, start in slow.begun.items():
        close(log.down[at]["theta"], start)
    expected = torch.eye(6, dtype=torch.float64)
    for (i, j), s in slow.similar.items():
        expected[i, j] = s
    close(server(result, "S"), expected)
    assert 0 < (expected == 0).sum() < 20  # some have not met
    for client in range(6):
        close(personal(result, client), slow.own.get(client, server(result)))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}, {"warm_rounds": 3}])
def test_warm_rounds_are_fedavgs(more: dict[str, Any]) -> None:
    """Up to the last one, and by default in a run that is no longer: models, metrics and bytes."""
    warm = ft.run("pfedsim", **{**SMALL, **more})
    more = {name: value for name, value in more.items() if name != "warm_rounds"}
    average = ft.run("fedavg", **{**SMALL, **more})
    assert torch.equal(server(warm), server(average))
    assert warm.clients == average.clients
    assert not any(name == "theta" for client in range(5) for name in state(warm, client))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_clients_that_never_meet_are_local(more: dict[str, Any]) -> None:
    how = {**SMALL, **more, "participation": 1, "rounds": 8}
    alone, local = ft.run("pfedsim", **how, warm_rounds=0), ft.run("local", **how)
    participated = [client for client in range(5) if client not in absent(alone)]
    assert len(participated) < 8  # somebody came again
    for client in participated:
        assert torch.equal(personal(alone, client), personal(local, client))


def make_server(models: Tensor, kept: bool = True) -> Server:
    """A server after the warm rounds, whose clients' models have a body of 2 and a head of 2 × 3 and 2 numbers."""
    shapes = {"w": torch.Size([2, 3]), "b": torch.Size([2])}
    layout = Layout(10, slice(0, 2), slice(2, 10), head_shapes=shapes, linear=True)
    side = Server(torch.zeros(10), layout, torch.tensor([5] * len(models)), float(len(models)), round=11)
    PFedSim().start(side)
    side.participants = [*range(len(models))]
    if kept:
        total = Total(side.participants, side.n_samples, {}, {}, {"theta": dict(enumerate(models))})
        PFedSim().receive(side, total)
    return side


def test_equal_classifiers_get_the_plain_mean_of_the_bodies() -> None:
    """A similarity of 1 would be an infinite weight."""
    models = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    models[:, 2:8] = models[0, 2:8]  # their biases differ, and do not count
    down = PFedSim().send_all(make_server(models))
    for client in range(3):
        torch.testing.assert_close(down[client]["theta"][:2], models[:, :2].mean(0))
        assert torch.equal(down[client]["theta"][2:], models[client, 2:])


def test_opposite_classifiers_and_ones_of_zeros_count_as_not_similar() -> None:
    models = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    models[1, 2:8], models[2, 2:8] = -models[0, 2:8], 0.0
    side = make_server(models)
    assert torch.equal(side.state["S"], torch.eye(3, dtype=torch.float64))
    for client, message in PFedSim().send_all(side).items():
        assert torch.equal(message["theta"], models[client])


def test_whoever_has_not_trained_since_begins_with_the_global_model() -> None:
    side = make_server(torch.randn(3, 10), kept=False)
    side.state["theta"] = torch.arange(10.0)
    assert all(torch.equal(message["theta"], torch.arange(10.0)) for message in PFedSim().send_all(side).values())


def test_clients_with_the_same_classes_are_found_similar() -> None:
    x, y = digits([1200])[0]
    data = []
    for i in range(6):
        chosen = ((y < 5) == (i < 3)).nonzero()[:, 0][i % 3 :: 3][:60]
        data.append((x[chosen], y[chosen]))
    result = ft.run("pfedsim", data=data, model="mlp:16", rounds=6, warm_rounds=2, engine="in-process", stratify=False)
    order = [int(name) < 3 for name in result.names]
    same = torch.tensor(order)[:, None] == torch.tensor(order)
    S = result.observed(6)["S"].fill_diagonal_(torch.nan)
    assert S[same].nan_to_num(1.0).min() > S[~same].max()


def test_a_new_client_predicts_with_the_model_of_the_warm_rounds() -> None:
    result = ft.run("pfedsim", **{**SMALL, "new_clients": 1}, warm_rounds=2)
    new = result.data.n_clients - 1
    average = ft.run("fedavg", **{**SMALL, "new_clients": 1, "rounds": 2})
    assert torch.equal(personal(result, new), server(average))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10), nn.Linear(10, 10))


@pytest.mark.parametrize("settings", [{"head": 0}, {"model": two_layers(), "head": 2}])
def test_a_head_that_is_not_one_linear_layer_is_refused_before_the_first_round(settings: dict[str, Any]) -> None:
    with pytest.raises(ft.FedtailorError, match="pFedSim needs a head that is one linear layer"):
        ft.run("pfedsim", **{**SMALL, **settings})
