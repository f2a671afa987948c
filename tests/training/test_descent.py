"""Local descent against plain PyTorch."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtailor.models import build_model
from fedtailor.training.descent import batches, descend, mean_gradient
from fedtailor.training.network import Network
from fedtailor.training.optimizer import OptimizerSettings
from tests.reference.batches import drawn
from tests.training.parts import X, Y, small


def stream() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def by_torch(module: nn.Module, sgd: OptimizerSettings, trained: list[nn.Parameter] | None = None) -> nn.Module:
    """The same descent with torch.optim.SGD."""
    optimizer = torch.optim.SGD(
        trained or module.parameters(), lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay
    )
    module.train()
    every = {"batch": sgd.batch, "epochs": sgd.epochs, "steps": sgd.steps, "drop_last": sgd.drop_last}
    for chosen in drawn(len(X), stream(), **every):
        x, y = (X, Y) if chosen is None else (X[chosen], Y[chosen])
        optimizer.zero_grad()
        functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 2},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"steps": 9, "batch": 16, "momentum": 0.5},
        {"batch": None, "epochs": 3},
        {"batch": 10, "drop_last": True, "epochs": 2},
    ],
)
def test_descent_is_torch_sgd(settings: dict[str, Any], batch_norm: bool) -> None:
    """Vector by vector, BatchNorm buffers included: no weight decay and no momentum may touch those."""
    sgd = OptimizerSettings(**{"lr": 0.05, "batch": 8, **settings})
    expected = by_torch(small(batch_norm), sgd)
    network = Network(small(batch_norm))
    theta = descend(network, network.vector.clone(), X, Y, functional.cross_entropy, sgd, stream())
    for name, value in network.state_dict(theta).items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-9, atol=1e-12, msg=name)


def test_the_head_alone_on_cached_features_is_sgd_on_the_head() -> None:
    sgd = OptimizerSettings(lr=0.1, epochs=3, batch=8, momentum=0.9)
    plain = small()
    for parameter in list(plain.parameters())[:-2]:
        parameter.requires_grad_(False)
    expected = by_torch(plain, sgd, list(plain.parameters())[-2:])
    network = Network(small())
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    network.module[0].register_forward_hook(count)
    theta = descend(
        network, network.vector.clone(), X, Y, functional.cross_entropy, sgd, stream(), part=network.layout.head
    )
    for name, value in network.state_dict(theta).items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-9, atol=1e-12, msg=name)
    assert passes == 1  # the body ran once over all samples, not in every step


def test_the_body_alone_leaves_the_head() -> None:
    network = Network(small())
    start = network.vector.clone()
    theta = descend(
        network, start, X, Y, functional.cross_entropy, OptimizerSettings(), stream(), part=network.layout.body
    )
    assert torch.equal(theta[network.layout.head], start[network.layout.head])
    assert not torch.equal(theta[network.layout.body], start[network.layout.body])


def test_a_network_without_a_cut_trains_its_head_on_full_passes() -> None:
    """Where features cannot be cached, the result is the same and only slower."""

    class Behind(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 1.0

    sgd = OptimizerSettings(lr=0.1, epochs=2, batch=8)
    cut, uncut = Network(small()), Network(Behind(small()))
    thetas = [
        descend(net, net.vector.clone(), X, Y, functional.cross_entropy, sgd, stream(), part=net.layout.head)
        for net in (cut, uncut)
    ]
    torch.testing.assert_close(thetas[0], thetas[1], rtol=1e-9, atol=1e-12)


def test_corrections_are_added_to_the_gradient() -> None:
    """A constant, and a function of the present vector, against a loss with the same term in it."""
    sgd = OptimizerSettings(lr=0.1, batch=None, steps=4)
    network = Network(small())
    start = network.vector.clone()
    anchor, push = torch.randn_like(start), torch.randn_like(start)
    for correction, term in (
        (push, lambda theta: push @ theta),
        (lambda theta: 0.3 * (theta - anchor), lambda theta: 0.15 * (theta - anchor).square().sum()),
    ):
        found = descend(network, start, X, Y, functional.cross_entropy, sgd, stream(), correction=correction)
        module = small()
        for _ in range(4):
            parameters = list(module.parameters())
            # the vector's order: convolutions lie with their input channels last
            flat = torch.cat([p.permute(0, 2, 3, 1).flatten() if p.dim() == 4 else p.flatten() for p in parameters])
            objective = functional.cross_entropy(module(X), Y) + term(flat)
            for parameter, gradient in zip(parameters, torch.autograd.grad(objective, parameters), strict=True):
                parameter.data -= 0.1 * gradient
        for name, value in network.state_dict(found).items():
            torch.testing.assert_close(value, module.state_dict()[name], rtol=1e-9, atol=1e-12)


def test_a_correction_does_not_touch_buffers() -> None:
    """One step is seen: at its pass the models are equal, so what differs in the buffers is the step's doing."""
    network = Network(small(batch_norm=True))
    start = network.vector.clone()
    plain, pushing = OptimizerSettings(lr=1.0, batch=None, steps=1), {"weight_decay": 0.5, "momentum": 0.9}
    ones = torch.ones_like(start)
    plainly = descend(network, start, X, Y, functional.cross_entropy, plain, stream())
    pushed = descend(
        network, start, X, Y, functional.cross_entropy, replace(plain, **pushing), stream(), correction=ones
    )
    for place in network.layout.buffers:
        assert torch.equal(plainly[place], pushed[place])
        assert not torch.equal(plainly[place], start[place])


