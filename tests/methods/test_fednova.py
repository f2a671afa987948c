"""FedNova against a slow version, its limit case and what it is for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.methods import find_method
from tests.helpers import digits, final, quadratic_clients, run_quadratic
from tests.methods.parts import normed, server
from tests.methods.problems import EXACT, MOMENTUM, SMALL, Problem, close, on_a_network, on_both, watched, who
from tests.reference.fednova import SlowFedNova


@on_both
@pytest.mark.parametrize("tau", [None, 3.0])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.6, "weight_decay": 0.1}])
def test_a_slow_version_comes_to_the_same_vectors(
    run_on: Callable[..., tuple[ft.RunResult, Problem]], settings: dict[str, Any], tau: float | None
) -> None:
    result, problem = run_on(find_method("fednova", {} if tau is None else {"tau": tau}), **settings)
    steps = {name: getattr(result.experiment, name) for name in ("lr", "momentum", "weight_decay")}
    slow = SlowFedNova(problem, steps, tau=tau)
    for number, participants in enumerate(who(result), 1):
        slow.round(number, participants)
    close(server(result), slow.glob)


@pytest.mark.parametrize(
    "more",
    [
        {},
        MOMENTUM,
        {"schedule": "step:1,0.5", "step_schedule": "1.0 / t", "momentum": 0.5},
        {"model": normed()},
    ],
)
def test_equal_numbers_of_steps_are_fedavg(more: dict[str, Any]) -> None:
    """Up to rounding; whatever the steps are, but FedAvg's own data differ in size."""
    how = {"data": digits([20, 40, 30, 25]), "model": "mlp:8", "rounds": 3, "participation": 3, "steps": 5}
    how = {**how, **EXACT, **more}
    nova, average = (final(ft.run(method, **how))["server/theta"] for method in ("fednova", "fedavg"))
    torch.testing.assert_close(nova, average, rtol=0, atol=1e-11)


def test_unequal_numbers_of_steps_are_not_fedavg() -> None:
    nova, _ = on_a_network(find_method("fednova"))
    average, _ = on_a_network(find_method("fedavg"))
    assert (server(nova) - server(average)).abs().max() > 1e-3


def test_it_ends_at_the_optimum_of_all_where_fedavg_favours_those_who_step_most() -> None:
    """With a small rate. Client i has n_i samples, and so n_i steps of one sample in an epoch."""
    data, centres, curvatures = quadratic_clients(3, 3, seed=4)
    counts = [1, 4, 12]
    data = [(x.repeat(n, 1), y.repeat(n)) for (x, y), n in zip(data, counts, strict=True)]
    p = torch.tensor(counts).double() / sum(counts)
    best = torch.linalg.solve(
        torch.einsum("i,ijk->jk", p, curvatures), torch.einsum("i,ijk,ik->j", p, curvatures, centres)
    )
    how: dict[str, Any] = {"lr": 0.01, "rounds": 80, "steps": None, "epochs": 1, "batch": 1}
    away = {m: float((server(run_quadratic(m, data, 3, **how)) - best).norm()) for m in ("fednova", "fedavg")}
    assert away["fednova"] < 0.03
    assert away["fedavg"] > 7 * away["fednova"]


def test_a_local_model_is_the_clients_own() -> None:
    """Right after its work a client has y_i, not its normalised change."""
    local = {**SMALL, "participation": 1, "rounds": 1, "dtype": "float64", "evaluation": {"model": "local"}}
    one, average = ft.run("fednova", **local), ft.run("fedavg", **local)
    assert one.rounds[0].loss == pytest.approx(average.rounds[0].loss, rel=1e-9)


def test_the_number_of_steps_goes_up_unless_the_server_has_its_own() -> None:
    counted, log = watched(type(find_method("fednova")))
    result = ft.run(counted, **{**SMALL, "rounds": 1, "batch": 10, "epochs": 2})
    steps: dict[int, Tensor] = {client: upload["a"] for (_, client), upload in log.up.items()}
    n = result.data.n_samples.tolist()
    assert {client: float(a) for client, a in steps.items()} == {i: 2 * -(-n[i] // 10) for i in steps}
    fixed, log = watched(type(find_method("fednova")), tau=5.0)
    ft.run(fixed, **{**SMALL, "rounds": 1})
    assert all(upload.keys() == {"d"} for upload in log.up.values())


@pytest.mark.parametrize("setting", [{"optimizer": "adam"}, {"clip": 1.0}, {"server_optimizer": "adam"}])
def test_what_it_is_not_made_for_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ft.FedtailorError, match=f"FedNova cannot train with {next(iter(setting))}"):
        ft.run("fednova", **SMALL, **setting)
