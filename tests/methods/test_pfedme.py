"""pFedMe against its slow reference, its prox points and Moreau envelopes, and its limit cases."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fedtailor as ft
from fedtailor.methods.pfedme import PFedMe
from tests.helpers import Quadratic, digits, final, mean_output, quadratic_clients, run_quadratic
from tests.methods.problems import EXACT, MOMENTUM, SMALL, close, on_both, watched, who
from tests.reference.pfedme import pfedme, prox
from tests.reference.problem import Problem

EYE = torch.eye(3, dtype=torch.float64)


@on_both
@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        ({}, {}),
        ({"lam": 3.0, "prox_steps": 4, "outer_lr": 0.2, "beta": 0.6}, {"participation": 3}),
        ({"lam": 0.5, "prox_steps": 2, "beta": 1.7}, {"momentum": 0.6, "keep_momentum": True, "weight_decay": 0.01}),
    ],
)
def test_a_slow_version_comes_to_the_same_vectors(
    run_on: Callable[..., tuple[ft.RunResult, Problem]], parameters: dict[str, Any], settings: dict[str, Any]
) -> None:
    method, log = watched(PFedMe, **parameters)
    result, problem = run_on(method, **settings)
    how = {name: getattr(method, name) for name in ("lam", "prox_steps", "outer_lr", "beta")}
    how |= {name: settings.get(name, 0.0) for name in ("momentum", "weight_decay")}
    for number, slow in enumerate(pfedme(problem, who(result), lr=result.experiment.lr, **how), 1):
        for i, w in slow.ends.items():
            close(log.up[number, i]["theta"], w)
        close(log.server[number]["theta"], slow.w)
    states = final(result)
    for i, theta in slow.personal.items():
        close(states[f"{i}/personal"], theta)
        close(result.personal_vector(i), theta)
    assert (slow.w - problem.initial).abs().max() > 0.05


def test_the_personal_model_is_the_prox_point_and_not_the_local_copy() -> None:
    """(H + λI)⁻¹(Hc + λw_i), with w_i as it was before its last step."""
    data, centres, curvatures = quadratic_clients(3, 3)
    method, log = watched(PFedMe, lam=2.0, prox_steps=60, outer_lr=0.2)
    result = run_quadratic(method, data, 3, steps=2, lr=0.2, rounds=1)
    for i in range(3):
        w = torch.zeros(3, dtype=torch.float64)
        for _ in range(2):
            theta = prox(centres[i], curvatures[i], w, 2.0)
            w = w - 0.2 * 2.0 * (w - theta)
        found = result.personal(i)["theta"]
        torch.testing.assert_close(found, theta, rtol=0, atol=1e-9)
        assert (found - log.up[1, i]["theta"]).abs().max() > 0.05


def test_the_minimum_of_the_mean_moreau_envelope_stays_where_it_is() -> None:
    """There Σ_i λ(w − θ̂_i(w)) = 0: a linear equation for quadratic clients, whatever their numbers of samples."""
    data, centres, curvatures = quadratic_clients(4, 3, seed=1)
    data[2] = (data[2][0].repeat(5, 1), data[2][1].repeat(5))
    left, right = torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for c, H in zip(centres, curvatures, strict=True):
        inverse = torch.linalg.inv(H + 2.0 * EYE)
        left += EYE - 2.0 * inverse
        right += inverse @ H @ c
    best = torch.linalg.solve(left, right)
    away = []
    for start in (best, best + 1.0):
        module = Quadratic(3).double()
        module.theta.data = start
        how = {"rounds": 2, "steps": 1, "batch": "full", "lr": 0.2, **EXACT}
        method = PFedMe(lam=2.0, prox_steps=60, outer_lr=0.3)
        run = ft.run(method, data=data, model=module, loss=mean_output, **how)
        away.append(float((run.server_state["theta"] - best).abs().max()))
    assert away[0] < 1e-9
    assert away[1] < 0.9


@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_without_a_pull_the_personal_model_is_a_plain_local_descent(more: dict[str, Any]) -> None:
    settings = {**SMALL, "rounds": 1, **more}
    ours, local = final(ft.run("pfedme", lam=0.0, prox_steps=1, **settings)), final(ft.run("local", **settings))
    descended = [name for name in local if name.endswith("/theta") and "momentum" not in name]
    assert len(descended) == 3
    for name in descended:
        assert torch.equal(ours[name.replace("theta", "personal")], local[name])


@pytest.mark.parametrize("parameters", [{"lam": 0.0}, {"outer_lr": 0.0}, {"beta": 0.0}])
def test_the_global_model_stays(parameters: dict[str, float]) -> None:
    """The mean of two equal vectors is exact."""
    server = ft.run("pfedme", **parameters, **{**SMALL, "participation": 2, "rounds": 2}).simulation.server
    assert torch.equal(server.state["theta"], server.initial)


def test_one_prox_step_and_the_whole_way_to_it_is_fedavg_with_equal_weights() -> None:
    """To the rounding of a mean that is computed in two ways."""
    data = [(x.double(), y) for x, y in digits([30] * 4)]
    settings = {"data": data, "model": "mlp:6", "rounds": 4, "participation": 3, "seed": 2, **EXACT}
    ours = ft.run("pfedme", prox_steps=1, lam=2.0, outer_lr=0.5, beta=1.0, **settings).simulation.server
    fedavg = ft.run("fedavg", **settings).simulation.server
    torch.testing.assert_close(ours.state["theta"], fedavg.state["theta"], rtol=0, atol=1e-12)
    assert (ours.state["theta"] - ours.initial).abs().max() > 0.05


def test_new_clients_step_towards_their_prox_point() -> None:
    data, centres, curvatures = quadratic_clients(5, 3)
    result = run_quadratic("pfedme", data, 3, rounds=3, lam=2.0, prox_steps=4, new_clients=2)
    w = result.server_state["theta"]
    new = result.data.new
    assert len(new) == 2
    for i in new:
        theta = w.clone()
        for _ in range(4):
            theta = theta - 0.1 * (curvatures[i] @ (theta - centres[i]) + 2.0 * (theta - w))
        torch.testing.assert_close(result.personal(i)["theta"], theta, rtol=0, atol=1e-12)
        away = (prox(centres[i], curvatures[i], w, 2.0) - theta).norm()
        assert away < (prox(centres[i], curvatures[i], w, 2.0) - w).norm()
    many = run_quadratic("pfedme", data, 3, rounds=1, lam=2.0, prox_steps=60, lr=0.2, new_clients=2)
    w = many.server_state["theta"]
    for i in new:
        expected = prox(centres[i], curvatures[i], w, 2.0)
        torch.testing.assert_close(many.personal(i)["theta"], expected, rtol=0, atol=1e-9)


def test_batch_norm_buffers_are_not_stepped_beyond_what_was_seen() -> None:
    """With ηλ > 1 and β > 1 the parameters go beyond θ̃ and the mean; a variance must not."""
    method, log = watched(PFedMe, lam=1.0, outer_lr=1.5, beta=2.0, prox_steps=1)
    result = ft.run(method, **{**SMALL, "model": "resnet", "max_train": 12, "rounds": 2, "epochs": 1, "lr": 0.01})
    run, states = result.simulation, final(result)
    assert run.server.layout.buffers
    for i in who(result)[-1]:
        for place in run.server.layout.buffers:
            assert torch.equal(log.up[2, i]["theta"][place], states[f"{i}/personal"][place])
    mean = torch.stack([log.up[2, i]["theta"] for i in who(result)[-1]]).mean(0)
    for place in run.server.layout.buffers:
        torch.testing.assert_close(run.server.state["theta"][place], mean[place])
