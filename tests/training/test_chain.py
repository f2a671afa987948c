"""The passes without a tape give autograd's gradients: dense layers to the last bit, convolutions up to rounding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtailor.models import networks
from fedtailor.training import descent
from fedtailor.training.chain import chain_of, find_chain
from fedtailor.training.descent import Batch, batch_gradient, descend
from fedtailor.training.network import Loss, Network
from fedtailor.training.optimizer import OptimizerSettings
from tests.training.parts import LAYERS, Make

ROUNDING = 1e-5  # of the gradient's length, in single precision; docs/performance.md names it


def samples(*shape: int, dtype: torch.dtype = torch.float32, count: int = 12) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, *shape, dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 3 else x, torch.arange(count) % 4


def gradients(module: nn.Module, x: Tensor, y: Tensor, loss: Loss = functional.cross_entropy) -> tuple[Tensor, Tensor]:
    """By the chain and by autograd."""
    network = Network(module, dtype=x.dtype)
    chain = find_chain(network.module, x)
    assert chain is not None
    network.gradient.fill_(7.0)  # what was there before does not count
    with torch.no_grad():
        chain.differentiate(chain.begin(x), y, loss)
    found = network.gradient.clone()
    network.gradient.zero_()
    loss(network(x), y).backward()
    return found, network.gradient.clone()


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("make", [networks.logistic, networks.mlp, lambda s, c: networks.mlp(s, c, 30, 20)])
@pytest.mark.parametrize("shape", [(1, 9, 9), (3, 8, 8), (5,)])
def test_dense_layers_to_the_last_bit(make: Callable[..., nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    found, wanted = gradients(make(shape, 4), *samples(*shape))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("make", [networks.cnn, networks.lenet, networks.pflego_cnn, networks.omniglot_cnn])
def test_the_papers_convolutions_up_to_rounding(make: Callable[..., nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    found, wanted = gradients(make(shape, 4), *samples(*shape))
    assert difference(found, wanted) < ROUNDING
    found, wanted = gradients(make(shape, 4), *samples(*shape, dtype=torch.float64))
    assert difference(found, wanted) < 1e-13


@pytest.mark.parametrize("name", LAYERS)
def test_every_option_of_a_layer(name: str) -> None:
    torch.manual_seed(0)
    front = LAYERS[name]()
    x, y = samples(1, 12, 11, dtype=torch.float64)
    width = front.double()(x).flatten(1).shape[1]
    module = nn.Sequential(front, nn.Flatten(), nn.Linear(width, 5, bias=False), nn.ReLU(), nn.Linear(5, 4))
    before = x.clone()
    found, wanted = gradients(module, x, y)
    assert difference(found, wanted) < 1e-13
    assert torch.equal(x, before)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs[:, :3] - functional.one_hot(targets % 3, 3)) ** 2).sum()


def in_place(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.mul_(2), targets)


@pytest.mark.parametrize("case", ["own loss", "in place", "one ignored", "probabilities", "mean squares"])
def test_any_loss(case: str) -> None:
    torch.manual_seed(0)
    x, y = samples(6)
    loss: Loss = functional.cross_entropy
    if case == "own loss":
        loss = squares
    if case == "in place":
        loss = in_place
    if case == "one ignored":
        y[3] = -100
    if case == "probabilities":
        y = torch.rand(12, 4).softmax(1)
    if case == "mean squares":
        loss, y = functional.mse_loss, torch.rand(12, 4)
    found, wanted = gradients(networks.mlp((6,), 4, 8), x, y, loss)
    assert torch.equal(found, wanted)


def test_a_target_that_is_no_class_is_refused_as_autograd_does() -> None:
    x, _ = samples(6)
    with pytest.raises(IndexError, match="Target 9 is out of bounds"):
        gradients(networks.mlp((6,), 4, 8), x, torch.full((12,), 9))


class OwnLinear(nn.Linear):
    """Whatever it does, it is not known."""


def twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    return module


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[0].weight.requires_grad_(False)
    return module


def watched(kind: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    getattr(module[1], kind)(lambda *arguments: None)
    return module


def watched_parameter() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    module[0].weight.register_hook(lambda gradient: gradient)
    return module


OTHERS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "a layer of one's own": (lambda: nn.Sequential(OwnLinear(4, 4)), (4,)),
    "a layer twice": (twice, (4,)),
    "one weight in two layers": (tied, (4,)),
    "a frozen weight": (frozen, (4,)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()), (4,)),
    "batch norm": (lambda: networks.resnet((1, 8, 8), 4), (1, 8, 8)),
    "dense layers over a sequence": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(12, 4)), (3, 4)),
    "an image without a batch": (lambda: nn.Sequential(nn.Conv2d(12, 4, 3)), (5, 5)),
    "circular padding": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular")), (1, 5, 5)),
    "an even kernel with padding": (lambda: nn.Sequential(nn.Conv2d(1, 4, 4, padding="same")), (1, 5, 5)),
    "pools with places": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2, return_indices=True)), (1, 5, 5)),
    "flat from another dimension": (lambda: nn.Sequential(nn.Flatten(2), nn.Linear(4, 4)), (3, 2, 2)),
    "forward hooks": (lambda: watched("register_forward_hook"), (4,)),
    "hooks before": (lambda: watched("register_forward_pre_hook"), (4,)),
    "backward hooks": (lambda: watched("register_full_backward_hook"), (4,)),
    "backward hooks before": (lambda: watched("register_full_backward_pre_hook"), (4,)),
    "a parameter's hook": (watched_parameter, (4,)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_is_left_to_autograd(name: str) -> None:
    make, shape = OTHERS[name]
    network = Network(make())
    assert chain_of(network, network.module, torch.rand(12, *shape)) is None


def test_a_chain_is_found_once_and_left_alone_while_somebody_watches() -> None:
    """A hook that comes later is seen at once; when it is gone, the same chain serves again."""
    network = Network(networks.mlp((4,), 4, 8))
    x, y = samples(4)
    chain = chain_of(network, network.module, x)
    assert chain is not None
    assert chain_of(network, network.module, x[:3]) is chain
    passes: list[int] = []
    for _ in range(2):
        hook = network.module[-1].register_forward_hook(lambda *_: passes.append(1))  # type: ignore[index]
        assert chain_of(network, network.module, x) is None
        batch_gradient(network.vector.clone(), Batch(network, functional.cross_entropy, x, y))
        hook.remove()
        assert chain_of(network, network.module, x) is chain
    assert len(passes) == 2


def test_body_and_head_have_chains_of_their_own() -> None:
    network = Network(networks.mlp((4,), 4, 8))
    head = network.head_module()
    assert head is not None
    whole, only_head = chain_of(network, network.module, torch.rand(3, 4)), chain_of(network, head, torch.rand(3, 8))
    assert whole is not None
    assert only_head is not None
    assert len(whole.links) > len(only_head.links)
    assert chain_of(network, network.module, torch.rand(3, 2, 2)) is not whole  # samples of another shape


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01, "steps": 7}, {"batch": None}])
@pytest.mark.parametrize("part", ["all", "body", "head"])
def test_a_descent_takes_the_same_steps_with_and_without_a_tape(
    settings: dict[str, object], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    network = Network(networks.mlp((1, 5, 5), 4, 9, 8))
    theta, (x, y) = network.vector.clone(), samples(1, 5, 5)
    sgd = OptimizerSettings(**{"batch": 5, "epochs": 2, **settings})  # type: ignore[arg-type]
    where = {"all": None, "body": network.layout.body, "head": network.layout.head}[part]

    def run() -> Tensor:
        stream = torch.Generator().manual_seed(1)
        return descend(network, theta, x, y, functional.cross_entropy, sgd, stream, part=where)

    without = run()
    monkeypatch.setattr(descent, "chain_of", lambda *arguments: None)
    assert torch.equal(without, run())
    assert not torch.equal(without, theta)


def test_the_gradient_of_a_batch_with_and_without_a_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = Network(networks.mlp((6,), 4, 8))
    batch = Batch(network, functional.cross_entropy, *samples(6))
    theta = torch.rand(network.layout.size)
    without = batch_gradient(theta, batch)
    monkeypatch.setattr(descent, "chain_of", lambda *arguments: None)
    assert torch.equal(without, batch_gradient(theta, batch))
