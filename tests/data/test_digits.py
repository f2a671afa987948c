"""Digits of four domains, and folders of domains."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedtailor.data import federate, load
from fedtailor.data.digits import EACH, printed

from .files import write_mnist
from .test_idx import write_emnist


def test_digit_4_has_four_domains_of_upright_digits(tmp_path: Path) -> None:
    mnist, labels = write_mnist(tmp_path / "mnist")
    emnist = write_emnist(tmp_path, "byclass", "test", [3, 61, 0, 9, 10])
    data = load("digit-4", tmp_path)
    assert data.client_names == ("mnist", "emnist", "uci", "fonts")
    assert data.client is not None
    assert data.client.bincount().tolist() == [18, 3, EACH, EACH]  # letters are left out
    of = [data.cells[data.client == domain, 0] for domain in range(4)]
    key = {image.tobytes(): int(label) for image, label in zip(mnist, labels, strict=True)}
    assert [key[image.numpy().tobytes()] for image in of[0]] == data.y[data.client == 0].tolist()
    upright = {image.T.tobytes(): label for image, label in zip(emnist, [3, 61, 0, 9, 10], strict=True)}
    assert [upright[image.numpy().tobytes()] for image in of[1]] == data.y[data.client == 1].tolist()
    small = load("digits")
    assert torch.equal(data.y[data.client == 2], small.y)
    places = ((np.arange(28) + 0.5) * 8 / 28 - 0.5).clip(0, 7)  # linear between the middles of the small pixels
    weights = (1 - np.abs(places[:, None] - np.arange(8))).clip(0)
    enlarged = weights @ small.cells[:, 0].double().numpy() @ weights.T
    assert np.abs(of[2].numpy() / 255 - enlarged).max() < 0.51 / 255


def test_several_clients_have_a_domain(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    write_emnist(tmp_path, "byclass", "test", list(range(10)))
    clients = federate(load("digit-4", tmp_path), partition="natural+iid", clients=8, min_samples=1)
    assert clients.names[:4] == ("mnist-0", "mnist-1", "emnist-0", "emnist-1")
    sizes = clients.bounds.diff(dim=1).sum(1)[4:]
    assert sizes.view(2, 2).sum(1).tolist() == [EACH, EACH]
    assert sizes.max() - sizes.min() == 1


def test_printed_digits_are_the_same_every_time_and_can_be_read() -> None:
    """The nearest mean of a class is right for most of them."""
    x, y = printed(400)
    again, _ = printed(400)
    assert torch.equal(x, again)
    assert y.bincount().tolist() == [40] * 10
    flat = x.flatten(1).double()
    means = torch.stack([flat[:200][y[:200] == digit].mean(0) for digit in range(10)])
    right = torch.cdist(flat[200:], means).argmin(1) == y[200:]
    assert float(right.double().mean()) > 0.6
    assert 5 < float(x[:, 0, :2].double().std()) < 60  # noise, where no digit is


def test_a_folder_of_domains_is_divided_among_clients(tmp_path: Path) -> None:
    """As PACS, Office-Home and DomainNet are on a disk: domain/class/image."""
    for place, domain in enumerate(["art_painting", "Real World"]):
        for number in range(24):
            file = tmp_path / "pacs" / domain / ["dog", "giraffe"][number % 2] / f"pic_{number:03}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((10, 8 + place, 3), 100 * place + number, np.uint8)).save(file)
    data = load(tmp_path / "pacs", image_size=8)
    clients = federate(data, partition="natural+iid+brightness:0..0.2", clients=4, min_samples=1)
    assert clients.names == ("Real World-0", "Real World-1", "art_painting-0", "art_painting-1")
    assert clients.classes == ("dog", "giraffe")
    assert clients.bounds.diff(dim=1).sum(1).tolist() == [12] * 4
