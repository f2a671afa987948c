"""Digits that come with fedtailor: UCI's handwritten ones, which scikit-learn has too; and digits of four domains."""

from math import ceil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedtailor.data.dataset import DataInfo, Dataset, DataSets, require
from fedtailor.data.idx import DATA_SETS as IDX
from fedtailor.training.streams import numpy_stream

HANDWRITTEN = Path(__file__).with_name("digits.npz")  # what they are, and their licence: NOTICE
PRINTED = Path(__file__).with_name("font_digits.npz")  # made by benchmarks/font_digits.py
EACH = 1797  # images of each domain
CLASSES = tuple(map(str, range(10)))


def read_digits(info: DataInfo, root: Path, variant: str) -> Dataset:
    """Read the 1,797 handwritten digits of 8×8 pixels, as float32 in [0, 1]."""
    x, y = _handwritten()
    return Dataset("digits", x / 16, y, CLASSES)


def _handwritten() -> tuple[Tensor, Tensor]:
    with np.load(HANDWRITTEN) as file:
        pixels, labels = torch.from_numpy(file["pixels"]), torch.from_numpy(file["labels"])
    return pixels[:, None].float(), labels.long()  # pixels are 0..16


def read_digit_4(info: DataInfo, root: Path, variant: str) -> Dataset:
    """Read as many digits of four domains, 28×28: MNIST's, EMNIST's, UCI's enlarged, and digits printed with noise."""
    require(info, root)
    readers = {found.name: (found, reader) for found, reader in IDX}
    domains = {}
    for name, of in (("mnist", ""), ("emnist", "byclass:test")):
        found, reader = readers[name]
        data = reader(found, root, of)
        there = (data.y < 10).nonzero().flatten()
        chosen = there[torch.from_numpy(numpy_stream(0, "digit-4", name).permutation(len(there))[:EACH])]
        domains[name] = data.cells[chosen], data.y[chosen]
    small, labels = _handwritten()
    large = functional.interpolate(small.double(), size=(28, 28), mode="bilinear", align_corners=False)
    domains["uci"] = (large * 255 / 16).round().to(torch.uint8), labels
    domains["fonts"] = printed(EACH)
    return Dataset(
        "digit-4",
        torch.cat([x for x, _ in domains.values()]),
        torch.cat([y for _, y in domains.values()]),
        CLASSES,
        client=torch.cat([torch.full((len(y),), k) for k, (_, y) in enumerate(domains.values())]),
        client_names=tuple(domains),
    )


def printed(n: int) -> tuple[Tensor, Tensor]:
    """Print digits 28×28 in fonts, sizes, angles and places that are drawn, with noise. Always the same draw."""
    with np.load(PRINTED) as file:
        glyphs = torch.from_numpy(file["pixels"]).double() / 255  # fonts × digits × 56 × 56
    rng = numpy_stream(0, "digit-4", "fonts")
    labels = torch.from_numpy(np.tile(np.arange(10), ceil(n / 10))[:n])
    font = torch.from_numpy(rng.integers(len(glyphs), size=n))
    angle, size = np.radians(rng.uniform(-15, 15, n)), rng.uniform(0.8, 1.2, n)
    right, down = rng.uniform(-0.15, 0.15, (2, n))
    c, s = np.cos(angle) / size, np.sin(angle) / size
    moved = torch.from_numpy(np.stack([c, -s, right, s, c, down], axis=1).reshape(n, 2, 3))
    grid = functional.affine_grid(moved, [n, 1, 28, 28], align_corners=False)
    x = functional.grid_sample(glyphs[font, labels][:, None], grid, align_corners=False)
    x += torch.from_numpy(rng.uniform(0.02, 0.2, (n, 1, 1, 1)) * rng.standard_normal(tuple(x.shape)))
    return (x.clamp(0, 1) * 255).round().to(torch.uint8), labels


_FILES = {info.name: info for info, _ in IDX}
DATA_SETS: DataSets = (
    (DataInfo("digits", "handwritten digits, 8×8 grey (UCI)", 10, bundled=True), read_digits),
    (
        DataInfo(
            "digit-4",
            "digits of four domains (MNIST, EMNIST, UCI, fonts), 28×28 grey",
            10,
            (*_FILES["mnist"].files, *(file for file in _FILES["emnist"].files if "-test-" in file)),
            f"{_FILES['mnist'].source} and {_FILES['emnist'].source}",
        ),
        read_digit_4,
    ),
)
