"""Per-FedAvg against plain autograd through its inner step, its slow reference, and its limit case."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fedtailor as ft
from fedtailor.methods.per_fedavg import PerFedAvg
from fedtailor.training.client import Client
from tests.helpers import quadratic_clients, run_quadratic
from tests.methods.problems import MOMENTUM, SMALL, close, on_both, watched, who
from tests.reference.batches import batches
from tests.reference.per_fedavg import per_fedavg
from tests.reference.problem import Problem
from tests.training.parts import client


def meta_gradient_by_autograd(one: Client, theta: Tensor, alpha: float) -> Tensor:
    """d/dθ f(θ − α∇f(θ)), through the inner step, with PyTorch's own functional call of the network."""
    module, names = one.network.module, [name for name, _ in one.network.module.named_parameters()]
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    x, y = one.train_data
    one.network.vector.copy_(theta)
    leaves = [parameter.detach().clone().requires_grad_() for _, parameter in module.named_parameters()]

    def risk(values: list[Tensor]) -> Tensor:
        given = dict(zip(names, values, strict=True))
        return functional.cross_entropy(torch.func.functional_call(module, given, (x,)), y)

    inner = torch.autograd.grad(risk(leaves), leaves, create_graph=True)
    adapted = [leaf - alpha * slope for leaf, slope in zip(leaves, inner, strict=True)]
    outer = torch.autograd.grad(risk(adapted), leaves)
    one.network.gradient.zero_()
    for (name, parameter), slope in zip(module.named_parameters(), outer, strict=True):
        assert slope.shape == shapes[name]
        parameter.grad.copy_(slope)  # type: ignore[union-attr]
    return one.network.gradient.clone()


def in_single_precision(one: Client) -> Client:
    x, y = one.train_data
    network = type(one.network)(one.network.module.float())
    return replace(one, train_data=(x.float(), y), network=network, initial=network.vector.clone())


@pytest.mark.parametrize(("single", "error"), [(False, 1e-12), (True, 1e-6)])
@pytest.mark.parametrize("alpha", [0.05, 0.7])
def test_the_meta_gradient_is_autograds_through_the_inner_step(alpha: float, single: bool, error: float) -> None:
    one = in_single_precision(client(batch=None)) if single else client(batch=None)
    (batch, *_) = one.batches()
    theta = one.initial
    exact = meta_gradient_by_autograd(one, theta, alpha)
    ours = PerFedAvg(inner_lr=alpha, first_order=False).meta_gradient(one, theta, batch, batch, batch)
    torch.testing.assert_close(ours, exact, rtol=0, atol=error)
    first = PerFedAvg(inner_lr=alpha).meta_gradient(one, theta, batch, batch, batch)
    assert (first - exact).norm() > 0.01 * exact.norm()


def orders(result: ft.RunResult, purpose: str, number: int, i: int) -> list[Tensor | None]:
    """The batches of one purpose in one round."""
    how = result.experiment
    drawing = {"steps": how.steps, "epochs": how.epochs, "drop_last": how.drop_last}
    n, batch = len(result.data.client(i).train[1]), None if how.batch == "full" else how.batch
    return batches(n, how.seed, number, i, purpose=purpose, batch=batch, **drawing)


@on_both
@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        ({"inner_lr": 0.3, "first_order": False}, {"participation": 3}),
        ({"inner_lr": 0.3}, {}),
        ({"inner_lr": 0.2, "first_order": False}, {"momentum": 0.6, "keep_momentum": True, "weight_decay": 0.01}),
    ],
)
def test_a_slow_version_comes_to_the_same_vectors(
    run_on: Callable[..., tuple[ft.RunResult, Problem]], parameters: dict[str, Any], settings: dict[str, Any]
) -> None:
    method, log = watched(PerFedAvg, **parameters)
    result, problem = run_on(method, **settings)
    sgd = {name: settings.get(name, 0.0) for name in ("momentum", "weight_decay")}

    def order(purpose: str, number: int, i: int) -> list[Tensor | None]:
        return orders(result, purpose, number, i)

    for number, i in log.up:
        for one, other in combinations([order(purpose, number, i) for purpose in ("inner", "batches", "curvature")], 2):
            for d, d2 in zip(one, other, strict=True):
                assert (d is None) == (d2 is None)
                assert d is None or d2 is None or not torch.equal(d, d2)
    slow_rounds = per_fedavg(problem, who(result), order, lr=result.experiment.lr, **parameters, **sgd)
    for number, slow in enumerate(slow_rounds, 1):
        for i, theta in slow.ends.items():
            close(log.up[number, i]["theta"], theta)
        close(log.server[number]["theta"], slow.w)
    for i in range(len(problem.samples)):
        close(result.personal_vector(i), slow.w - method.inner_lr * problem.slope(i, slow.w)[1])


def test_the_global_model_becomes_the_best_after_one_step() -> None:
    """For quadratic clients Σ_i (I − αH)H(I − αH)(θ − c) = 0, and FedAvg's Σ_i H(θ − c) = 0 is another point."""
    data, centres, curvatures = quadratic_clients(3, 2, seed=3)
    how: dict[str, Any] = {"lr": 0.5, "rounds": 90, "evaluation": {"every": 0}}
    result = run_quadratic("per-fedavg", data, 2, inner_lr=0.15, first_order=False, **how)
    shrink = torch.eye(2, dtype=torch.float64) - 0.15 * curvatures
    best = [
        torch.linalg.solve(A.sum(0), (A @ centres[:, :, None]).sum(0)).flatten()
        for A in (shrink @ curvatures @ shrink, curvatures)
    ]
    torch.testing.assert_close(result.server_state["theta"], best[0], rtol=0, atol=1e-6)
    assert (best[0] - best[1]).abs().max() > 0.01


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": "resnet", "max_train": 12}])
@pytest.mark.parametrize("first_order", [True, False])
def test_without_an_inner_step_it_is_fedavg(first_order: bool, more: dict[str, Any]) -> None:
    settings = {**SMALL, "rounds": 2, "epochs": 2, **more}
    ours = ft.run("per-fedavg", inner_lr=0.0, first_order=first_order, **settings)
    fedavg = ft.run("fedavg", **settings)
    assert torch.equal(ours.server_state["theta"], fedavg.server_state["theta"])
    for i in range(6):
        assert torch.equal(ours.personal_vector(i), fedavg.personal_vector(i))


def test_new_clients_take_the_same_step() -> None:
    data, centres, curvatures = quadratic_clients(5, 3)
    result = run_quadratic("per-fedavg", data, 3, rounds=3, inner_lr=0.2, new_clients=2)
    w = result.server_state["theta"]
    assert len(result.data.new) == 2
    for i in result.data.new:
        expected = w - 0.2 * curvatures[i] @ (w - centres[i])
        torch.testing.assert_close(result.personal(i)["theta"], expected, rtol=0, atol=1e-12)
