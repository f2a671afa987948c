"""Small files in the formats that the authors of data sets publish, and small data sets."""

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fedtailor.data import Dataset

Bytes = NDArray[np.uint8]


def toy(samples: int = 400, classes: int = 10, parts: tuple[float, ...] = (), seed: int = 0) -> Dataset:
    """A data set whose feature is the number of the sample, so that one can see where each went."""
    rng = np.random.default_rng(seed)
    part = None
    if parts:
        part = torch.from_numpy(rng.choice(len(parts), samples, p=parts).astype(np.uint8))
    return Dataset(
        "toy",
        torch.arange(samples, dtype=torch.float32)[:, None],
        torch.from_numpy(rng.integers(0, classes, samples)),
        tuple(map(str, range(classes))),
        part,
    )


def write_idx(path: Path, array: Bytes, *, packed: bool) -> None:
    raw = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if packed else raw)


def write_mnist(folder: Path, *, packed: bool = True) -> tuple[Bytes, Bytes]:
    """12 training and 6 test images; returns all images and labels in this order."""
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, (18, 28, 28), dtype=np.uint8)
    y = (np.arange(18) % 10).astype(np.uint8)
    suffix = ".gz" if packed else ""
    for name, piece in (("train", slice(0, 12)), ("t10k", slice(12, 18))):
        write_idx(folder / f"{name}-images-idx3-ubyte{suffix}", x[piece], packed=packed)
        write_idx(folder / f"{name}-labels-idx1-ubyte{suffix}", y[piece], packed=packed)
    return x, y


def cifar_contents(name: str, kind: str) -> tuple[dict[str, bytes], Bytes, Bytes]:
    """The published files (path to contents) of a tiny CIFAR, and its images and labels in order."""
    rng = np.random.default_rng(2)
    ten = name == "cifar-10"
    batches = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"] if ten else ["train", "test"]
    folder = {"binary": "batches-bin" if ten else "binary", "python": "batches-py" if ten else "python"}[kind]
    x = rng.integers(0, 256, (len(batches) * 3, 3072), dtype=np.uint8)
    y = rng.integers(0, 10 if ten else 100, len(x), dtype=np.uint8)
    files = {}
    for i, batch in enumerate(batches):
        pixels, labels = x[3 * i : 3 * i + 3], y[3 * i : 3 * i + 3]
        if kind == "binary":
            columns = [labels[:, None], pixels] if ten else [labels[:, None] // 5, labels[:, None], pixels]
            files[f"{name}-{folder}/{batch}.bin"] = np.hstack(columns).tobytes()
        else:
            key = b"labels" if ten else b"fine_labels"
            files[f"{name}-{folder}/{batch}"] = python2_pickle({key: labels.tolist(), b"data": pixels})
    return files, x.reshape(-1, 3, 32, 32), y


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, contents in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(contents)
            tar.addfile(member, io.BytesIO(contents))


def write_files(root: Path, files: dict[str, bytes]) -> None:
    for name, contents in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(contents)


def python2_pickle(batch: dict[bytes, list[int] | Bytes]) -> bytes:
    """What Python 2's pickle.dumps(batch, 2) wrote: strings of bytes, and arrays by numpy.core.multiarray."""
    items = b"".join(
        _string(key) + (_array(value) if isinstance(value, np.ndarray) else _list(value))
        for key, value in batch.items()
    )
    return b"\x80\x02}(" + items + b"u."


def _string(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + struct.pack("<I", len(text)) + text


def _int(number: int) -> bytes:
    return b"J" + struct.pack("<i", number)


def _list(numbers: list[int]) -> bytes:
    return b"](" + b"".join(map(_int, numbers)) + b"e"


def _array(array: Bytes) -> bytes:
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + _int(0) + b"\x85" + _string(b"b") + b"\x87R"
    kind = b"cnumpy\ndtype\n" + _string(b"u1") + _int(0) + _int(1) + b"\x87R"
    kind += b"(" + _int(3) + _string(b"|") + b"NNN" + _int(-1) + _int(-1) + _int(0) + b"tb"
    shape = b"(" + b"".join(map(_int, array.shape)) + b"t"
    return made + b"(" + _int(1) + shape + kind + b"\x89" + _string(array.tobytes()) + b"tb"


def png(pixels: Bytes, mode: str | None = None) -> bytes:
    image = Image.fromarray(pixels)
    stream = io.BytesIO()
    (image.convert(mode) if mode else image).save(stream, "PNG")
    return stream.getvalue()
