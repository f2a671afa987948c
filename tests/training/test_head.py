"""The head is found by the flow of data, and not by the order of registration."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedtailor as ft
from fedtailor.models import CATALOGUE, build_model
from fedtailor.training.layers import find_head, trained_layers
from tests.helpers import digits, fitting_shape, numbers

ROWS = torch.rand(2, 4)
TOKENS = torch.randint(10, (2, 6))


class Net(nn.Module):
    """A network with one name for each layer, registered in this order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order.split():
            self.add_module(name, nn.Linear(64, 12) if name == "body" else nn.Linear(12, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.body(x)))
        return out


@pytest.mark.parametrize(
    "method", ["fedper", "fedrep", "pflego", "lg-fedavg", "fedbabu", "fedrod", "fedrecon", "moon", "fedavg", "ditto"]
)
def test_the_order_of_registration_decides_nothing(method: str) -> None:
    usual, other = Net("body head"), Net("head body")
    other.load_state_dict(usual.state_dict())
    settings: dict[str, Any] = {"data": digits([30, 20, 25]), "rounds": 6, "epochs": 1, "engine": "in-process"}
    one, two = (ft.run(method, model=model, **settings) for model in (usual, other))
    network = two.simulation.terms.network
    assert network.head_names == ["head"]
    assert network.head_module() is network.module.head
    assert numbers(one.rounds) == numbers(two.rounds)
    for name, tensor in one.personal(1).items():
        assert torch.equal(tensor, two.personal(1)[name])


@pytest.mark.parametrize("name", CATALOGUE)
def test_networks_in_the_usual_order_have_the_head_that_they_had(name: str) -> None:
    shape = fitting_shape(name)
    module = build_model(name, shape, 10, 0)
    names = trained_layers(module)
    for head in range(len(names) + 1 if CATALOGUE[name].samples != "sequences" else 2):
        assert find_head(module, head, torch.rand(2, *shape)) == names[len(names) - head :]


class Attention(nn.Module):
    """A head first, bare parameters of the network, and layers that are used without their own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.embedding = nn.Embedding(10, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.functional = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.embedding(x)).mean(1)
        x = functional.linear(x, self.functional.weight, self.functional.bias)
        out: Tensor = self.scale * self.head(x)
        return out


def test_every_use_of_a_weight_counts() -> None:
    """By layers, by functions of their weights, and inside of PyTorch's own encoder."""
    found = [set(find_head(Attention(), head, TOKENS)) for head in range(1, 6)]
    added = [one - before for one, before in zip(found, [set(), *found], strict=False)]
    assert added == [{"head"}, {"functional"}, {"encoder.norm2"}, {"encoder.linear2"}, {"encoder.linear1"}]
    names = trained_layers(Attention())
    most = find_head(Attention(), len(names) - 2, TOKENS)
    assert [name for name in names if name not in most] == ["", "unused"]  # the network's own, and what is not used


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.decoder = nn.Linear(8, 10)
        self.middle = nn.Linear(8, 8)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.middle(self.embedding(x)).mean(1))
        return out


def test_a_layer_counts_at_its_last_use() -> None:
    assert find_head(Tied(), 1, TOKENS) == ["decoder"]
    assert find_head(Tied(), 2, TOKENS) == ["embedding", "decoder"]  # whose weight the decoder uses, after `middle`


class Twice(nn.Module):
    """A matrix that is used first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.outer.weight @ (self.inner.weight @ (self.outer.weight @ x.T))).T


def test_the_first_use_of_a_layer_does_not_count() -> None:
    assert find_head(Twice(), 1, ROWS) == ["outer"]


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.left(x) + self.right(x)
        return out


class Wide(nn.Module):
    """Two layers side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.hidden, self.deep = nn.Linear(4, 3), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wide(x) + self.deep(torch.relu(self.hidden(x)))
        return out


def test_outputs_of_layers_side_by_side_are_told() -> None:
    with pytest.warns(UserWarning, match=r"side by side: deep is taken for the head, and wide does not lead there"):
        assert find_head(Wide(), 1, ROWS) == ["deep"]
    with pytest.warns(UserWarning, match="side by side: right is taken for the head, and left does not lead there"):
        assert find_head(Sum(), 1, ROWS) == ["right"]
    assert find_head(Wide(), "wide,deep", ROWS) == ["wide", "deep"]  # whoever names it, means it
    residual = nn.Sequential(nn.Linear(4, 4), Residual(nn.Linear(4, 4)))
    assert find_head(residual, 1, ROWS) == ["1.inner"]  # what goes around it also leads there


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class Hidden(Net):
    """Without a gradient, nothing can be traced."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


def test_a_network_that_cannot_be_traced_has_its_last_registered_layers() -> None:
    with pytest.warns(UserWarning, match="cannot be traced in this network: the head is its last registered layers"):
        assert find_head(Hidden("head body"), 1, torch.rand(2, 64)) == ["body"]


class Counting(nn.Module):
    """Everything that a pass could leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(5, 3), nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.register_buffer("passes", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.calls += 1
        x.add_(1)
        out: Tensor = self.head(self.body(x))
        return out


def test_tracing_leaves_nothing_behind() -> None:
    module, rows = Counting(), ROWS.clone()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    assert find_head(module, 1, rows) == ["head"]
    assert module.calls == 0
    assert module.training
    assert torch.equal(rows, ROWS)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
