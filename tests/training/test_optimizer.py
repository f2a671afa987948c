"""One step along a gradient: the clients' SGD and the server's optimisers, against torch.optim and written out."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtailor.training.optimizer import GradientOptimizer, OptimizerSettings, optimizer_step, server_step

STEPS = 7


def vectors(seed: int, count: int = STEPS, size: int = 31, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=dtype) for _ in range(count)]


def by_torch(
    start: Tensor, gradients: list[Tensor], kind: type[torch.optim.Optimizer], **settings: Any
) -> list[Tensor]:
    """The vector after each step of an optimiser of PyTorch's."""
    parameter = torch.nn.Parameter(start.clone())
    optimizer = kind([parameter], **settings)
    path = []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        path.append(parameter.detach().clone())
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("momentum", "weight_decay"), list(product([0.0, 0.9, 0.5], [0.0, 0.01])))
def test_a_step_is_torch_sgd_bit_for_bit(momentum: float, weight_decay: float, dtype: torch.dtype) -> None:
    settings = OptimizerSettings(lr=0.05, momentum=momentum, weight_decay=weight_decay)
    start, *gradients = vectors(0, STEPS + 1, dtype=dtype)
    sgd = {"lr": 0.05, "momentum": momentum, "weight_decay": weight_decay}
    expected = by_torch(start, gradients, torch.optim.SGD, **sgd)
    theta, moments = start.clone(), dict[str, Tensor]()
    for gradient, wanted in zip(gradients, expected, strict=True):
        optimizer_step(theta, gradient, moments, settings)
        assert torch.equal(theta, wanted)
    assert list(moments) == (["momentum"] if momentum else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("kind", "by"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_a_step_is_torch_adam_bit_for_bit(
    kind: Any, by: type[torch.optim.Optimizer], weight_decay: float, dtype: torch.dtype
) -> None:
    settings = OptimizerSettings(lr=0.01, kind=kind, weight_decay=weight_decay)
    start, *gradients = vectors(0, STEPS + 1, dtype=dtype)
    expected = by_torch(start, gradients, by, lr=0.01, weight_decay=weight_decay)
    theta, moments = start.clone(), dict[str, Tensor]()
    for gradient, wanted in zip(gradients, expected, strict=True):
        optimizer_step(theta, gradient, moments, settings)
        assert torch.equal(theta, wanted)
    assert set(moments) == {"mean", "square", "steps"}
    assert float(moments["steps"]) == STEPS


@pytest.mark.parametrize(("kind", "fixed"), list(product(["adam", "adamw"], [(), (slice(3, 5), slice(30, 31))])))
def test_a_step_of_adam_is_the_formula(kind: Any, fixed: tuple[slice, ...]) -> None:
    """One number at a time, with rates, numbers of steps and decay of their own; what is fixed stays to the bit."""
    settings = OptimizerSettings(lr=0.01, kind=kind, weight_decay=0.1)
    start, scale, *gradients = vectors(1, STEPS + 2)
    taken = torch.arange(len(start), dtype=start.dtype) % 3
    moments = {"mean": torch.zeros_like(start), "square": torch.zeros_like(start), "steps": taken.clone()}
    theta, x = start.clone(), start.numpy().copy()
    m, v = np.zeros(len(x)), np.zeros(len(x))
    for number, gradient in enumerate(gradients, 1):
        for i in range(len(x)):
            if any(place.start <= i < place.stop for place in fixed):
                continue
            rate, t = 0.01 * 0.5 * scale[i].item(), number + taken[i].item()
            g = gradient[i].item() + (0.1 * x[i] if kind == "adam" else 0.0)
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g * g
            decay = 0.1 * x[i] if kind == "adamw" else 0.0
            x[i] -= rate * (decay + m[i] / (1 - 0.9**t) / ((v[i] / (1 - 0.999**t)) ** 0.5 + 1e-8))
        optimizer_step(theta, gradient.clone(), moments, settings, 0.5, scale, fixed)
    np.testing.assert_allclose(theta.numpy(), x, rtol=1e-10, atol=1e-12)
    for place in fixed:
        assert torch.equal(theta[place], start[place])


def test_a_gradient_is_clipped_as_torch_clips_it() -> None:
    for seed, most in product(range(3), (0.1, 3.0, 100.0)):
        (gradient,) = vectors(seed, 1)
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_([parameter], most)
        theta = torch.zeros_like(gradient)
        optimizer_step(theta, gradient.clone(), {}, OptimizerSettings(lr=1.0, clip=most))
        torch.testing.assert_close(-theta, parameter.grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("momentum", "weight_decay"), list(product([0.0, 0.9], [0.0, 0.1])))
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("fixed", [None, [slice(3, 5), slice(30, 31)]])
def test_a_step_is_the_formula(momentum: float, weight_decay: float, scaled: bool, fixed: list[slice] | None) -> None:
    """v ← m v + scale (g + λ θ);  θ ← θ − lr v, one number at a time; what is fixed stays to the last bit."""
    settings = OptimizerSettings(lr=0.05, momentum=momentum, weight_decay=weight_decay)
    start, scale, *gradients = vectors(1, STEPS + 2)
    theta, moments = start.clone(), dict[str, Tensor]()
    x, speed = start.numpy().copy(), np.zeros(len(start))
    stays = {i for place in fixed or [] for i in range(place.start, place.stop)}
    for gradient in gradients:
        g = gradient.numpy().copy()
        for i in range(len(x)):
            force = (scale[i].item() if scaled else 1.0) * (g[i] + weight_decay * x[i])
            speed[i] = momentum * speed[i] + (0.0 if i in stays else force)
            x[i] -= 0.05 * speed[i]
        optimizer_step(theta, gradient, moments, settings, scale=scale if scaled else None, fixed=fixed or ())
    np.testing.assert_allclose(theta.numpy(), x, rtol=1e-12, atol=1e-14)
    for place in fixed or []:
        assert torch.equal(theta[place], start[place])
    if fixed and momentum:
        assert all((moments["momentum"][place] == 0).all() for place in fixed)


def test_a_given_velocity_is_updated_in_place() -> None:
    theta, gradient, velocity = vectors(2, 3)
    before, moments = velocity.clone(), {"momentum": velocity}
    optimizer_step(theta, gradient.clone(), moments, OptimizerSettings(lr=0.1, momentum=0.9))
    assert moments["momentum"] is velocity
    torch.testing.assert_close(velocity, 0.9 * before + gradient, rtol=1e-14, atol=0)


OPTIMIZERS: dict[GradientOptimizer, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.999), "eps": 1e-8}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_servers_steps_are_those_of_torch(optimizer: GradientOptimizer) -> None:
    kind, settings = OPTIMIZERS[optimizer]
    start, *gradients = vectors(3, STEPS + 1)
    expected = by_torch(start, gradients, kind, lr=0.05, **settings)
    state = {"theta": start, "other": start}
    for gradient, wanted in zip(gradients, expected, strict=True):
        before, given = {name: tensor.clone() for name, tensor in state.items()}, dict(state)
        server_step(state, "theta", gradient, 0.05, optimizer)
        torch.testing.assert_close(state["theta"], wanted, rtol=1e-12, atol=1e-12)
        for name, tensor in given.items():  # nothing is changed in place: a round that is given up leaves no trace
            assert torch.equal(tensor, before[name])
    assert torch.equal(state["other"], start)
    moments = {"sgd": set(), "momentum": {"mean"}, "adam": {"mean", "square", "step"}}[optimizer]
    assert state.keys() == {"theta", "other", *(f"theta/{name}" for name in moments)}


def test_two_tensors_of_a_server_have_moments_of_their_own() -> None:
    start, one, other = vectors(4, 3)
    both, alone = {"a": start, "b": start}, {"a": start}
    for _ in range(3):
        server_step(both, "a", one, 0.1, "adam")
        server_step(both, "b", other, 0.1, "adam")
        server_step(alone, "a", one, 0.1, "adam")
    assert torch.equal(both["a"], alone["a"])
    assert not torch.equal(both["a"], both["b"])
