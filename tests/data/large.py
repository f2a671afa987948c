"""Clients whose samples are in memory, in a folder of arrays, or in torch Datasets: the same samples each time."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

import fedtailor as ft

Array = NDArray[Any]


class Items(Dataset[tuple[Any, Any]]):
    """A torch Dataset that remembers which of its items were read."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y, self.read = x, y, list[int]()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.read.append(index)
        x = tuple(part[index] for part in self.x) if isinstance(self.x, tuple) else self.x[index]
        return x, self.y[index]


def samples(kind: str, n: int = 90) -> tuple[Array, Array, Array]:
    """Inputs of a kind, labels that depend on them, and clients of different size."""
    rng = np.random.default_rng(0)
    if kind == "images":
        x = rng.integers(0, 256, (n, 16, 16), dtype=np.uint8)
    elif kind == "colour":
        x = rng.integers(0, 256, (n, 16, 16, 3), dtype=np.uint8)
    elif kind == "floats":
        x = rng.normal(size=(n, 13)).astype(np.float32)
    else:
        x = rng.integers(0, 12, (n, 9), dtype=np.int16)
    y = (x.reshape(n, -1).astype(float).mean(1) > x.mean()).astype(int)
    return x, y, np.sort(rng.choice(3, n, p=[0.2, 0.3, 0.5]))


def in_folder(path: Path, **arrays: Array) -> str:
    path.mkdir()
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)
    return str(path)


def lists(x: Array, y: Array, client: Array) -> tuple[list[Any], list[Any]]:
    """The same clients in memory, and read lazily."""
    pairs = [(x[client == c], y[client == c]) for c in np.unique(client)]
    return pairs, [ft.lazy(Items(*pair)) for pair in pairs]
