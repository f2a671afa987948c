"""Per-FedAvg against plain autograd through its inner step, a second, slow implementation, and its limit case."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fedtailor as ft
from fedtailor.local.client import Client
from fedtailor.local.descent import Descent, batches
from fedtailor.local.streams import torch_stream
from fedtailor.methods.per_fedavg import PerFedAvg
from tests.helpers import final, quadratic_clients, run_quadratic
from tests.local.test_steps import client
from tests.methods.test_pgfed import MOMENTUM, SMALL, Problem, close, on_a_network, on_quadratics, watched, who


def meta_gradient_by_autograd(one: Client, theta: Tensor, alpha: float) -> Tensor:
    """d/dθ f(θ − α∇f(θ)), through the inner step, with PyTorch's own functional call of the network."""
    module, names = one.network.module, [name for name, _ in one.network.module.named_parameters()]
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    one.network.vector.copy_(theta)
    leaves = [parameter.detach().clone().requires_grad_() for _, parameter in module.named_parameters()]

    def risk(values: list[Tensor]) -> Tensor:
        given = dict(zip(names, values, strict=True))
        return functional.cross_entropy(torch.func.functional_call(module, given, (one.train[0],)), one.train[1])

    inner = torch.autograd.grad(risk(leaves), leaves, create_graph=True)
    adapted = [leaf - alpha * slope for leaf, slope in zip(leaves, inner, strict=True)]
    outer = torch.autograd.grad(risk(adapted), leaves)
    one.network.gradient.zero_()
    for (name, parameter), slope in zip(module.named_parameters(), outer, strict=True):
        assert slope.shape == shapes[name]
        parameter.grad.copy_(slope)  # type: ignore[union-attr]
    return one.network.gradient.clone()


def in_single_precision(one: Client) -> Client:
    x, y = one.train
    network = type(one.network)(one.network.module.float())
    return replace(one, train=(x.float(), y), network=network, initial=network.vector.clone())


@pytest.mark.parametrize(("single", "error"), [(False, 1e-12), (True, 1e-6)])
@pytest.mark.parametrize("alpha", [0.05, 0.7])
def test_the_meta_gradient_is_autograds_through_the_inner_step(alpha: float, single: bool, error: float) -> None:
    one = in_single_precision(client(batch=None)) if single else client(batch=None)
    (batch, *_) = one.batches()
    theta = one.initial
    exact = meta_gradient_by_autograd(one, theta, alpha)
    ours = PerFedAvg(inner_lr=alpha).meta_gradient(one, theta, batch, batch, batch)
    torch.testing.assert_close(ours, exact, rtol=0, atol=error)
    first = PerFedAvg(inner_lr=alpha, first_order=True).meta_gradient(one, theta, batch, batch, batch)
    assert (first - exact).norm() > 0.01 * exact.norm()


def orders(result: ft.RunResult, purpose: str, number: int, i: int) -> list[Tensor | None]:
    """The batches of one purpose in one visit."""
    how = result.experiment
    descent = Descent(steps=how.steps, epochs=how.epochs, batch=None if how.batch == "full" else how.batch)
    samples = result._federation.data.train(i)[1]
    stream = torch_stream(how.seed, purpose, number, i)
    return list(batches(len(samples), replace(descent, drop_last=how.drop_last), stream, torch.device("cpu")))


