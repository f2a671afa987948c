"""Methods that take the steps themselves: batches, gradients, steps, objectives and curvature."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.training.descent import Batch
from fedtailor.training.network import Network
from tests.training.parts import X, client, small


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"batch": None},
        {"kind": "adam", "weight_decay": 0.01, "factor": 0.5, "step_schedule": "warmup:3,cosine"},
        {"kind": "adamw", "weight_decay": 0.1, "clip": 0.5},
        {"momentum": 0.9, "clip": 0.5, "step_schedule": "1 / t"},
    ],
)
def test_steps_one_by_one_are_a_descent(settings: dict[str, Any], keep: bool, batch_norm: bool) -> None:
    one, other = client(batch_norm, keep, **settings), client(batch_norm, keep, **settings)
    theta = one.initial
    for _ in range(2):  # two rounds, so that kept momentum counts
        one._moments.clear()
        expected, stepped = other.descend(theta), theta
        for batch in one.batches():
            stepped = one.step(stepped, one.gradient(stepped, batch))
        assert torch.equal(stepped, expected)
        theta = expected
    assert one.state.keys() == other.state.keys()
    assert bool(one.state) == (keep and bool(one.optimizer.moments))


def test_an_objective_stands_for_the_loss() -> None:
    def twice(batch: Batch) -> Tensor:
        assert batch.indices is not None
        assert torch.equal(X[batch.indices], batch.x)
        assert torch.equal(batch.outputs, batch.network.module[-1](batch.features))  # type: ignore[index, operator]
        return 2 * batch.loss

    def once(batch: Batch) -> Tensor:
        return batch.loss

    one = client()
    assert torch.equal(one.descend(one.initial, objective=twice), one.descend(one.initial, objective=once, lr=0.2))
    torch.testing.assert_close(one.descend(one.initial, objective=once), one.descend(one.initial), rtol=0, atol=1e-14)
    batch = next(iter(one.batches()))
    assert torch.equal(one.gradient(one.initial, batch, twice), 2 * one.gradient(one.initial, batch, once))


def test_a_batch_can_be_used_at_several_points() -> None:
    one = client()
    batch = next(iter(one.batches()))
    first = one.gradient(one.initial, batch)
    one.gradient(one.initial + 1, batch)
    assert torch.equal(one.gradient(one.initial, batch), first)


def test_the_hessian_product_is_exact() -> None:
    one = client()
    batch = next(iter(one.batches()))
    theta = one.initial
    v = torch.randn(len(theta), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    eps = 1e-6
    numeric = (one.gradient(theta + eps * v, batch) - one.gradient(theta - eps * v, batch)) / (2 * eps)
    product = one.hessian_product(theta, v, batch)
    assert (product - numeric).norm() / numeric.norm() < 1e-6
    w = torch.randn(len(theta), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert float(w @ product) == pytest.approx(float(v @ one.hessian_product(theta, w, batch)))  # symmetric


def test_normalisation_layers_are_known() -> None:
    network = Network(small(batch_norm=True))
    assert network.layout.norm_layers == (network.layout.layers["1"],)
    assert Network(small()).layout.norm_layers == ()
