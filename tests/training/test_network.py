"""The vector view of a network."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.models import CATALOGUE, build_model
from fedtailor.training.descent import frozen_features
from fedtailor.training.network import Network
from tests.helpers import fitting_shape

IMAGE = (3, 32, 32)


def passes(network: nn.Module | Network, x: Tensor) -> Tensor:
    return network(x).square().mean()


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_network_computes_the_same_in_the_vector(name: str) -> None:
    """Outputs, gradients and buffers are those of the untouched module, for every network of the catalogue."""
    shape = fitting_shape(name)
    plain = build_model(name, shape, 10, seed=0).double()
    network = Network(copy.deepcopy(plain))
    x = torch.rand(4, *shape, dtype=torch.float64)
    for _ in range(2):
        passes(plain, x).backward()
        passes(network, x).backward()
    theirs = dict(plain.named_parameters())
    for key, ours in network.module.named_parameters():
        torch.testing.assert_close(ours.grad, theirs[key].grad, rtol=1e-9, atol=1e-12)
    ours_state = network.state_dict()
    for key, value in plain.state_dict().items():
        assert ours_state[key].dtype == value.dtype
        assert ours_state[key].is_contiguous()
        torch.testing.assert_close(ours_state[key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CATALOGUE)
def test_parameters_and_gradients_are_views_not_copies(name: str) -> None:
    network = Network(build_model(name, fitting_shape(name), 10, seed=0))
    x = torch.rand(2, *fitting_shape(name))
    before = network(x)
    network.vector.zero_()
    assert all((p == 0).all() for p in network.module.parameters())
    assert not torch.equal(network(x), before)
    passes(network, x).backward()
    network.gradient.fill_(3.0)
    assert all((p.grad == 3.0).all() for p in network.module.parameters())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
@pytest.mark.parametrize("name", ["lenet", "resnet", "gru"])
def test_a_network_that_was_pickled_or_copied_has_views_again(name: str, again: Callable[[Any], Any]) -> None:
    module = build_model(name, fitting_shape(name), 10, seed=0)
    network = Network(module, pretrained=[next(name for name, _ in module.named_parameters())])
    network.autocast = True
    x = torch.rand(4, *fitting_shape(name))
    passes(network, x).backward()  # BatchNorm's counter is no longer 0
    other = again(network)
    assert other.layout == network.layout
    assert torch.equal(other.vector, network.vector)
    assert other.autocast
    for key, value in network.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)
        assert other.state_dict()[key].dtype == value.dtype
    assert torch.equal(other.initialised(3), network.initialised(3))
    for one in (network, other):
        one.reset(network.vector.clone())
        passes(one, x).backward()
    assert torch.equal(other.gradient, network.gradient)
    other.vector.zero_()
    assert all((p == 0).all() for p in other.module.parameters())
    assert network.vector.any()


def test_sizes_are_the_papers() -> None:
    sizes = {name: Network(build_model(name, IMAGE, 10, 0)).layout.size for name in ("cnn", "lenet")}
    assert sizes == {"cnn": 878_538, "lenet": 62_006}
    assert Network(build_model("mlp", (1, 28, 28), 10, 0)).layout.size == 784 * 200 + 200 + 2010


@pytest.mark.parametrize(
    ("head", "length"), [(1, 5130), (2, 5130 + 819_712), (0, 0), (4, 878_538), ("9", 5130), ("7,9", 824_842)]
)
def test_the_head_is_the_last_layers_or_the_named_ones(head: int | str, length: int) -> None:
    network = Network(build_model("cnn", IMAGE, 10, 0), head)
    assert len(network.vector[network.layout.head]) == length
    assert network.layout.body.stop == network.layout.head.start == network.layout.size - length
    assert network.layout.head.stop == network.layout.size


class Named(nn.Module):
    """A head that is neither registered nor applied last."""

    def __init__(self, tail: bool) -> None:
        super().__init__()
        self.classifier = nn.Linear(5, 3)
        self.encoder = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.tail = tail

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(torch.relu(self.encoder(x)))
        return out.log_softmax(1) if self.tail else out


def test_a_named_head_lies_last_whatever_the_order() -> None:
    network = Network(Named(False), "classifier")
    assert network.layout.head == slice(network.layout.size - 18, network.layout.size)
    weight = network.module.classifier.weight
    assert torch.equal(network.vector[network.layout.head][:15].view(3, 5), weight)


def test_a_head_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ft.FedtailorError, match="no layer 'clasifier' for the head; its layers are classifier, encoder"
    ):
        Network(Named(False), "clasifier")


def test_features_and_head_make_the_network() -> None:
    for network in (Network(Named(False), "classifier"), Network(build_model("cnn", IMAGE, 10, 0), 2)):
        network.module.eval()
        x = torch.rand(6, 4) if isinstance(network.module, Named) else torch.rand(6, *IMAGE)
        features = frozen_features(network, x)
        assert features is not None
        assert torch.equal(network.head_module()(features), network(x))


class Layers(nn.Sequential):
    """Made with no arguments, as `nn.Sequential` itself is not when it is sliced."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


class Twice(Layers):
    """Goes through its body twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self[2](self[1](self[0](x)) + self[1](self[0](x)))


@pytest.mark.parametrize("kind", [Layers, Twice])
def test_a_sequential_of_ones_own_is_cut_where_it_is_what_its_layers_are(kind: type[Layers]) -> None:
    network, x = Network(kind()), torch.rand(6, 4)
    network.module.eval()
    features = network.features(x)
    assert features is not None
    assert torch.equal(network.module[2](features), network(x))
    assert torch.equal(network.head_module()(features), network(x))


def test_a_network_that_goes_on_behind_its_head_has_no_features() -> None:
    """log_softmax behind the head: the head alone would not be the network."""
    assert frozen_features(Network(Named(True), "classifier"), torch.rand(6, 4)) is None


def test_buffers_are_in_the_vector_at_known_places() -> None:
    network = Network(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    assert network.layout.size == 9 + 6 + (3 + 3 + 1) + 8
    assert network.n_parameters == 9 + 6 + 8
    network.module.train()
    network(torch.rand(5, 2))
    assert network.module[1].num_batches_tracked == 1
    held = torch.cat([network.vector[place] for place in network.layout.buffers])
    assert held[-1] == 1
    assert network.layout.layers["1"] == slice(9, 22)


def test_shared_and_frozen_parameters() -> None:
    """A tied weight counts once; a frozen one is no part of the vector but of the state dict."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.frozen = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2)
            self.two.weight = self.one.weight
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.two(self.one(x)))

    network = Network(Tied())
    assert network.layout.size == 9
    passes(network, torch.rand(2, 3)).backward()
    assert set(network.state_dict()) == {"one.weight", "two.weight", "frozen.weight", "frozen.bias"}
    plain = Tied()
    plain.load_state_dict(network.state_dict())


def test_a_network_without_parameters_is_refused() -> None:
    with pytest.raises(ft.FedtailorError, match="this one has none"):
        Network(nn.Flatten())
