"""MNIST, Fashion-MNIST and EMNIST: idx files, plain or gzip.

An idx file is a magic number (two zeros, the type, the number of dimensions), the sizes, and the bytes.
"""

from dataclasses import replace
from math import prod
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits

import numpy as np
import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError, unknown
from fedtailor.data.dataset import TEST, TRAIN, DataInfo, Dataset, DataSets, require, there
from fedtailor.data.foreign_files import damaged, read_gzip

FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
EMNIST = {
    "byclass": tuple(digits + ascii_uppercase + ascii_lowercase),
    "bymerge": tuple(digits + ascii_uppercase + "abdefghnqrt"),  # letters that look alike in both cases are merged
    "balanced": tuple(digits + ascii_uppercase + "abdefghnqrt"),
    "letters": tuple(ascii_uppercase),
    "digits": tuple(digits),
    "mnist": tuple(digits),
}


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an idx file as a uint8 tensor."""
    raw = read_gzip(path)
    start = 4 + 4 * dimensions
    if len(raw) < start or raw[:4] != bytes([0, 0, 8, dimensions]):
        raise damaged(path, f"it does not begin like an idx file of bytes in {dimensions} dimensions")
    shape = np.frombuffer(raw, ">u4", dimensions, 4).tolist()
    if len(raw) - start != prod(shape):
        raise damaged(path, f"it holds {len(raw) - start} bytes where its sizes {shape} say {prod(shape)}")
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy())


def _read_part(folder: Path, images: str, labels: str) -> tuple[Tensor, Tensor]:
    image_file, label_file = (there(folder / f"{name}-ubyte.gz") for name in (images, labels))
    assert image_file is not None  # required before
    assert label_file is not None
    x, y = read_idx(image_file, 3), read_idx(label_file, 1).long()
    if x.shape[1:] != (28, 28):
        raise damaged(image_file, f"its images are {x.shape[2]}×{x.shape[1]} pixels, not 28×28")
    if len(x) != len(y):
        raise FedtailorError(
            f"The file {image_file} holds {len(x)} images but {label_file} {len(y)} labels: get both again."
        )
    return x[:, None], y


def read_mnist(info: DataInfo, root: Path, variant: str) -> Dataset:
    """Read MNIST, or Fashion-MNIST, which has the same files."""
    require(info, root)
    folder = root / info.name
    x, y = _read_part(folder, "train-images-idx3", "train-labels-idx1")
    x_test, y_test = _read_part(folder, "t10k-images-idx3", "t10k-labels-idx1")
    classes = FASHION if info.name == "fashion-mnist" else tuple(digits)
    part = torch.tensor([TRAIN, TEST], dtype=torch.uint8).repeat_interleave(torch.tensor([len(y), len(y_test)]))
    return Dataset(info.name, torch.cat([x, x_test]), torch.cat([y, y_test]), classes, part)


def read_emnist(info: DataInfo, root: Path, variant: str) -> Dataset:
    """Read EMNIST, upright. The variant is a split, and `:test` after it for the published test part alone."""
    split, _, only = (variant or "byclass").partition(":")
    if split not in EMNIST:
        raise unknown("EMNIST split", split, EMNIST)
    if only not in ("", "test"):
        raise FedtailorError(f"'emnist:{variant}' is not known: write 'emnist:{split}' or 'emnist:{split}:test'.")
    parts = ["test"] if only else ["train", "test"]
    name = f"emnist:{variant}" if variant else "emnist"
    require(replace(info, name=name, files=_emnist_files(split, parts)), root)
    pieces = [
        _read_part(root / "emnist", f"emnist-{split}-{part}-images-idx3", f"emnist-{split}-{part}-labels-idx1")
        for part in parts
    ]
    x = torch.cat([x for x, _ in pieces]).transpose(2, 3).contiguous()  # published lying on their side
    y = torch.cat([y for _, y in pieces]) - (1 if split == "letters" else 0)  # letters count from 1
    marks = torch.tensor([TRAIN, TEST], dtype=torch.uint8)
    part = None if only else marks.repeat_interleave(torch.tensor([len(y) for _, y in pieces]))
    return Dataset(name, x, y, EMNIST[split], part)


def _emnist_files(split: str, parts: list[str]) -> tuple[str, ...]:
    kinds = ("images-idx3", "labels-idx1")
    return tuple(f"emnist/emnist-{split}-{part}-{kind}-ubyte.gz" for part in parts for kind in kinds)


def _mnist_files(folder: str) -> tuple[str, ...]:
    kinds = ("images-idx3", "labels-idx1")
    return tuple(f"{folder}/{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in kinds)


DATA_SETS: DataSets = (
    (
        DataInfo(
            "mnist", "handwritten digits, 28×28 grey", 10, _mnist_files("mnist"), "http://yann.lecun.com/exdb/mnist/"
        ),
        read_mnist,
    ),
    (
        DataInfo(
            "fashion-mnist", "pieces of clothing, 28×28 grey", 10, _mnist_files("fashion-mnist"),
            "https://github.com/zalandoresearch/fashion-mnist",
        ),
        read_mnist,
    ),
    (
        DataInfo(
            "emnist", "handwritten digits and letters, 28×28 grey", 62,
            _emnist_files("byclass", ["train", "test"]),
            "https://www.nist.gov/itl/products-and-services/emnist-dataset",
            variants="SPLIT or SPLIT:test, where SPLIT is " + ", ".join(EMNIST),
        ),
        read_emnist,
    ),
)  # fmt: skip
