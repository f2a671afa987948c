"""Data that are larger than memory: samples that are read when a batch needs them.

They come from a folder of .npy files, which are mapped into memory, or from a torch Dataset.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError, brief
from fedtailor.data.arrays import Array, as_array, as_features, as_samples, kinds, stacked
from fedtailor.data.dataset import check_samples
from fedtailor.data.foreign_files import check_size, reading
from fedtailor.training.inputs import Held, Lazy, held

ARRAYS = ("y", "client", "group", "split")  # beside the inputs


def is_folder(path: Path) -> bool:
    """Recognise a folder of arrays by its inputs."""
    return (path / "x.npy").is_file() or (path / "x1.npy").is_file()


def read_folder(path: Path) -> dict[str, Any]:
    """Read the arrays of a folder, one .npy file each. The inputs (x, or x1, x2, …) stay on the disk."""
    arrays: dict[str, Any] = {}
    for file in sorted(path.glob("*.npy")):
        name = file.stem
        inputs = re.fullmatch(r"x\d*", name) is not None
        if not file.is_file() or not (inputs or name in ARRAYS):
            continue
        array = _mapped(file)
        if inputs:
            arrays[name] = _stored(file, array, alone=name == "x")
        else:
            check_size(file, array.nbytes)
            arrays[name] = np.array(array)
    return arrays


def _mapped(file: Path) -> Array:
    """Map a file into memory. Pickled objects are refused, and a file that is shorter than its header says."""
    with reading(file):
        array: Array = np.load(file, mmap_mode="r", allow_pickle=False)
        return array


def _stored(file: Path, array: Array, alone: bool) -> Lazy:
    """Read samples from a file, and check all of them once. It is mapped anew each time: pages that were read would
    count as memory of this process until it ends."""
    name = f"{file.parent.name}/{file.name}"
    if array.ndim == 0:
        raise FedtailorError(f"The file {file} holds one number: its array needs a row for each sample.")
    file = file.resolve()  # wherever the run is by then

    def read(numbers: Tensor) -> Held:
        return as_features(_mapped(file)[numbers.numpy()], name, alone=alone)

    lazy = Lazy(read, torch.arange(len(array)), read(torch.arange(0)))
    check_samples(name, lazy, alone)
    return lazy


def lazy(dataset: Any, labels: Any = None) -> tuple[Lazy, Any]:
    """Read a client's samples from a torch Dataset of (x, y) items when batches need them, and not before.

    The labels must be known at once: they are `labels`, or the data set's attribute `targets`, or else all items are
    read once. An item must be the same whenever it is read. The result stands for the client in a list of clients:
    `run(…, data=[lazy(north), lazy(south)])`.
    """
    who = f"The lazy {type(dataset).__name__}"
    try:
        known = getattr(dataset, "targets", None) if labels is None else labels
        y = stacked([dataset[k][1] for k in range(len(dataset))], who) if known is None else as_array(known, who)
        first = held(as_samples(stacked([dataset[0][0]], who), who, double=True))
    except FedtailorError:
        raise
    except Exception as error:  # whatever the user's code does
        raise FedtailorError(f"{who} is not a data set of (x, y) items with a length: {brief(error)}.") from error
    if len(y) != len(dataset):
        raise FedtailorError(f"{who} has {len(dataset)} items, but {len(y)} labels: give a label for each.")

    def read(numbers: Tensor) -> Held:
        items = [dataset[k][0] for k in numbers.tolist()]
        try:
            samples = held(as_samples(stacked(items, who), who, double=True))
        except ValueError:
            samples = None
        if samples is None or kinds(samples) != kinds(first):
            raise FedtailorError(f"{who} has items of different shapes or types: give all the same.")
        check_samples(who, samples)
        return samples

    return Lazy(read, torch.arange(len(dataset)), first[:0]), y
