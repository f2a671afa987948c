"""The user's own arrays: an npz file with x, y and perhaps client, or a Python list of clients."""

import re
import zipfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.data.dataset import Dataset, without_labels
from fedtailor.data.unpacking import check_archive, damaged, reading
from fedtailor.errors import FedtailorError, brief, listed

Array = NDArray[Any]
Arrays = dict[str, Array]
MANY_CLASSES = 1_000  # more are refused if most of them have no sample: then labels are codes or years
MOST_CLASSES = 1_000_000  # the same where gaps are allowed: data of one client of many
_EXAMPLE = ", for example (table[features], table['label'])"


def read_arrays(path: Path) -> Arrays:
    """Read all arrays of an npz file. Pickled objects in it are refused, not run."""
    with reading(path):
        with path.open("rb") as file:  # a file that may not be read is not a damaged one
            if not zipfile.is_zipfile(file):
                raise damaged(path, "it is not an npz file, or truncated")
        with zipfile.ZipFile(path) as archive:
            check_archive(path, archive)
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            return {member.filename.removesuffix(".npy"): _array(path, archive, member) for member in members}


def _array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """Read an array, if it has the size that its header claims: NumPy reserves the memory before it reads."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = header(file)
        size = member.file_size - file.tell()
    if kind.hasobject:
        raise FedtailorError(
            f"The file {path} holds pickled objects, which fedtailor never loads: save plain arrays of numbers or "
            "strings."
        )
    if prod(shape) * kind.itemsize != size:
        raise damaged(path, f"its array {member.filename!r} has {size} bytes, but its shape {shape} says others")
    with archive.open(member) as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
        return array


def read_npz(path: Path, arrays: Arrays, labelled: bool = True) -> Dataset:
    """Read `x`, `y` and, if it is there, `client`. Unless `labelled`, `y` may be missing."""
    missing = [key for key in ("x", "y") if key not in arrays and (labelled or key != "y")]
    if missing:
        raise FedtailorError(
            f"The file {path} has no array {missing[0]!r}, only {listed(list(arrays)) or 'none'}: save it with "
            "np.savez(file, x=..., y=...)."
        )
    client, names = encode(arrays["client"], f"The clients of {path}") if "client" in arrays else (None, ())
    x = as_features(arrays["x"], path.name)
    if "y" not in arrays:
        return without_labels(path.name, x, client, names)
    y, classes = several_labels(arrays["y"]) or encode(arrays["y"], f"The labels of {path}")
    return Dataset(path.name, x, y, classes, client=client, client_names=names)


def from_list(parts: Sequence[Any], name: str = "list", gaps: bool = False) -> Dataset:
    """Make a data set from a list with one entry per client: a pair (x, y) of tensors or arrays, or a torch Dataset.

    Items of a torch Dataset are pairs (x, y). Whole numbers in y are classes, fractions the targets of a regression,
    and whole numbers 0 and 1 in several columns labels, of which a sample may have any.
    The classes are 0, 1, … up to the greatest label; with `gaps`, most of them may be missing.
    """
    if not isinstance(parts, Sequence) or isinstance(parts, (str, bytes)):
        raise FedtailorError(
            f"The data are a {type(parts).__name__}, not a list of clients: give one pair (x, y) of arrays for each "
            f"client{_EXAMPLE if _is_frame(parts) else ', as in [(x0, y0), (x1, y1)]'}."
        )
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
    y, classes = several_labels(torch.cat(ys).numpy()) or (torch.cat(ys), ())
    if not y.is_floating_point():
        classes = numbered_classes(y, name, gaps)
    owner = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(y) for y in ys]))
    names = tuple(map(str, range(len(parts))))
    return Dataset(name, torch.cat(xs), y, classes, client=owner, client_names=names)


def several_labels(y: Array) -> tuple[Tensor, tuple[str, ...]] | None:
    """Take whole numbers 0 and 1 in several columns for labels, of which a sample may have any; None for all else."""
    if y.ndim != 2 or y.shape[1] < 2 or y.dtype.kind not in "biu" or not np.isin(y, (0, 1)).all():
        return None
    return torch.from_numpy(y.astype(np.float32)), tuple(map(str, range(y.shape[1])))


def numbered_classes(y: Tensor, name: str, gaps: bool = False) -> tuple[str, ...]:
    """Name the classes 0, 1, … up to the greatest label. Refuse labels that leave out most of many classes."""
    many, present = max(int(y.max()) + 1, 1), len(y.unique())
    if many > (MOST_CLASSES if gaps else MANY_CLASSES) and present < many / 2:
        raise FedtailorError(
            f"The labels of {name!r} go up to {many - 1}, but only {present} different ones occur, so that most of the "
            f"{many} classes would be empty: number the classes 0, 1, 2, …."
        )
    return tuple(map(str, range(many)))


def _words(kind: tuple[torch.dtype, tuple[int, ...]]) -> str:
    return f"type {str(kind[0]).removeprefix('torch.')} and shape {kind[1]}"


def _pair(part: Any, client: int, name: str) -> tuple[Tensor, Tensor]:
    who = f"Client {client} of {name!r}"
    if _is_frame(part):
        raise FedtailorError(f"{who} is one table: give a pair (x, y) of its features and its labels{_EXAMPLE}.")
    if not (isinstance(part, (tuple, list)) and len(part) == 2 and all(map(_is_array, part))):
        try:
            items = [part[index] for index in range(len(part))]
            part = [np.stack([as_array(item[side], who) for item in items]) for side in (0, 1)]
        except (TypeError, ValueError, IndexError, KeyError):
            raise FedtailorError(
                f"{who} is neither a pair (x, y) of arrays nor a dataset of (x, y) "
                "items: give one of these with at least one sample, all of the same shape."
            ) from None
    x, y = (np.atleast_1d(as_array(side, who)) for side in part)
    if len(x) == 0 or len(x) != len(y):
        raise FedtailorError(
            f"{who} has {len(x)} samples and {len(y)} labels: give at least one sample, and a label for each."
        )
    if y.dtype.kind not in "biuf":
        raise FedtailorError(f"{who} has labels of type {y.dtype}: give numbers.")
    y = y.astype((y.dtype if y.dtype == np.float64 else np.float32) if y.dtype.kind == "f" else np.int64)
    return as_features(x, name, double=True), torch.from_numpy(y)


def _is_array(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) or hasattr(value, "to_numpy")


def _is_frame(value: object) -> bool:
    """Recognise a table of pandas, or of a library like it."""
    return hasattr(value, "to_numpy") and hasattr(value, "columns")


def as_array(value: Any, name: str) -> Array:
    """Convert a tensor, an array, a table or a list to an array."""
    try:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            return (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # type: ignore[no-any-return]
        return np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FedtailorError(f"{name} cannot be made an array of numbers ({brief(error)}).") from None


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


def encode(values: Array | list[str], what: str) -> tuple[Tensor, tuple[str, ...]]:
    """Number the different values 0, 1, … in sorted order; return each sample's number, and the values as names.

    Values that are all numbers go by value, however they are written: 2 before 10, and 1, 1.0 and 01 are the same.
    """
    if isinstance(values, list):  # not as an array of texts, where each takes the memory of the longest
        texts, codes = _different(values)
    else:
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim != 1 or values.dtype.kind not in "biufUS":
            raise FedtailorError(
                f"{what} have shape {values.shape} and type {values.dtype}: give one number or text each."
            )
        if values.dtype.kind in "US":
            return encode(_texts(values, what), what)
        different, codes = np.unique(values, return_inverse=True)
        texts = [str(value) for value in different.tolist()]
    numbers = [_number(text) for text in texts]
    if None not in numbers and any(isinstance(number, float) for number in numbers):
        raise FedtailorError(f"{what} hold fractions or NaN: give whole numbers or names.")
    keys: list[Any] = list(texts if None in numbers else numbers)
    written: dict[Any, list[str]] = {key: [] for key in sorted(set(keys))}
    for key, text in zip(keys, texts, strict=True):
        written[key].append(text)
    place = {key: position for position, key in enumerate(written)}
    positions = np.array([place[key] for key in keys], dtype=np.int64)
    return torch.from_numpy(positions[codes]), tuple(_name(ways, key) for key, ways in written.items())


def _texts(values: Array, what: str) -> list[str]:
    try:
        return [value if isinstance(value, str) else value.decode() for value in values.tolist()]
    except (ValueError, SystemError):  # NumPy's texts are any numbers
        raise FedtailorError(f"{what} hold characters that are no text: give numbers or names in UTF-8.") from None


def _different(values: list[str]) -> tuple[list[str], NDArray[np.int64]]:
    """List the different texts, and give each value the number of its text."""
    numbers: dict[str, int] = {}
    codes = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), np.array(codes, dtype=np.int64)


def _number(text: str) -> int | float | None:
    """Read a number: an integer if it is whole, a float if it is a fraction or not finite; None if it is neither."""
    try:
        if re.fullmatch(r"\s*[+-]?\d+\s*", text, re.ASCII):
            return int(text)
        value = None if "_" in text else float(text)
    except ValueError:
        return None
    return int(value) if value is not None and value.is_integer() else value


def _name(written: list[str], value: int | str) -> str:
    """Name a value: as it is written if that is one way and of digits alone (007), else in the shortest way."""
    return written[0] if len(written) == 1 and written[0].isdecimal() else str(value)
