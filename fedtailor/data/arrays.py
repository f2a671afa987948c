"""The user's own arrays: an npz file with x, y and perhaps client, group and split, or clients in a list or dict."""

import re
import zipfile
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor._common.errors import FedtailorError, brief, listed, shown
from fedtailor.data.dataset import TEST, TRAIN, VALIDATION, Dataset, without_labels
from fedtailor.data.foreign_files import check_archive, damaged, reading
from fedtailor.training.inputs import Inputs, Lazy, Several, join

Array = NDArray[Any]
Arrays = dict[str, Array]
Clients = Sequence[Any] | Mapping[str, Any]  # one entry per client, in a dictionary by name
KEYS = ("x", "y", "group", "split")  # of a client's entry, if that is a dictionary
PARTS = {
    **dict.fromkeys(("train", "training", "0"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "1"), VALIDATION),
    **dict.fromkeys(("test", "testing", "2"), TEST),
}
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


def read_npz(path: Path, arrays: dict[str, Any], labelled: bool = True) -> Dataset:
    """Read `x` (or `x1`, `x2`, …, several inputs), `y` and, if they are there, `client`, `group` and `split`.

    Unless `labelled`, `y` may be missing.
    """
    several = tuple(takewhile(arrays.__contains__, (f"x{number}" for number in count(1))))
    if several and "x" not in arrays:
        arrays = {**arrays, "x": tuple(arrays[key] for key in several)}
    missing = [key for key in ("x", "y") if key not in arrays and (labelled or key != "y")]
    if missing:
        raise FedtailorError(
            f"The file {path} has no array {missing[0]!r}, only {listed(list(arrays)) or 'none'}: save it with "
            "np.savez(file, x=..., y=...)."
        )
    client, names = encode(arrays["client"], f"The clients of {path}") if "client" in arrays else (None, ())
    x = as_samples(arrays["x"], path.name)
    if "y" not in arrays:
        return without_labels(path.name, x, client, names)
    y, classes = several_labels(arrays["y"]) or encode(arrays["y"], f"The labels of {path}")
    group, groups = encode(arrays["group"], f"The groups of {path}") if "group" in arrays else (None, ())
    split = (
        as_parts(column(arrays["split"], f"The split of {path}"), f"The split of {path}") if "split" in arrays else None
    )
    return Dataset(path.name, x, y, classes, split, client, names, group, split is not None, group_names=groups)


def from_list(parts: Clients, name: str | None = None, gaps: bool = False) -> Dataset:
    """Make a data set from a list with one entry per client, or from a dictionary, whose keys name the clients.

    An entry is a pair (x, y) of tensors or arrays, a dictionary with the keys x, y and, if you like, group and split,
    a torch Dataset of pairs (x, y), or a pandas table with a label column. Whole numbers in y are classes, fractions
    the targets of a regression, and whole numbers 0 and 1 in several columns labels, of which a sample may have any.
    The classes are 0, 1, … up to the greatest label; with `gaps`, most of them may be missing.
    """
    kind = "dictionary" if isinstance(parts, Mapping) else "list"
    name = name or kind
    if not isinstance(parts, (Sequence, Mapping)) or isinstance(parts, (str, bytes)):
        raise FedtailorError(
            f"The data are a {type(parts).__name__}, not a list of clients: give one pair (x, y) of arrays for each "
            f"client{_EXAMPLE if is_frame(parts) else ', as in [(x0, y0), (x1, y1)]'}."
        )
    if not parts:
        raise FedtailorError(f"The {kind} {name!r} is empty: give one entry per client.")
    if all(map(is_frame, parts.values() if isinstance(parts, Mapping) else parts)):
        from fedtailor.data.table import Purpose, from_frame

        return from_frame(parts, {}, Purpose(), name)
    named = parts if isinstance(parts, Mapping) else {str(number): part for number, part in enumerate(parts)}
    if strange := [key for key in named if not (isinstance(key, str) and key.strip())]:
        raise FedtailorError(f"The key {shown(strange[0])} of {name!r} names no client: give a text that is not empty.")
    entries = {client: _entry(part, f"Client {listed([client])} of {name!r}", name) for client, part in named.items()}
    for key in KEYS:
        _check_alike(entries, key, name)
    ys = [entry["y"] for entry in entries.values()]
    y, classes = several_labels(torch.cat(ys).numpy()) or (torch.cat(ys), ())
    if not y.is_floating_point():
        classes = numbered_classes(y, name, gaps)
    owner = torch.arange(len(ys)).repeat_interleave(torch.tensor([len(y) for y in ys]))
    texts, split = ([text for entry in entries.values() for text in entry.get(key, ())] for key in ("group", "split"))
    group, groups = encode(texts, f"The groups of {name!r}") if texts else (None, ())
    return Dataset(
        name,
        join([entry["x"] for entry in entries.values()]),
        y,
        classes,
        as_parts(split, f"The split of {name!r}") if split else None,
        owner,
        tuple(entries),
        group,
        own_split=bool(split),
        group_names=groups,
    )