def test_kept_velocity_goes_on_where_it_was() -> None:
    sgd = OptimizerSettings(lr=0.05, batch=None, steps=6, momentum=0.9)
    network = Network(small())
    start = network.vector.clone()
    whole = descend(network, start, X, Y, functional.cross_entropy, sgd, stream())
    velocity, theta = torch.zeros_like(start), start
    for _ in range(2):
        half = OptimizerSettings(lr=0.05, batch=None, steps=3, momentum=0.9)
        theta = descend(network, theta, X, Y, functional.cross_entropy, half, stream(), moments={"momentum": velocity})
    torch.testing.assert_close(theta, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"batch": 4}, [4, 4, 2]),
        ({"batch": 4, "drop_last": True}, [4, 4]),
        ({"batch": 4, "epochs": 2}, [4, 4, 2, 4, 4, 2]),
        ({"batch": 4, "steps": 4}, [4, 4, 2, 4]),
        ({"batch": 20, "drop_last": True}, [None]),
        ({"batch": None, "epochs": 2}, [None, None]),
        ({"batch": 10}, [None]),
    ],
)
def test_batches(settings: dict[str, Any], sizes: list[int | None]) -> None:
    found = list(batches(10, OptimizerSettings(**settings), stream(), torch.device("cpu")))
    assert [None if chosen is None else len(chosen) for chosen in found] == sizes
    if sizes == [4, 4, 2]:
        assert sorted(torch.cat(found).tolist()) == list(range(10))


def test_every_epoch_has_an_order_of_its_own() -> None:
    found = list(batches(10, OptimizerSettings(batch=4, epochs=3), stream(), torch.device("cpu")))
    epochs = [torch.cat(found[start : start + 3]).tolist() for start in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    expected = drawn(10, stream(), batch=4, epochs=3)
    assert [chosen.tolist() for chosen in found] == [chosen.tolist() for chosen in expected]


def test_the_mean_gradient_is_over_all_samples() -> None:
    network = Network(small())
    big = torch.cat([X] * 30), torch.cat([Y] * 30)  # more than one pass
    loss, gradient = mean_gradient(network, network.vector.clone(), *big, functional.cross_entropy)
    module = copy.deepcopy(small())
    expected = functional.cross_entropy(module(X), Y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-12)
    network.vector.copy_(gradient)  # read it through the parameters' shapes
    for ours, theirs in zip(network.module.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours.data, theirs.grad, rtol=1e-9, atol=1e-12)


def test_models_are_the_same_from_the_same_seed() -> None:
    torch.manual_seed(5)
    one = Network(build_model("cnn", (3, 32, 32), 10, seed=4)).vector
    torch.manual_seed(6)
    two = Network(build_model("cnn", (3, 32, 32), 10, seed=4)).vector
    assert torch.equal(one, two)
    assert not torch.equal(one, Network(build_model("cnn", (3, 32, 32), 10, seed=5)).vector)
