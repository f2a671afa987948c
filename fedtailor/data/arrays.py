"""The user's own arrays: an npz file with x, y and perhaps client, or a Python list of clients."""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.data.dataset import Dataset, without_labels
from fedtailor.data.info import damaged
from fedtailor.errors import FedtailorError

Array = NDArray[Any]
Arrays = dict[str, Array]


def read_arrays(path: Path) -> Arrays:
    """Read all arrays of an npz file. Pickled objects in it are refused, not run."""
    with path.open("rb") as file:  # a file that may not be read is not a damaged one
        is_archive = zipfile.is_zipfile(file)
    if not is_archive:
        raise damaged(path, "it is not an npz file, or truncated")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        if "allow_pickle" in str(error):
            raise FedtailorError(
                f"The file {path} holds pickled objects, which fedtailor never loads: save plain arrays "
                "of numbers or strings."
            ) from None
        raise damaged(path) from None


def read_npz(path: Path, arrays: Arrays, labelled: bool = True) -> Dataset:
    """Read `x`, `y` and, if it is there, `client`. Unless `labelled`, `y` may be missing."""
    missing = [key for key in ("x", "y") if key not in arrays and (labelled or key != "y")]
    if missing:
        raise FedtailorError(
            f"The file {path} has no array {missing[0]!r}, only {', '.join(arrays) or 'none'}: save it with "
            "np.savez(file, x=..., y=...)."
        )
    client, names = encode(arrays["client"], f"The clients of {path}") if "client" in arrays else (None, ())
    x = as_features(arrays["x"], path.name)
    if "y" not in arrays:
        return without_labels(path.name, x, client, names)
    y, classes = encode(arrays["y"], f"The labels of {path}")
    return Dataset(path.name, x, y, classes, client=client, client_names=names)


def from_list(parts: Sequence[Any], name: str = "list") -> Dataset:
    """Make a data set from a list with one entry per client: a pair (x, y) of tensors or arrays, or a torch Dataset.

    Items of a torch Dataset are pairs (x, y). Whole numbers in y are classes, fractions the targets of a regression.
    """
    if not parts:
        raise FedtailorError(f"The list {name!r} is empty: give one entry per client.")
    pairs = [_pair(part, client, name) for client, part in enumerate(parts)]
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
    for what, tensors in (("features", xs), ("labels", ys)):
        kinds = [(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors]
        for client, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise FedtailorError(
                    f"Client {client} of {name!r} has {what} of {_words(kind)}, but client 0 of "
                    f"{_words(kinds[0])}: all clients need the same."
                )
    y = torch.cat(ys)
    classes = () if y.is_floating_point() else tuple(map(str, range(max(int(y.max()) + 1, 1))))
    owner = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(y) for y in ys]))
    names = tuple(map(str, range(len(parts))))
    return Dataset(name, torch.cat(xs), y, classes, client=owner, client_names=names)


def _words(kind: tuple[torch.dtype, tuple[int, ...]]) -> str:
    return f"type {str(kind[0]).removeprefix('torch.')} and shape {kind[1]}"


def _pair(part: Any, client: int, name: str) -> tuple[Tensor, Tensor]:
    if not (isinstance(part, (tuple, list)) and len(part) == 2 and all(map(_is_array, part))):
        try:
            items = [part[index] for index in range(len(part))]
            part = [np.stack([as_array(item[side]) for item in items]) for side in (0, 1)]
        except (TypeError, ValueError, IndexError, KeyError):
            raise FedtailorError(
                f"Client {client} of {name!r} is neither a pair (x, y) of arrays nor a dataset of (x, y) "
                "items: give one of these with at least one sample, all of the same shape."
            ) from None
    x, y = (np.atleast_1d(as_array(side)) for side in part)
    if len(x) == 0 or len(x) != len(y):
        raise FedtailorError(
            f"Client {client} of {name!r} has {len(x)} samples and {len(y)} labels: give at least one "
            "sample, and a label for each."
        )
    if y.dtype.kind not in "biuf":
        raise FedtailorError(f"Client {client} of {name!r} has labels of type {y.dtype}: give numbers.")
    y = y.astype((y.dtype if y.dtype == np.float64 else np.float32) if y.dtype.kind == "f" else np.int64)
    return as_features(x, name, double=True), torch.from_numpy(y)


def _is_array(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def as_array(value: Any) -> Array:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def as_features(x: Array, name: str, double: bool = False) -> Tensor:
    """Convert an array: uint8 images to (n, channels, height, width), all else to float32 (or, with `double`, kept)."""
    if x.dtype.kind not in "biuf":
        raise FedtailorError(f"The features of {name!r} are of type {x.dtype}: give numbers.")
    x = np.require(x, requirements=["C", "W"])  # PyTorch takes no others
    if x.dtype == np.uint8 and x.ndim == 3:
        return torch.from_numpy(x)[:, None]
    if x.dtype == np.uint8 and x.ndim == 4:
        channels_last = x.shape[1] not in (1, 3) and x.shape[3] in (1, 3)
        return torch.from_numpy(x).permute(0, 3, 1, 2).contiguous() if channels_last else torch.from_numpy(x)
    if not (double and x.dtype == np.float64):
        with np.errstate(over="ignore"):  # what is too large for float32 becomes Inf, which is refused
            x = x.astype(np.float32)
    return torch.from_numpy(x[:, None] if x.ndim == 1 else x)


def encode(values: Array, what: str) -> tuple[Tensor, tuple[str, ...]]:
    """Number the different values 0, 1, … in sorted order; return each sample's number, and the values as names."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or values.dtype.kind not in "biufUS":
        raise FedtailorError(f"{what} have shape {values.shape} and type {values.dtype}: give one number or text each.")
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    different, codes = np.unique(values, return_inverse=True)
    names = [str(value) for value in different.tolist()]
    numbers = _numbers(names)
    if not all(number.is_integer() for number in numbers):
        raise FedtailorError(f"{what} hold fractions or NaN: give whole numbers or names.")
    # Names that are numbers go by value: 2 before 10.
    order = sorted(range(len(names)), key=(lambda i: (numbers[i], names[i])) if numbers else names.__getitem__)
    rank = np.argsort(np.array(order, dtype=np.int64))
    return torch.from_numpy(rank[codes]), tuple(names[i].removesuffix(".0") if numbers else names[i] for i in order)


def _numbers(names: list[str]) -> list[float]:
    """Convert the names to numbers; to an empty list if one of them is not a number."""
    try:
        return [float(name) for name in names]
    except ValueError:
        return []
