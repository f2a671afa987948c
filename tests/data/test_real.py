"""Known facts about the real data sets, where FEDTAILOR_DATA has them."""

import functools
import os

import pytest
import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.data import Dataset, federate, load
from fedtailor.studies.presets import find_preset


@functools.cache
def real(name: str) -> Dataset:
    if not os.environ.get("FEDTAILOR_DATA"):
        pytest.skip("FEDTAILOR_DATA is not set")
    try:
        return load(name)
    except FedtailorError as error:
        if "is missing" not in str(error):
            raise
        pytest.skip(f"{name} is not there")


def parts(data: Dataset) -> list[int]:
    assert data.part is not None
    return data.part.bincount(minlength=3).tolist()


def test_mnist() -> None:
    data = real("mnist")
    assert data.x.shape == (70_000, 1, 28, 28)
    assert parts(data) == [60_000, 0, 10_000]
    assert data.y[:60_000].bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    pixels = data.x[:60_000].float() / 255
    assert float(pixels.mean()) == pytest.approx(0.1307, abs=5e-5)
    assert float(pixels.std()) == pytest.approx(0.3081, abs=5e-5)


def test_fashion_mnist() -> None:
    data = real("fashion-mnist")
    assert data.x.shape == (70_000, 1, 28, 28)
    assert data.y.bincount().tolist() == [7000] * 10
    assert float(data.x[:60_000].float().mean()) / 255 == pytest.approx(0.2860, abs=5e-5)
    assert data.classes[int(data.y[0])] == "Ankle boot"


def similarity(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_emnist_by_class_test_part_is_upright() -> None:
    data, mnist = real("emnist:byclass:test"), real("mnist")
    assert data.x.shape == (116_323, 1, 28, 28)
    assert len(data.classes) == 62
    assert len(data.y.unique()) == 62
    for digit in range(10):
        ours, theirs = (d.x[d.y == digit][:, 0].float().mean(0) for d in (data, mnist))
        margin = 0.02 if digit == 0 else 0.1  # a 0 hardly changes when transposed
        assert similarity(ours, theirs) > similarity(ours.T, theirs) + margin


def test_cifar_10() -> None:
    data = real("cifar-10")
    assert data.x.shape == (60_000, 3, 32, 32)
    assert parts(data) == [50_000, 0, 10_000]
    assert data.y.bincount().tolist() == [6000] * 10
    means = data.x[:50_000].float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=5e-5, rtol=0)


def test_organamnist() -> None:
    data = real("organamnist")
    assert data.x.shape == (58_830, 1, 28, 28)
    assert parts(data) == [34_561, 6_491, 17_778]
    assert len(data.y.unique()) == len(data.classes) == 11


def test_pflegos_omniglot_has_15_drawings_of_each_character_for_training_and_5_for_testing() -> None:
    cell = find_preset("pflego/table2")
    experiment = cell.experiment(cell.rows[0], "omniglot")
    names = ("partition", "clients", "test", "validation", "split", "stratify", "seed")
    split = federate(real(experiment.data), **{name: getattr(experiment, name) for name in names})
    seen, fresh = (
        torch.cat([part(client)[1] for client in range(50)]).bincount() for part in (split.train, split.test)
    )
    assert seen.tolist() == [15 * 4] * 1623
    assert fresh.tolist() == [5 * 4] * 1623


def test_omniglot() -> None:
    data = real("omniglot")
    assert data.x.shape == (32_460, 1, 28, 28)
    assert data.client is not None
    assert data.group is not None
    assert len(data.client_names) == len(data.client.unique()) == 50
    assert len(data.classes) == 1623
    assert data.y.bincount().tolist() == [20] * 1623
    assert len(data.group.unique()) == 32_460
    paper = (data.x < 32).float().mean()
    assert float(paper) > 0.6
    classes = [len(data.y[data.client == client].unique()) for client in range(50)]
    assert (min(classes), max(classes)) == (14, 55)


def test_pgfed_partition_of_cifar_10() -> None:
    split = federate(
        real("cifar-10"),
        partition="dirichlet:0.3",
        clients=100,
        min_samples=40,
        test=0.25,
        validation=0,
        pixels="signed",
    )
    total = split.counts().sum(1)
    assert (int(total.sum()), int(total.min()) >= 40) == (60_000, True)
    assert float(split.counts("test").sum()) / 60_000 == pytest.approx(0.25, abs=0.002)


def test_pfedmb_split_of_cifar_10() -> None:
    split = federate(real("cifar-10"), partition="classes-random:2", clients=15, split="official", validation=0.2)
    assert [int(split.counts(part).sum()) for part in ("train", "validation", "test")] == [40_000, 10_000, 10_000]
    assert ((split.counts("train") > 0) == (split.counts("test") > 0)).all()


def test_pflego_dealing_of_fashion_mnist() -> None:
    split = federate(real("fashion-mnist"), partition="classes:2", clients=100, split="official", validation=0)
    assert (split.counts("train") > 0).sum(1).tolist() == [2] * 100
    assert [int(split.counts(part).sum()) for part in ("train", "test")] == [60_000, 10_000]
