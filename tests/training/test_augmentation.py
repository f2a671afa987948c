"""Augmentation of training images: an independent slow version, and where it is applied."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor.server.records import RoundRecord
from fedtailor.training.augmentation import Augmentation
from fedtailor.training.client import Client
from fedtailor.training.descent import Batch, descend
from fedtailor.training.network import Network
from fedtailor.training.optimizer import OptimizerSettings
from tests.reference.batches import batches, stream

SHAPE = (3, 6, 5)
X = torch.rand(23, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(4, (23,), generator=torch.Generator().manual_seed(1))
ALL = "crop:2,flip,jitter:0.3"


def slow(images: Tensor, generator: torch.Generator, crop: int = 0, flip: bool = False, jitter: float = 0.0) -> Tensor:
    """The same, pixel by pixel. For each batch are drawn: rows and columns of all crops, flips, the two factors."""
    n, channels, height, width = images.shape
    down = torch.randint(2 * crop + 1, (2, n), generator=generator)
    mirrored = torch.rand(n, generator=generator, dtype=torch.float64)
    factors = torch.rand(2, n, generator=generator, dtype=torch.float64)
    result = torch.zeros_like(images)
    for i in range(n):
        for row in range(height):
            for column in range(width):
                from_row = row + int(down[0, i]) - crop
                in_window = width - 1 - column if flip and mirrored[i] < 0.5 else column
                from_column = in_window + int(down[1, i]) - crop
                if 0 <= from_row < height and 0 <= from_column < width:
                    for channel in range(channels):
                        result[i, channel, row, column] = images[i, channel, from_row, from_column]
        if jitter:
            brightness, contrast = (1 - jitter + 2 * jitter * float(factor) for factor in factors[:, i])
            bright = result[i] * brightness
            result[i] = contrast * bright + (1 - contrast) * bright.mean()
    return result


@pytest.mark.parametrize("text", ["crop:2", "flip", "jitter:0.3", ALL, "jitter:0.5, crop:1", "crop:4,flip"])
def test_equals_a_slow_version_and_keeps_channels_last(text: str) -> None:
    augmentation = Augmentation.parse(text)
    settings = {"crop": augmentation.crop, "flip": augmentation.flip, "jitter": augmentation.jitter}
    for layout in (torch.contiguous_format, torch.channels_last):
        x, one, other = X.contiguous(memory_format=layout), stream(3, "a"), stream(3, "a")
        before = x.clone()
        for _ in range(2):  # a second batch goes on with the stream
            changed = augmentation(x, one)
            torch.testing.assert_close(changed, slow(x, other, **settings))
            assert changed.permute(0, 2, 3, 1).is_contiguous()
        assert torch.equal(x, before)
    assert not torch.equal(changed, x)


def test_one_channel_has_the_strides_of_channels_last() -> None:
    x = torch.ones(2, 4, 5, 1).permute(0, 3, 1, 2)
    assert Augmentation(crop=1)(x, stream(0)).stride() == (20, 1, 5, 1) == x.stride()


def test_what_is_read() -> None:
    assert Augmentation.parse(ALL) == Augmentation(2, True, 0.3)
    assert Augmentation.parse("flip") == Augmentation(0, True, 0.0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("flop", "did you mean 'flip'"),
        ("flip,flip", "has 'flip' twice"),
        ("crop", "write crop:4"),
        ("crop:0", "write crop:4"),
        ("crop:1.5", "write crop:4"),
        ("flip:1", "write flip"),
        ("jitter:2", "write jitter:0.2"),
        ("jitter:nan", "write jitter:0.2"),
        ("", "''"),
    ],
)
def test_refusals(text: str, sentence: str) -> None:
    with pytest.raises(FedtailorError, match=sentence):
        Augmentation.parse(text)


def network(flat: bool) -> nn.Module:
    torch.manual_seed(0)
    if flat:
        return nn.Sequential(nn.Flatten(), nn.Linear(90, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).double()


def client(flat: bool, augmentation: Augmentation | None) -> Client:
    """Client 1 in round 3 under seed 5."""
    made = Network(network(flat))
    optimizer, nothing = OptimizerSettings(lr=0.1, batch=8, epochs=2, momentum=0.5), (X[:0], Y[:0])
    return Client(
        1,
        3,
        5,
        {},
        (X, Y),
        nothing,
        made,
        made.vector.clone(),
        functional.cross_entropy,
        optimizer,
        augmentation=augmentation,
    )


def by_hand(flat: bool, purpose: str) -> Tensor:
    """Plain PyTorch on the images of the slow version, which has a stream of its own."""
    module, generator = network(flat), stream(5, purpose, "augmentation", 3, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    for chosen in batches(23, 5, 3, 1, purpose=purpose, batch=8, epochs=2):
        assert chosen is not None
        optimizer.zero_grad()
        functional.cross_entropy(module(slow(X[chosen], generator, 2, True, 0.3)), Y[chosen]).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def in_order(made: Client, theta: Tensor) -> Tensor:
    """A vector in the order of the module's parameters."""
    made.network.vector.copy_(theta)
    return torch.cat([parameter.detach().flatten() for parameter in made.network.module.parameters()])


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("purpose", ["batches", "another"])
def test_a_descent_sees_augmented_batches(flat: bool, purpose: str) -> None:
    made = client(flat, Augmentation.parse(ALL))
    theta = made.descend(made.initial, purpose=purpose)
    torch.testing.assert_close(in_order(made, theta), by_hand(flat, purpose), rtol=1e-9, atol=1e-9)
    assert torch.equal(theta, made.descend(made.initial, purpose=purpose))  # the same ones at every call

    def loss(batch: Batch) -> Tensor:
        return batch.loss

    torch.testing.assert_close(made.descend(made.initial, purpose=purpose, objective=loss), theta)
    stepped = made.initial
    for batch in made.batches(purpose=purpose):
        stepped = made.step(stepped, made.gradient(stepped, batch))
    torch.testing.assert_close(stepped, theta)


