"""Private gradients: those of single examples, the bound of a clipped sum, the noise and the Poisson batches."""

import copy
from collections.abc import Callable
from math import sqrt

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtailor.models import networks, sequences
from fedtailor.models.assembly import assemble
from fedtailor.privacy.noise import Noise
from fedtailor.training import private_gradients as module_under_test
from fedtailor.training.descent import descend
from fedtailor.training.ghost import ghost_of
from fedtailor.training.inputs import Held, Inputs, Lazy, Several, apply
from fedtailor.training.network import Loss, Network
from fedtailor.training.optimizer import OptimizerSettings
from fedtailor.training.private_gradients import Private, clipped_sum, example_gradients, sampling_rate
from tests.training.parts import LAYERS

N = 7


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with weights of the classes, divided by the number of samples (as in training.py)."""
    weights = torch.tensor([0.3, 2.0, 1.0, 0.5], dtype=outputs.dtype)
    return functional.cross_entropy(outputs, targets, weights, reduction="sum") / len(targets)


def untraceable(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that looks at a number: PyTorch cannot vectorise it."""
    value = functional.cross_entropy(outputs, targets)
    return value * 2 if value.item() > 1.4 else value


class Two(nn.Module):
    """A network of two inputs, with a part that its head does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.out = nn.Linear(3, 5), nn.Linear(2, 5), nn.Linear(5, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.out(torch.tanh(self.one(a) * self.other(b)))  # type: ignore[no-any-return]


def images(*shape: int) -> Tensor:
    return torch.rand(N, *shape, dtype=torch.float64).contiguous(memory_format=torch.channels_last)


def tokens() -> Tensor:
    return torch.randint(0, 30, (N, 9))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Held]]] = {
    "mlp": (lambda: networks.mlp((1, 6, 6), 4, 8), lambda: images(1, 6, 6)),
    "lenet": (lambda: networks.lenet((1, 20, 20), 4), lambda: images(1, 20, 20)),
    "same padding": (lambda: networks.omniglot_cnn((2, 16, 16), 4), lambda: images(2, 16, 16)),
    "groups": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)),
        lambda: images(2, 8, 8),
    ),
    "gru": (lambda: sequences.gru((9,), 4, 6, tokens=30), tokens),
    "transformer": (lambda: sequences.transformer((9,), 4, 8, tokens=30), tokens),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 4)),
        lambda: images(1, 6, 6),
    ),
    "lora": (
        lambda: assemble(networks.mlp((1, 6, 6), 4, 8).double(), 1, images(1, 6, 6), lora=2).module,
        lambda: images(1, 6, 6),
    ),
    "two inputs": (Two, lambda: Several((torch.rand(N, 3).double(), torch.rand(N, 2).double()))),
}
GHOSTS = ("mlp", "lenet", "same padding")


def made(name: str) -> tuple[Network, Held, Tensor]:
    torch.manual_seed(3)
    make, samples = CASES[name]
    x = samples()
    head = ["out"] if name == "two inputs" else 1
    network = Network(make(), head, dtype=torch.float64, example=x[:2])
    network.vector.add_(torch.randn_like(network.vector), alpha=0.1)  # LoRA begins with a gradient of zeros
    network.train(N)
    return network, x, torch.arange(N) % 4


def slow(network: Network, x: Held, y: Tensor, loss: Loss, part: slice) -> Tensor:
    """Each example's gradient, by autograd on a copy that sees nothing else."""
    rows = []
    for number in range(len(y)):
        alone = copy.deepcopy(network)
        alone.vector.copy_(network.vector)
        one = slice(number, number + 1)
        loss(apply(alone.module, x[one]), y[one]).backward()
        rows.append(alone.gradient[part].clone())
    return torch.stack(rows)


def slow_sum(rows: Tensor, clip: float) -> Tensor:
    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row * min(1.0, clip / float(row.norm()))
    return total


def parts(network: Network) -> dict[str, slice]:
    whole = slice(0, network.layout.size)
    return {"whole": whole, "body": network.layout.body, "head": network.layout.head, "cut": slice(3, whole.stop - 2)}