def _entry(part: Any, who: str, name: str) -> dict[str, Any]:
    """Read one client's samples: the tensors x and y, and the texts of group and split where they are given."""
    if not isinstance(part, Mapping):
        return dict(zip(KEYS, _pair(part, who, name), strict=False))
    strange = [str(key) for key in part if key not in KEYS]
    if strange or "x" not in part or "y" not in part:
        raise FedtailorError(
            f"{who} has the keys {listed(list(map(str, part)))}: give x and y and, if you like, group and split."
        )
    given = part["x"] if isinstance(part["x"], (tuple, Lazy)) else as_array(part["x"], who)
    x, y = _pair((given, as_array(part["y"], who)), who, name)
    others = {key: column(part[key], f"The {key} of {who[0].lower()}{who[1:]}") for key in KEYS[2:] if key in part}
    for key, texts in others.items():
        if len(texts) != len(y):
            raise FedtailorError(f"{who} has {len(y)} samples and {len(texts)} entries in {key!r}: give one for each.")
    return {"x": x, "y": y, **others}


def _check_alike(entries: dict[str, dict[str, Any]], key: str, name: str) -> None:
    """Refuse clients whose samples do not fit together."""
    (one, first), *others = entries.items()
    for client, entry in others:
        if (key in entry) != (key in first):
            raise FedtailorError(f"Some clients of {name!r} have {key!r} and others not: give it for all or for none.")
        if key in ("x", "y") and (kind := _kind(entry[key])) != _kind(first[key]):
            raise FedtailorError(
                f"Client {listed([client])} of {name!r} has {'features' if key == 'x' else 'labels'} of {kind}, but "
                f"client {listed([one])} of {_kind(first[key])}: all clients need the same."
            )


def column(values: Any, what: str) -> list[str]:
    """Convert one value per sample, numbers or texts, to texts."""
    array = as_array(values, what)
    if array.ndim != 1:
        raise FedtailorError(f"{what} has shape {array.shape}: give one number or text for each sample.")
    plain = _texts(array, what) if array.dtype.kind in "US" else array.tolist()
    if any(value is None or value != value for value in plain):
        raise FedtailorError(f"{what} is missing for some samples: fill it in.")
    return list(map(str, plain))


def as_parts(values: Array | list[str], what: str) -> Tensor:
    """Read the part of each sample: train, validation or test, or 0, 1, 2."""
    texts = values if isinstance(values, list) else column(values, what)
    try:
        parts = {text: PARTS.get(text.strip().lower()) for text in texts}
        strange = [shown(text) for text, part in parts.items() if part is None]
    except SystemError:  # NumPy's texts are any numbers
        strange = ["characters that are no text"]
    if strange:
        raise FedtailorError(f"{what} holds {strange[0]}: write train, validation or test, or 0, 1 or 2.")
    return torch.tensor([parts[text] for text in texts], dtype=torch.uint8)


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