@pytest.mark.parametrize("run_on", [on_quadratics, on_a_network])
@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        ({"inner_lr": 0.3}, {"participation": 3}),
        ({"inner_lr": 0.3, "first_order": True}, {}),
        ({"inner_lr": 0.2}, {"momentum": 0.6, "keep_momentum": True, "weight_decay": 0.01}),
    ],
)
def test_a_slow_version_comes_to_the_same_vectors(
    run_on: Callable[..., tuple[ft.RunResult, Problem]], parameters: dict[str, Any], settings: dict[str, Any]
) -> None:
    method, log = watched(PerFedAvg, **parameters)
    result, problem = run_on(method, **settings)
    lr, momentum, decay = result.experiment.lr, settings.get("momentum", 0.0), settings.get("weight_decay", 0.0)
    alpha, w, speeds = method.inner_lr, problem.initial, {}
    for number, participants in enumerate(who(result), 1):
        ends = []
        for i in participants:
            theta, speed = w, speeds.get(i, torch.zeros_like(w))
            D, D2, D3 = (orders(result, purpose, number, i) for purpose in ("inner", "batches", "curvature"))
            assert all(
                one is None or not torch.equal(one, other)  # type: ignore[arg-type]
                for one, other in [*zip(D, D2, strict=True), *zip(D2, D3, strict=True), *zip(D, D3, strict=True)]
            )
            for d, d2, d3 in zip(D, D2, D3, strict=True):
                adapted = theta - alpha * problem.slope(i, theta, d)[1]
                slope = problem.slope(i, adapted, d2)[1]
                if not method.first_order:
                    risk = lambda point, i=i, d3=d3: problem.risk(i, point, d3)  # noqa: E731
                    slope = slope - alpha * torch.autograd.functional.vhp(risk, theta, slope)[1]
                speed = momentum * speed + slope + decay * theta
                theta = theta - lr * speed
            speeds[i] = speed
            close(log.up[number, i]["theta"], theta)
            ends.append(theta)
        total = sum(problem.samples[i] for i in participants)
        w = sum(problem.samples[i] / total * end for i, end in zip(participants, ends, strict=True))
        close(log.server[number]["theta"], w)
    for i in range(len(problem.samples)):
        close(result._federation.personal(i), w - alpha * problem.slope(i, w)[1])


def test_the_global_model_becomes_the_best_after_one_step() -> None:
    """For quadratic clients Σ_i (I − αH)H(I − αH)(θ − c) = 0, and FedAvg's Σ_i H(θ − c) = 0 is another point."""
    data, centres, curvatures = quadratic_clients(3, 2, seed=3)
    result = run_quadratic("per-fedavg", data, 2, inner_lr=0.15, lr=0.5, rounds=90, evaluation={"every": 90})
    shrink = torch.eye(2, dtype=torch.float64) - 0.15 * curvatures
    best = [
        torch.linalg.solve(A.sum(0), (A @ centres[:, :, None]).sum(0)).flatten()
        for A in (shrink @ curvatures @ shrink, curvatures)
    ]
    torch.testing.assert_close(result._federation.server.state["theta"], best[0], rtol=0, atol=1e-6)
    assert (best[0] - best[1]).abs().max() > 0.01


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": "resnet", "max_train": 12}])
@pytest.mark.parametrize("first_order", [True, False])
def test_without_an_inner_step_it_is_fedavg(first_order: bool, more: dict[str, Any]) -> None:
    settings = {**SMALL, "rounds": 2, "epochs": 2, **more}
    ours = ft.run("per-fedavg", inner_lr=0.0, first_order=first_order, **settings)
    fedavg = ft.run("fedavg", **settings)
    assert torch.equal(ours._federation.server.state["theta"], fedavg._federation.server.state["theta"])
    for i in range(6):
        assert torch.equal(ours._federation.personal(i), fedavg._federation.personal(i))


def test_nothing_but_the_global_model_is_kept() -> None:
    assert set(final(ft.run("per-fedavg", **{**SMALL, "rounds": 1}))) == {"server/theta"}


def test_new_clients_take_the_same_step() -> None:
    data, centres, curvatures = quadratic_clients(5, 3)
    result = run_quadratic("per-fedavg", data, 3, rounds=3, inner_lr=0.2, new_clients=2)
    w = result._federation.server.state["theta"]
    assert len(result._federation.data.new) == 2
    for i in result._federation.data.new:
        expected = w - 0.2 * curvatures[i] @ (w - centres[i])
        torch.testing.assert_close(result.personal(i)["theta"], expected, rtol=0, atol=1e-12)


def test_a_round_costs_one_vector_each_way() -> None:
    size = 64 * 16 + 16 + 16 * 10 + 10
    for record in ft.run("per-fedavg", **{**SMALL, "epochs": 1}).rounds:
        assert record["bytes_down"] == record["bytes_up"] == 3 * 4 * size