def test_batches_are_the_same_with_and_without() -> None:
    with_it, without = client(False, Augmentation(flip=True)), client(False, None)
    for one, other in zip(with_it.batches(), without.batches(), strict=True):
        assert one.indices is not None
        assert other.indices is not None
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.y, other.y)
        assert torch.equal(torch.minimum(one.x, one.x.flip(3)), torch.minimum(other.x, other.x.flip(3)))


def test_neither_losses_full_gradients_nor_features_of_a_frozen_body_are_augmented() -> None:
    with_it, without = client(False, Augmentation.parse(ALL)), client(False, None)
    theta = with_it.initial
    assert torch.equal(with_it.loss(theta), without.loss(theta))
    assert torch.equal(with_it.gradient(theta), without.gradient(theta))
    head = with_it.head
    assert torch.equal(with_it.descend(theta, part=head), without.descend(theta, part=head))
    assert not torch.equal(with_it.descend(theta), without.descend(theta))


def test_a_descent_without_batches_leaves_the_samples_alone() -> None:
    made, x = Network(network(False)), X.clone()
    settings = OptimizerSettings(batch=None, epochs=1)
    augment = Augmentation.parse(ALL)
    descend(
        made,
        made.vector.clone(),
        x,
        Y,
        functional.cross_entropy,
        settings,
        stream(0),
        augment=lambda batch: augment(batch, stream(1)),
    )
    assert torch.equal(x, X)


SMALL: dict[str, Any] = {
    "data": "digits", "clients": 4, "rounds": 3, "model": "mlp:8", "epochs": 1, "max_train": 30, "fine_tune": 1,
    "augment": "crop:1,flip,jitter:0.2",
}  # fmt: skip


def test_same_numbers_on_both_engines_and_after_an_interrupt(tmp_path: Path) -> None:
    reference = ft.run("ditto", engine="in-process", **SMALL)
    plain = ft.run("ditto", engine="in-process", **{**SMALL, "augment": None})
    assert [record.loss for record in plain.rounds] != [record.loss for record in reference.rounds]

    def stop(record: RoundRecord) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.run("ditto", engine="in-process", checkpoint_every=1, out=tmp_path / "run", on_round=stop, **SMALL)
    others = ft.run("ditto", engine="processes", workers=2, **SMALL), ft.resume(tmp_path / "run")
    for other in others:
        assert [record.loss for record in other.rounds] == [record.loss for record in reference.rounds]
        for number in range(4):
            one = other.personal(number)
            assert all(torch.equal(tensor, one[name]) for name, tensor in reference.personal(number).items())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"augment": "flop"}, "did you mean 'flip'"),
        ({"augment": "crop:8"}, "pads more than the side of an image of 8×8 pixels: give at most 7"),
        ({"augment": "flip", "data": "synthetic"}, "Augmentation is for images, but these inputs have the shape 60"),
    ],
)
def test_refusals_before_the_run(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedtailorError, match=sentence):
        ft.run("fedavg", **settings)
