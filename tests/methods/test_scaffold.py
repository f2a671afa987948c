"""SCAFFOLD against its slow reference, its fixed point and its limit cases."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.client.sites import Site
from fedtailor.messages import Reply, Request, State, Train
from tests.helpers import EqualFedAvg, digits, final, run_quadratic, uneven_clients
from tests.reference.scaffold import scaffold

MOMENTUM = {"momentum": 0.8, "weight_decay": 0.05}


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("more", [{}, MOMENTUM, {**MOMENTUM, "keep_momentum": True}])
def test_follows_its_formula(option: str, more: dict[str, Any]) -> None:
    """Option II by hand: without momentum (x − y)/(K η) − c + c_i; with it, the mean of the very gradients of the path,
    each weighted by how far it has led."""
    data, centres, curvatures = uneven_clients()
    lr, steps, server_lr = 0.05, 4, 0.7
    parameters = {"server_lr": server_lr, "full_gradient": option == "I"}
    result = run_quadratic(
        "scaffold", data, 4, **parameters, lr=lr, steps=steps, rounds=9, participation=2, seed=1, **more
    )

    def slope(i: int, at: Tensor) -> Tensor:
        at = at.detach().clone().requires_grad_()
        return torch.autograd.grad(0.5 * (at - centres[i]) @ curvatures[i] @ (at - centres[i]), at)[0]

    rounds, how = [record.participants for record in result.rounds], {"lr": lr, "steps": steps, "server_lr": server_lr}
    slow = scaffold(slope, rounds, torch.zeros(4).double(), 5, option=option, **how, **more)
    found, seen = final(result), {i for participants in rounds for i in participants}
    torch.testing.assert_close(found["server/theta"], slow.x, rtol=0, atol=1e-9)
    torch.testing.assert_close(found["server/c"], slow.c, rtol=0, atol=1e-9)
    assert len(seen) == 5
    for i in seen:
        torch.testing.assert_close(found[f"{i}/c"], slow.own[i], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"full_gradient": True},
        {"participation": 2},
        {"momentum": 0.5},
        {"momentum": 0.5, "keep_momentum": True, "participation": 2},
    ],
)
def test_finds_the_optimum_of_the_mean_where_fedavg_does_not(more: dict[str, Any]) -> None:
    data, centres, curvatures = uneven_clients(3, 2)
    best = torch.linalg.solve(curvatures.sum(0), torch.einsum("nij,nj->i", curvatures, centres))
    how = {"steps": 5, "lr": 0.2, "rounds": 30, "evaluation": {"every": 0}}
    found = final(run_quadratic("scaffold", data, 2, **how, **more))["server/theta"]
    assert (found - best).norm() < 1e-5
    if not more:
        average = final(run_quadratic(EqualFedAvg(), data, 2, **how))["server/theta"]
        assert (average - best).norm() > 0.05


@pytest.mark.parametrize("more", [{}, {**MOMENTUM, "keep_momentum": True}])
def test_round_one_is_fedavg_with_equal_weights(more: dict[str, Any]) -> None:
    how = {"data": digits([10, 30, 20, 40]), "model": "mlp:16", "rounds": 1, "participation": 3, "engine": "in-process"}
    one, average = ft.run("scaffold", **how, **more), ft.run(EqualFedAvg(), **how, **more)
    assert torch.equal(final(one)["server/theta"], final(average)["server/theta"])


def test_variates_of_identical_clients_cancel() -> None:
    """Up to rounding: c is a sum of changes, c_i is replaced."""
    ((x, y),) = digits([40])
    how = {"data": [(x, y)] * 3, "model": "mlp:16", "rounds": 4, "epochs": 5, "batch": "full", "dtype": "float64"}
    how |= {"test": 0.0, "validation": 0.0, "engine": "in-process", "evaluation": {"every": 0}}
    result, average = final(ft.run("scaffold", **how)), final(ft.run("fedavg", **how))
    torch.testing.assert_close(result["server/theta"], average["server/theta"], rtol=0, atol=1e-12)
    assert result["server/c"].norm() > 0.01
    torch.testing.assert_close(result["0/c"], result["server/c"], rtol=0, atol=1e-12)


def test_one_full_step_of_all_is_fedavg_with_equal_weights() -> None:
    """The corrections c − c_i sum to zero over all clients (up to rounding)."""
    data, _, _ = uneven_clients()
    result, average = (final(run_quadratic(method, data, 4, rounds=6)) for method in ("scaffold", EqualFedAvg()))
    torch.testing.assert_close(result["server/theta"], average["server/theta"], rtol=0, atol=1e-12)
    assert (result["0/c"] - result["server/c"]).norm() > 0.1


def test_c_is_the_mean_of_all_variates_even_when_replies_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Site.work

    def fails_once(site: Site, request: Request, state: State) -> tuple[Reply, State]:
        if isinstance(request, Train) and request.round == 2 and site.number == 1:
            raise RuntimeError("the power went off")
        return work(site, request, state)

    monkeypatch.setattr(Site, "work", fails_once)
    how = {"data": digits([20] * 4), "model": "mlp:8", "rounds": 3, "dtype": "float64", "engine": "in-process"}
    with pytest.warns(ft.ClientFailure, match="the power went off"):
        found = final(ft.run("scaffold", **how))
    torch.testing.assert_close(found["server/c"], sum(found[f"{i}/c"] for i in range(4)) / 4, rtol=0, atol=1e-12)


@pytest.mark.parametrize("full_gradient", [False, True])
def test_buffers_have_no_variates_and_are_averaged_whatever_the_servers_step(full_gradient: bool) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    how = {
        "data": digits([20, 40, 30]),
        "model": network,
        "rounds": 1,
        "batch": "full",
        "dtype": "float64",
        "engine": "in-process",
    }
    result = ft.run("scaffold", server_lr=3.0, full_gradient=full_gradient, **how)
    average = final(ft.run(EqualFedAvg(), **how))["server/theta"]
    server, found = result.simulation.server, final(result)
    assert len(server.layout.buffers) == 3
    for place in server.layout.buffers:
        torch.testing.assert_close(found["server/theta"][place], average[place], rtol=0, atol=1e-12)
        assert not found["server/c"][place].any()
        assert not found["0/c"][place].any()
    step = 3 * (average - server.initial)[server.head]
    torch.testing.assert_close((found["server/theta"] - server.initial)[server.head], step, rtol=0, atol=1e-12)
