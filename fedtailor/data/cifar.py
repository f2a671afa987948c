"""CIFAR-10 and CIFAR-100, in the binary and the python version, unpacked or as the published .tar.gz.

The python version is made of pickles, which are read without running code (`pickled_arrays`).
"""

import io
import tarfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor._common.errors import FedtailorError
from fedtailor.data.dataset import TEST, TRAIN, DataInfo, Dataset, DataSets, require
from fedtailor.data.foreign_files import damaged, read_gzip, reading
from fedtailor.data.pickled_arrays import Raw, unpickle

Bytes = NDArray[np.uint8]
PIXELS = 3 * 32 * 32
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100 = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl",
    "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair",
    "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin",
    "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp",
    "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain",
    "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck",
    "pine_tree", "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road",
    "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider",
    "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger",
    "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman",
    "worm",
)  # fmt: skip
BATCHES = {  # training files first, the test file last
    "cifar-10": (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    "cifar-100": ("train", "test"),
}
FOLDERS = {  # (binary version, python version)
    "cifar-10": ("cifar-10-batches-bin", "cifar-10-batches-py"),
    "cifar-100": ("cifar-100-binary", "cifar-100-python"),
}


def read_cifar(info: DataInfo, root: Path, variant: str) -> Dataset:
    """Read all images with their (fine) labels, from whichever version is there."""
    require(info, root)
    pixels, labels, parts = [], [], []
    for file, raw in _batches(info.name, root):
        x, y = (_binary if file.suffix == ".bin" else _python)(info.name, file, raw)
        pixels.append(x.reshape(-1, 3, 32, 32))
        labels.append(y.astype(np.int64))
        parts.append(np.full(len(y), TEST if file.stem.startswith("test") else TRAIN, dtype=np.uint8))
    classes = CIFAR10 if info.name == "cifar-10" else CIFAR100
    whole = (torch.from_numpy(np.concatenate(pieces)) for pieces in (pixels, labels, parts))
    return Dataset(info.name, next(whole), next(whole), classes, next(whole))


def _batches(name: str, root: Path) -> list[tuple[Path, Raw]]:
    """Read the batch files in order, from the first version that is there."""
    for files in _versions(name):
        paths = [root / file for file in files]
        if all(path.exists() for path in paths):
            return _unpack(name, paths[0]) if len(paths) == 1 else [(path, read_gzip(path)) for path in paths]
    raise AssertionError("required before")


def _versions(name: str) -> list[tuple[str, ...]]:
    """List the sets of files that hold this data set, the published archive first."""
    binary, python = FOLDERS[name]
    return [
        (f"{name}-binary.tar.gz",),
        tuple(f"{binary}/{batch}.bin" for batch in BATCHES[name]),
        tuple(f"{python}/{batch}" for batch in BATCHES[name]),
        (f"{name}-python.tar.gz",),
    ]


def _unpack(name: str, archive: Path) -> list[tuple[Path, Raw]]:
    raw = memoryview(read_gzip(archive))  # to its end: the checksum of all is behind what tarfile reads
    contents: dict[str, Raw] = {}
    with reading(archive), tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
        for member in tar:
            end = member.offset_data + member.size
            if member.size < 0 or end > len(raw):
                raise damaged(archive)
            if member.isfile() and not member.issparse() and Path(member.name).stem in BATCHES[name]:
                contents[Path(member.name).name] = raw[member.offset_data : end]
    suffix = ".bin" if "binary" in archive.name else ""
    names = [batch + suffix for batch in BATCHES[name]]
    missing = [name for name in names if name not in contents]
    if missing:
        raise damaged(archive, f"there is no {missing[0]} in it")
    return [(archive / name, contents[name]) for name in names]


def _binary(name: str, file: Path, raw: Raw) -> tuple[Bytes, Bytes]:
    """Read records of one label byte (CIFAR-100: the coarse one, then the fine one) and the pixels."""
    labels = 1 if name == "cifar-10" else 2
    if not raw or len(raw) % (labels + PIXELS):
        raise damaged(file, f"its {len(raw)} bytes are not whole records of {labels + PIXELS} bytes")
    records = np.frombuffer(raw, np.uint8).reshape(-1, labels + PIXELS)
    return records[:, labels:], records[:, labels - 1]


def _python(name: str, file: Path, raw: Raw) -> tuple[Bytes, Bytes]:
    """Read a pickled dictionary with `data` and `labels` (CIFAR-100: `fine_labels`)."""
    try:
        batch = unpickle(file, raw, "a CIFAR batch")
        x = batch[b"data"].array
        y = np.array(batch[b"labels" if name == "cifar-10" else b"fine_labels"], dtype=np.uint8)
        if x.dtype != np.uint8 or x.shape != (len(y), PIXELS):
            raise ValueError("sizes")
    except FedtailorError:
        raise
    except Exception:  # a broken pickle can raise anything
        raise damaged(file, "it is not a CIFAR batch, or truncated") from None
    return x, y


def _info(name: str, description: str, classes: int) -> DataInfo:
    files, *also = _versions(name)
    return DataInfo(name, description, classes, files, "https://www.cs.toronto.edu/~kriz/cifar.html", also=tuple(also))


DATA_SETS: DataSets = (
    (_info("cifar-10", "photographs of animals and vehicles, 32×32 colour", 10), read_cifar),
    (_info("cifar-100", "photographs of many things, 32×32 colour", 100), read_cifar),
)
