"""FedDyn against its slow reference, its fixed point and its limit cases."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from tests.helpers import EqualFedAvg, digits, final, run_quadratic, uneven_clients
from tests.methods.problems import MOMENTUM
from tests.reference.feddyn import feddyn


def optimum(centres: Tensor, curvatures: Tensor) -> Tensor:
    """Where the plain mean of all f_i is smallest."""
    return torch.linalg.solve(curvatures.sum(0), torch.einsum("nij,nj->i", curvatures, centres))


def test_follows_its_formula() -> None:
    data, centres, curvatures = uneven_clients()
    alpha, lr, steps = 0.3, 0.1, 4
    result = run_quadratic("feddyn", data, 4, alpha=alpha, lr=lr, steps=steps, rounds=7, participation=2, seed=1)

    def risk(i: int, theta: Tensor) -> Tensor:
        return 0.5 * (theta - centres[i]) @ curvatures[i] @ (theta - centres[i])

    rounds = [record.participants for record in result.rounds]
    slow = feddyn(risk, rounds, torch.zeros(4).double(), 5, alpha=alpha, lr=lr, steps=steps)
    found, seen = final(result), {i for participants in rounds for i in participants}
    torch.testing.assert_close(found["server/theta"], slow.w, rtol=0, atol=1e-9)
    torch.testing.assert_close(found["server/h"], slow.h, rtol=0, atol=1e-9)
    assert len(seen) == 5
    for i in seen:
        torch.testing.assert_close(found[f"{i}/gradient"], slow.gradients[i], rtol=0, atol=1e-9)


def test_after_an_exact_minimisation_the_state_is_the_local_gradient() -> None:
    data, centres, curvatures = uneven_clients()
    result = run_quadratic("feddyn", data, 4, alpha=0.5, lr=0.3, steps=100, rounds=1)
    eye = torch.eye(4).double()
    for i in range(5):
        theta = torch.linalg.solve(curvatures[i] + 0.5 * eye, curvatures[i] @ centres[i])  # from w = 0, ∇_i = 0
        slope = curvatures[i] @ (theta - centres[i])
        torch.testing.assert_close(final(result)[f"{i}/gradient"], slope, rtol=0, atol=1e-9)


@pytest.mark.parametrize("participation", ["all", 2])
def test_finds_the_optimum_of_the_mean_where_fedavg_does_not(participation: Any) -> None:
    data, centres, curvatures = uneven_clients(3, 2)
    how = {"steps": 5, "lr": 0.2, "rounds": 30, "evaluation": {"every": 0}}
    best = optimum(centres, curvatures)
    found = final(run_quadratic("feddyn", data, 2, alpha=2.0, participation=participation, **how))["server/theta"]
    assert (found - best).norm() < 1e-5
    if participation == "all":
        average = final(run_quadratic(EqualFedAvg(), data, 2, **how))["server/theta"]
        assert (average - best).norm() > 0.05


@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_without_alpha_it_is_fedavg_with_equal_weights(more: dict[str, Any]) -> None:
    how = {"model": "mlp:16", "rounds": 3, "participation": 3, "engine": "in-process", **more}
    uneven, even = digits([10, 30, 20, 40]), digits([25, 25, 25, 25])
    for data, other in ((uneven, EqualFedAvg()), (even, "fedavg")):
        none, average = final(ft.run("feddyn", alpha=0.0, data=data, **how)), final(ft.run(other, data=data, **how))
        assert torch.equal(none["server/theta"], average["server/theta"])
        assert not any(tensor.any() for name, tensor in none.items() if name.endswith(("/h", "/gradient")))


def test_a_small_alpha_is_not_fedavg() -> None:
    """h/α does not vanish with α: after one round w is mean + P/N (mean − w), whatever small α is."""
    data, _, _ = uneven_clients()
    how = {"steps": 5, "rounds": 1, "participation": 2}
    mean = final(run_quadratic(EqualFedAvg(), data, 4, **how))["server/theta"]  # from w = 0
    small = final(run_quadratic("feddyn", data, 4, alpha=1e-9, **how))["server/theta"]
    torch.testing.assert_close(small, mean + 2 / 5 * mean, rtol=0, atol=1e-8)  # of the order of α


def test_h_is_the_mean_of_all_clients_gradients() -> None:
    how = {"data": digits([20] * 5), "model": "mlp:8", "rounds": 4, "participation": 2, "dtype": "float64"}
    found = final(ft.run("feddyn", **how, engine="in-process"))
    states = [found[f"{i}/gradient"] for i in range(5) if f"{i}/gradient" in found]
    assert len(states) >= 3
    torch.testing.assert_close(found["server/h"], sum(states) / 5, rtol=0, atol=1e-12)


def test_buffers_are_averaged_and_nothing_else() -> None:
    """h/α would carry BatchNorm's variances below zero."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    how = {
        "data": digits([20, 40, 30]),
        "model": network,
        "rounds": 1,
        "batch": "full",
        "dtype": "float64",
        "engine": "in-process",
    }
    result, average = ft.run("feddyn", alpha=1e-12, **how), ft.run(EqualFedAvg(), **how)
    places = result.simulation.server.layout.buffers
    assert len(places) == 3
    for place in places:
        expected = final(average)["server/theta"][place]
        torch.testing.assert_close(final(result)["server/theta"][place], expected, rtol=0, atol=1e-9)
        assert not final(result)["server/h"][place].any()
    longer = ft.run("feddyn", alpha=0.01, **{**how, "rounds": 6})
    assert (final(longer)["server/theta"][places[1]] > 0).all()  # the variances
