"""APFL against its slow reference with plain autograd, and its limit cases."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fedtailor as ft
from fedtailor.methods.apfl import APFL
from tests.helpers import final, quadratic_clients, run_quadratic
from tests.methods.problems import MOMENTUM, close, on_both, watched, who
from tests.methods.problems import SMALL as LONGER
from tests.reference.apfl import apfl
from tests.reference.problem import Problem

SMALL: dict[str, Any] = {**LONGER, "rounds": 3, "epochs": 2}


@on_both
@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        ({}, {}),
        ({"alpha": 0.8, "adaptive": False}, {"participation": 3}),
        ({"alpha": 0.2}, {"momentum": 0.6, "keep_momentum": True, "weight_decay": 0.01}),
    ],
)
def test_a_slow_version_comes_to_the_same_vectors(
    run_on: Callable[..., tuple[ft.RunResult, Problem]], parameters: dict[str, Any], settings: dict[str, Any]
) -> None:
    method, log = watched(APFL, **parameters)
    result, problem = run_on(method, **settings)
    rounds, before = who(result), [method.alpha] * len(problem.samples)
    how = {"alpha": method.alpha, "adaptive": method.adaptive, "lr": result.experiment.lr}
    how |= {name: settings.get(name, 0.0) for name in ("momentum", "weight_decay")}
    for number, slow in enumerate(apfl(problem, rounds, **how), 1):
        close(log.server[number]["theta"], slow.w)
        close(log.server[number]["alpha"], torch.tensor(slow.alpha, dtype=torch.float64))
        moved = {i for i in range(len(before)) if slow.alpha[i] != before[i]}
        assert moved == (set(rounds[number - 1]) if method.adaptive and number > 1 else set())  # in round 1 v_i is w
        before = slow.alpha
    states = final(result)
    for i in {i for participants in rounds for i in participants}:
        close(states[f"{i}/v"], slow.v[i])
        close(states[f"{i}/alpha"], torch.tensor(slow.alpha[i], dtype=torch.float64))
        close(result.personal_vector(i), slow.alpha[i] * slow.v[i] + (1 - slow.alpha[i]) * slow.w)


@pytest.mark.parametrize("more", [{}, MOMENTUM])
@pytest.mark.parametrize("parameters", [{}, {"alpha": 0.0, "adaptive": False}, {"alpha": 0.9}])
def test_the_global_model_is_fedavgs_whatever_alpha_is(parameters: dict[str, Any], more: dict[str, Any]) -> None:
    ours, fedavg = (ft.run(name, **p, **SMALL, **more) for name, p in (("apfl", parameters), ("fedavg", {})))
    assert torch.equal(ours.server_state["theta"], fedavg.server_state["theta"])


def test_alpha_0_is_fedavg() -> None:
    ours, fedavg = ft.run("apfl", alpha=0.0, adaptive=False, **SMALL), ft.run("fedavg", **SMALL)
    for i in range(6):
        assert torch.equal(ours.personal_vector(i), fedavg.personal_vector(i))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": "resnet", "max_train": 12, "rounds": 2, "epochs": 1}])
def test_alpha_1_is_local(more: dict[str, Any]) -> None:
    settings = {**SMALL, **more}
    ours, local = ft.run("apfl", alpha=1.0, adaptive=False, **settings), ft.run("local", **settings)
    came = {i for participants in who(ours) for i in participants}
    assert came
    for i in came:
        assert torch.equal(ours.personal_vector(i), local.personal_vector(i))


def test_alpha_stays_between_0_and_1() -> None:
    """Long steps would carry it out of there on both sides."""
    data, _, _ = quadratic_clients(6, 3)
    result = run_quadratic("apfl", data, 3, lr=0.5, steps=3, rounds=8)
    seen = torch.stack([result.simulation.loop.observations.get(number)["alpha"] for number in range(1, 9)])
    assert seen.min() == 0.0
    assert seen.max() == 1.0


def test_a_client_that_is_not_called_is_evaluated_with_the_present_global_model() -> None:
    """What it predicts with changes with w, although its own state does not."""
    result = ft.run("apfl", **{**SMALL, "participation": 2})
    run, before = result.simulation, result.clients[-2].results
    rounds = who(result)
    idle = {i for participants in rounds[:-1] for i in participants} - set(rounds[-1])
    assert idle
    for i, measured in result.clients[-1].results.items():
        site = run.sites.site(i)
        assert measured == site.measure(site.network_at(result.personal_vector(i)))
    assert all(result.clients[-1].results[i] != before[i] for i in idle)


def test_right_after_its_work_a_client_mixes_with_its_own_w() -> None:
    method, log = watched(APFL)
    result = ft.run(method, **{**SMALL, "rounds": 1}, evaluation={"model": "local"})
    run, states = result.simulation, final(result)
    for i in who(result)[0]:
        alpha, v, w = states[f"{i}/alpha"], states[f"{i}/v"], log.up[1, i]["theta"]
        site = run.sites.site(i)
        expected = site.measure(site.network_at(alpha * v + (1 - alpha) * w))
        assert run.loop.evaluator.known[i][1] == expected