@pytest.mark.parametrize("loss", [functional.cross_entropy, weighted], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_examples_and_their_clipped_sum(name: str, loss: Loss) -> None:
    network, x, y = made(name)
    for which, part in parts(network).items():
        wanted = slow(network, x, y, loss, part)
        with torch.no_grad():
            found = example_gradients(network, network.module, x, y, loss, part)
        assert (found - wanted).abs().max() < 1e-10
        clip = float(wanted.norm(dim=1).median())  # some are cut, others not
        with torch.no_grad():
            total = clipped_sum(network, network.module, x, y, loss, part, clip)
        assert (total - slow_sum(wanted, clip)).abs().max() < 1e-10
        quick = ghost_of(network, network.module, x, part) is not None
        assert quick == (name in GHOSTS and which != "cut"), which


def test_a_loss_that_cannot_be_vectorised() -> None:
    for name in ("transformer", "mlp"):
        network, x, y = made(name)
        part = parts(network)["whole"]
        wanted = slow(network, x, y, untraceable, part)
        with torch.no_grad():
            total = clipped_sum(network, network.module, x, y, untraceable, part, 0.5)
        assert (total - slow_sum(wanted, 0.5)).abs().max() < 1e-10
        assert network.one_by_one == ({True} if name == "transformer" else set())


@pytest.mark.parametrize("name", LAYERS)
def test_every_option_of_a_layer(name: str) -> None:
    torch.manual_seed(0)
    x, y = images(1, 12, 12), torch.arange(N) % 3
    body = LAYERS[name]()
    size = body(x[:1].float()).flatten(1).shape[1]
    network = Network(nn.Sequential(body, nn.Flatten(), nn.Linear(size, 3)), dtype=torch.float64)
    part = slice(0, network.layout.size)
    wanted = slow_sum(slow(network, x, y, functional.cross_entropy, part), 0.5)
    with torch.no_grad():
        found = clipped_sum(network, network.module, x, y, functional.cross_entropy, part, 0.5)
    assert (found - wanted).abs().max() < 1e-10
    assert (ghost_of(network, network.module, x, part) is None) == (name == "groups")


# --- the bound ---


def hostile(x: Tensor) -> dict[str, Tensor]:
    """Samples that would move an unclipped sum as far as they like."""
    return {
        "huge": x[0] * 1e8,
        "flipped": -x[0],
        "constant": torch.full_like(x[0], 1e30),
        "infinite": torch.full_like(x[0], torch.inf),
        "no number": torch.full_like(x[0], torch.nan),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["mlp", "lenet", "groups"])
def test_no_sample_moves_the_sum_by_more_than_the_clip(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    make, samples = CASES[name]
    x, clip = samples(), 0.7
    assert isinstance(x, Tensor)
    x, y = x.to(dtype), torch.arange(N) % 4
    network = Network(make(), dtype=dtype)
    part = slice(0, network.layout.size)
    rounding = 1e-6 if dtype == torch.float64 else 1e-5  # the sums themselves are rounded

    def total(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return clipped_sum(network, network.module, x, y, functional.cross_entropy, part, clip)

    without = total(x, y)
    for kind, sample in hostile(x).items():
        for target in range(4):
            moved = total(torch.cat([x, sample[None]]), torch.cat([y, torch.tensor([target])])) - without
            assert moved.isfinite().all(), kind
            assert moved.norm() <= clip * (1 + rounding), kind
    moved = total(torch.cat([x, 1e4 * x[:1]]), torch.cat([y, torch.tensor([2])])) - without
    assert moved.norm() > 0.99 * clip  # the bound is reached


def test_memory_is_bounded_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, y = made("transformer")
    part, sums = slice(0, network.layout.size), []
    seen: list[int] = []

    def counting(*given: Tensor) -> Tensor:
        seen.append(len(given[2]))
        return example_gradients(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(module_under_test, "example_gradients", counting)
    for most in (1 << 24, 2 * network.layout.size, 1):
        monkeypatch.setattr(module_under_test, "MOST_NUMBERS", most)
        source = Private(0.5, 1.0, Noise(torch.Generator().manual_seed(1)))
        source.write_gradient(network, network.module, x, y, functional.cross_entropy, part, 1.0, N)
        sums.append(network.gradient.clone())
    assert seen == [7, 2, 2, 2, 1, *[1] * 7]
    assert max((one - sums[0]).abs().max() for one in sums) < 1e-12


# --- noise and Poisson batches ---


class Recorded(Noise):
    """A source that writes down what it gives."""

    def __init__(self, seed: int) -> None:
        super().__init__(torch.Generator().manual_seed(seed))
        self.uniforms: list[Tensor] = []
        self.normals: list[tuple[Tensor, float]] = []

    def uniform(self, n: int) -> Tensor:
        self.uniforms.append(super().uniform(n))
        return self.uniforms[-1]

    def normal(self, like: Tensor, std: float) -> Tensor:
        self.normals.append((super().normal(like, std), std))
        return self.normals[-1][0].clone()


def test_a_descent_is_exactly_what_was_drawn() -> None:
    """θ ← θ − η (Σ clipped + noise) / (q n), from the recorded draws, with batches of any size."""
    network, x, y = made("mlp")
    assert isinstance(x, Tensor)
    theta, source, part = network.vector.clone(), Recorded(6), slice(0, network.layout.size)
    private = Private(0.3, 0.8, source)
    settings = OptimizerSettings(lr=0.5, batch=2, epochs=3)
    found = descend(network, theta, x, y, functional.cross_entropy, settings, torch.Generator(), private=private)
    draws, at, sizes = [u for u in source.uniforms if len(u) == N], theta.clone(), set()
    assert len(draws) == 12  # ⌈7/2⌉ steps in each of 3 epochs
    for uniform, (noise, std) in zip(draws, source.normals, strict=True):
        assert std == pytest.approx(0.8 * 0.3)
        chosen = uniform < 2 / 7
        sizes.add(int(chosen.sum()))
        network.vector.copy_(at)
        total = torch.zeros_like(at)
        if chosen.any():
            total = slow_sum(slow(network, x[chosen], y[chosen], functional.cross_entropy, part), 0.3)
        at = at - 0.5 * (total + noise) / 2  # q n = 2
    assert len(sizes) > 2
    assert 0 in sizes  # an empty batch is noise alone
    assert (found - at).abs().max() < 1e-12
    assert private.queries == {2 / 7: 12}


def test_noise_has_its_variance_in_the_step() -> None:
    network = Network(networks.mlp((400,), 4, 30))
    x, y = torch.rand(4, 400), torch.arange(4)
    private, part = Private(0.5, 2.0, Noise(torch.Generator().manual_seed(2))), slice(0, network.layout.size)
    steps = []
    for _ in range(2):
        private.write_gradient(network, network.module, x, y, functional.cross_entropy, part, 1.0, 4)
        steps.append(network.gradient.clone())
    difference = (steps[0] - steps[1]) * 4 / (0.5 * 2.0) / sqrt(2)  # the sum is the same, the noise is not
    assert abs(difference.var() - 1) < 5 * sqrt(2 / len(difference))
    assert abs(difference.mean()) < 5 / sqrt(len(difference))


def test_poisson_batches_have_each_sample_with_its_probability_independently() -> None:
    private, trials = Private(1.0, 1.0, Noise(torch.Generator().manual_seed(5))), 4000
    there = torch.zeros(trials, 6)
    for row in there:
        chosen = private.draw(6, 0.3, torch.device("cpu"))
        assert chosen is not None
        row[chosen] = 1
    wanted = 5 * sqrt(0.3 * 0.7 / trials)
    assert ((there.mean(0) - 0.3).abs() < wanted).all()
    centred = there - 0.3
    covariance = centred.T @ centred / trials
    assert (covariance.fill_diagonal_(0).abs() < 5 * 0.21 / sqrt(trials)).all()
    assert abs((centred[1:] * centred[:-1]).mean()) < 5 * 0.21 / sqrt(6 * trials)  # nor by the batch before
    assert private.draw(6, 1.0, torch.device("cpu")) is None
    assert [sampling_rate(10, batch) for batch in (None, 10, 11, 4)] == [1.0, 1.0, 1.0, 0.4]


@pytest.mark.parametrize("kind", ["lazy", "several", "images"])
def test_empty_batches_of_any_input(kind: str) -> None:
    network, held, y = made("two inputs" if kind == "several" else "mlp")
    x: Inputs = held
    if kind == "lazy":
        assert isinstance(held, Tensor)
        x = Lazy(lambda numbers: held[numbers], torch.arange(N), held[:0])
    source = Recorded(1)
    settings = OptimizerSettings(lr=0.5, batch=1, steps=40)
    descend(
        network, network.vector.clone(), x, y, functional.cross_entropy, settings, torch.Generator(),
        private=Private(0.3, 0.8, source),
    )  # fmt: skip
    assert any(not (u < 1 / 7).any() for u in source.uniforms if len(u) == N)
    assert network.vector.isfinite().all()


def test_dropout_is_drawn_for_each_example_and_by_the_source() -> None:
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 3)))
    network.train(4)
    x, y, part = torch.rand(1, 5).repeat(4, 1), torch.zeros(4, dtype=torch.int64), slice(0, network.layout.size)
    rows = example_gradients(network, network.module, x, y, functional.cross_entropy, part)
    assert not torch.equal(rows[0], rows[1])
    found = []
    for seed, known in ((1, 5), (1, 6), (2, 6)):
        torch.manual_seed(known)  # which the server could know, and which makes no difference
        private = Private(100.0, 1e-9, Noise(torch.Generator().manual_seed(seed)))
        private.write_gradient(network, network.module, x, y, functional.cross_entropy, part, 1.0, 4)
        found.append(network.gradient.clone())
    assert torch.equal(found[0], found[1])
    assert (found[1] - found[2]).abs().max() > 1e-3
