"""APFL against a second, slow implementation with plain autograd, and its limit cases."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.methods.apfl import APFL
from tests.helpers import final, quadratic_clients, run_quadratic
from tests.methods.test_pgfed import MOMENTUM, Problem, close, on_both, watched, who
from tests.methods.test_pgfed import SMALL as LONGER

SMALL: dict[str, Any] = {**LONGER, "rounds": 3, "epochs": 2}


def slopes(problem: Problem, i: int, v: Tensor, w: Tensor, alpha: float, batch: Tensor | None) -> tuple[Tensor, float]:
    """∂/∂v and ∂/∂α of f(αv + (1−α)w), by autograd."""
    leaf, share = v.clone().requires_grad_(), torch.tensor(alpha, dtype=v.dtype, requires_grad=True)
    value = problem.risk(i, share * leaf + (1 - share) * w, batch)
    by_v, by_alpha = torch.autograd.grad(value, [leaf, share])
    return by_v, float(by_alpha)


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
    lr, momentum, decay = result.experiment.lr, settings.get("momentum", 0.0), settings.get("weight_decay", 0.0)
    w, zero = problem.initial, torch.zeros_like(problem.initial)
    clients = range(len(problem.samples))
    v, alpha = [problem.initial for _ in clients], [method.alpha for _ in clients]
    speeds = {(i, which): zero for i in clients for which in "wv"}
    for number, participants in enumerate(who(result), 1):
        ends = []
        for i in participants:
            mine, start = w, alpha[i]
            for step, batch in enumerate(problem.order(number, i)):
                by_v, by_alpha = slopes(problem, i, v[i], mine, alpha[i], batch)
                speeds[i, "v"] = momentum * speeds[i, "v"] + by_v + decay * v[i]
                speeds[i, "w"] = momentum * speeds[i, "w"] + problem.slope(i, mine, batch)[1] + decay * mine
                v[i], mine = v[i] - lr * speeds[i, "v"], mine - lr * speeds[i, "w"]
                if method.adaptive and step == 0:
                    alpha[i] = min(1.0, max(0.0, alpha[i] - lr * by_alpha))
            assert (alpha[i] != start) == (method.adaptive and not torch.equal(w, problem.initial))
            ends.append(mine)
        total = sum(problem.samples[i] for i in participants)
        w = sum(problem.samples[i] / total * end for i, end in zip(participants, ends, strict=True))
        close(log.server[number]["theta"], w)
        close(log.server[number]["alpha"], torch.tensor(alpha, dtype=torch.float64))
    states = final(result)
    for i in {i for participants in who(result) for i in participants}:
        close(states[f"{i}/v"], v[i])
        close(states[f"{i}/alpha"], torch.tensor(alpha[i], dtype=torch.float64))
        close(result._federation.personal(i), alpha[i] * v[i] + (1 - alpha[i]) * w)


@pytest.mark.parametrize("more", [{}, MOMENTUM])
@pytest.mark.parametrize("parameters", [{}, {"alpha": 0.0, "adaptive": False}, {"alpha": 0.9}])
def test_the_global_model_is_fedavgs_whatever_alpha_is(parameters: dict[str, Any], more: dict[str, Any]) -> None:
    ours, fedavg = (ft.run(name, **p, **SMALL, **more) for name, p in (("apfl", parameters), ("fedavg", {})))
    assert torch.equal(ours._federation.server.state["theta"], fedavg._federation.server.state["theta"])


def test_alpha_0_is_fedavg() -> None:
    ours, fedavg = ft.run("apfl", alpha=0.0, adaptive=False, **SMALL), ft.run("fedavg", **SMALL)
    for i in range(6):
        assert torch.equal(ours._federation.personal(i), fedavg._federation.personal(i))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": "resnet", "max_train": 12, "rounds": 2, "epochs": 1}])
def test_alpha_1_is_local(more: dict[str, Any]) -> None:
    settings = {**SMALL, **more}
    ours, local = ft.run("apfl", alpha=1.0, adaptive=False, **settings), ft.run("local", **settings)
    came = {i for participants in who(ours) for i in participants}
    assert came
    for i in came:
        assert torch.equal(ours._federation.personal(i), local._federation.personal(i))


def test_alpha_stays_between_0_and_1() -> None:
    """Long steps would carry it out of there on both sides."""
    data, _, _ = quadratic_clients(6, 3)
    result = run_quadratic("apfl", data, 3, lr=0.5, steps=3, rounds=8)
    seen = torch.stack([result._federation.observations.get(number)["alpha"] for number in range(1, 9)])
    assert seen.min() == 0.0
    assert seen.max() == 1.0


def test_new_clients_get_the_global_model() -> None:
    result = ft.run("apfl", **SMALL, new_clients=2)
    for i in result._federation.data.new:
        assert torch.equal(result._federation.personal(i), result._federation.server.state["theta"])


def test_right_after_its_work_a_client_mixes_with_its_own_w() -> None:
    method, log = watched(APFL)
    result = ft.run(method, **{**SMALL, "rounds": 1}, evaluation={"model": "local"})
    run, states = result._federation, final(result)
    for i in who(result)[0]:
        alpha, v, w = states[f"{i}/alpha"], states[f"{i}/v"], log.up[1, i]["theta"]
        (expected,) = run.bench._measure(alpha * v + (1 - alpha) * w, (i,))
        assert run.evaluator.known[i][1] == expected


def test_a_round_costs_one_vector_each_way_and_alpha() -> None:
    size = 64 * 16 + 16 + 16 * 10 + 10
    for record in ft.run("apfl", **SMALL).rounds:
        assert record["bytes_down"] == 3 * 4 * size
        assert record["bytes_up"] == 3 * 4 * (size + 1)