def kinds(x: Inputs) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return the type and the shape of a sample, or of each of its inputs."""
    x = x.like if isinstance(x, Lazy) else x
    return [kind for part in x.parts for kind in kinds(part)] if isinstance(x, Several) else [(x.dtype, x.shape[1:])]


def _kind(x: Inputs) -> str:
    return ", ".join(f"type {str(kind).removeprefix('torch.')} and shape {tuple(shape)}" for kind, shape in kinds(x))


def _pair(part: Any, who: str, name: str) -> tuple[Inputs, Tensor]:
    if is_frame(part):
        raise FedtailorError(f"{who} is one table: give a pair (x, y) of its features and its labels{_EXAMPLE}.")
    if not (isinstance(part, (tuple, list)) and len(part) == 2 and _are_inputs(part[0]) and _is_array(part[1])):
        try:
            items = [part[index] for index in range(len(part))]
            part = [stacked([item[side] for item in items], who) for side in (0, 1)]
        except (TypeError, ValueError, IndexError, KeyError):
            raise FedtailorError(
                f"{who} is neither a pair (x, y) of arrays nor a dataset of (x, y) "
                "items: give one of these with at least one sample, all of the same shape."
            ) from None
    given = part[0] if isinstance(part[0], (tuple, Lazy)) else np.atleast_1d(as_array(part[0], who))
    x, y = as_samples(given, name, double=True), np.atleast_1d(as_array(part[1], who))
    if len(x) == 0 or len(x) != len(y):
        raise FedtailorError(
            f"{who} has {len(x)} samples and {len(y)} labels: give at least one sample, and a label for each."
        )
    if y.dtype.kind not in "biuf":
        raise FedtailorError(f"{who} has labels of type {y.dtype}: give numbers.")
    y = y.astype((y.dtype if y.dtype == np.float64 else np.float32) if y.dtype.kind == "f" else np.int64)
    return x, torch.from_numpy(y)


def stacked(values: list[Any], who: str) -> Array | tuple[Array, ...]:
    """Stack the inputs, or the labels, of single items. A tuple of arrays is several inputs."""
    if _are_several(values[0]):
        return tuple(np.stack([as_array(part, who) for part in parts]) for parts in zip(*values, strict=True))
    return np.stack([as_array(value, who) for value in values])


def _are_inputs(value: object) -> bool:
    return _is_array(value) or isinstance(value, Lazy) or _are_several(value)


def _are_several(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(map(_is_array, value))


def _is_array(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) or hasattr(value, "to_numpy")


def is_frame(value: object) -> bool:
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


def as_samples(x: Any, name: str, double: bool = False) -> Inputs:
    """Convert an array, or a tuple of arrays for several inputs. Samples that are read lazily stay as they are."""
    if isinstance(x, tuple):
        return Several(tuple(p if isinstance(p, Lazy) else as_features(p, name, double, alone=False) for p in x))
    return x if isinstance(x, Lazy) else as_features(x, name, double)


def as_features(x: Any, name: str, double: bool = False, alone: bool = True) -> Tensor:
    """Convert an array: uint8 images to (n, channels, height, width), integers to int64, all else to float32 (or, with
    `double`, float64 is kept). Unless it is the only input, booleans and single numbers stay as they are."""
    x = as_array(x, name) if alone else np.atleast_1d(as_array(x, name))
    if x.dtype.kind not in "biuf":
        raise FedtailorError(f"The features of {name!r} are of type {x.dtype}: give numbers.")
    x = np.require(x, requirements=["C", "W"])  # PyTorch takes no others
    if x.dtype == np.uint8 and x.ndim == 3:
        return torch.from_numpy(x)[:, None]
    if x.dtype == np.uint8 and x.ndim == 4:
        channels_last = x.shape[1] not in (1, 3) and x.shape[3] in (1, 3)
        return torch.from_numpy(x).permute(0, 3, 1, 2).contiguous() if channels_last else torch.from_numpy(x)
    if x.dtype.kind in "iu" and x.dtype != np.uint64:  # which has numbers that no other integer type has
        x = x.astype(np.int64)
    elif not ((double and x.dtype == np.float64) or (x.dtype.kind == "b" and not alone)):
        with np.errstate(over="ignore"):  # what is too large for float32 becomes Inf, which is refused
            x = x.astype(np.float32)
    return torch.from_numpy(x[:, None] if x.ndim == 1 and alone else x)


def encode(values: Array | list[str], what: str, hint: str = "") -> tuple[Tensor, tuple[str, ...]]:
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
    numbers = [exact_number(text) for text in texts]
    if None not in numbers and any(isinstance(number, float) for number in numbers):
        raise FedtailorError(f"{what} hold fractions or NaN: give whole numbers or names{hint}.")
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


def exact_number(text: str) -> int | float | None:
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
