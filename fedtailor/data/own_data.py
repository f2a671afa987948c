"""Data that were Python objects, kept as a file: arrays as an npz file has them, and no pickle.

One more array, `fedtailor`, has all else that a `Dataset` knows, as JSON. The file's name has the checksum of all that
is in it: other data have another name.
"""

import io
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from fedtailor._common.files import checksum, write_atomically
from fedtailor._common.imports import GIVEN
from fedtailor.data.columns import Column
from fedtailor.data.dataset import Dataset
from fedtailor.data.foreign_files import damaged, reading
from fedtailor.training.inputs import Inputs, Lazy, Several

NAME = re.compile(r"own-data-[0-9a-f]{16}\.npz")
ABOUT = "fedtailor"  # the array with all else
TYPES = {
    "y": ("int64", "float32", "float64"),
    "part": ("uint8",),
    "client": ("int64",),
    "group": ("int64",),
}
Arrays = dict[str, Any]


class _About(BaseModel):
    """What a data set is beside its arrays."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    classes: tuple[str, ...]
    client_names: tuple[str, ...]
    group_names: tuple[str, ...]
    own_split: bool
    tokens: int | None
    columns: tuple[Column, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]


def is_own(name: str) -> bool:
    """Recognise the name of such a file."""
    return NAME.fullmatch(name) is not None


def data_in_words(name: str) -> str:
    """Name an experiment's data for readers: what was an object is "your own data"."""
    return "your own data" if name.startswith(GIVEN) or is_own(name) else name


def can_be_kept(x: Inputs) -> bool:
    """Find out whether samples are in memory. Those that are read lazily stay where they are."""
    return all(map(can_be_kept, x.parts)) if isinstance(x, Several) else not isinstance(x, Lazy)


def kept(dataset: Dataset) -> tuple[str, Dataset]:
    """Name the file of a data set by the checksum of its content, and make the data set that will be read from it."""
    arrays = _arrays(dataset)
    return (name := _name(arrays)), read_own(Path(name), arrays)


def write_own(dataset: Dataset, folder: Path) -> None:
    """Write the file of a data set into this folder."""
    content, arrays = io.BytesIO(), _arrays(dataset)
    np.savez(content, **arrays)
    write_atomically(folder / _name(arrays), content.getvalue())


def read_own(path: Path, arrays: Arrays) -> Dataset:
    """Make the data set again of the arrays in its file: the same as was written, to the bit."""
    with reading(path, "it holds something else than was written"):
        if path.name != _name(arrays):
            raise damaged(path, "it was renamed or changed since it was written")
        about = _About.model_validate_json(arrays[ABOUT].tobytes())
        if any(arrays[name].dtype.name not in types for name, types in TYPES.items() if name in arrays):
            raise damaged(path, "its arrays are of other types than are written")
        found: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items() if name != ABOUT}
        several = sorted((name for name in found if name[0] == "x" and name != "x"), key=lambda name: int(name[1:]))
        x = Several(tuple(found.pop(name) for name in several)) if several else found.pop("x")
        return Dataset(x=x, **found, **dict(about))


def _arrays(dataset: Dataset) -> Arrays:
    """The arrays of a data set's file."""
    x = dataset.x
    held: dict[str, Any] = {"x": x}
    if isinstance(x, Several):
        held = {f"x{place}": part for place, part in enumerate(x.parts, 1)}
    held |= {name: getattr(dataset, name) for name in TYPES}
    arrays = {name: np.ascontiguousarray(tensor.cpu().numpy()) for name, tensor in held.items() if tensor is not None}
    about = {name: getattr(dataset, name) for name in _About.model_fields}
    about["columns"] = [asdict(column) for column in dataset.columns]
    return arrays | {ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8)}


def _name(arrays: Arrays) -> str:
    """The name of the file with these arrays."""
    parts: list[bytes | memoryview] = []
    for name, array in sorted(arrays.items()):
        parts += [f"{name} {array.dtype.str} {array.shape} ".encode(), np.ascontiguousarray(array).reshape(-1).data]
    return f"own-data-{checksum(*parts)[:16]}.npz"
