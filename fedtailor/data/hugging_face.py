"""Data sets of Hugging Face's `datasets`, where it is installed: of the local cache, or saved to a disk.

Nothing is loaded from the hub, and no code of a data set is run.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError, brief, listed
from fedtailor._common.extras import install_command
from fedtailor.data.arrays import encode
from fedtailor.data.dataset import Dataset
from fedtailor.data.foreign_files import check_size
from fedtailor.data.images import as_pixels, stacked_images
from fedtailor.data.table import CLIENT, LABELS, PARTS, Purpose, TableSettings, from_columns

PREFIX = "hf:"


def read_hugging_face(name: str, settings: TableSettings, purpose: Purpose, size: int | None) -> Dataset:
    """Read a data set by its name in the cache, or the path where it was saved: images with labels, or a table."""
    module = _module()
    parts = _parts(module, name)
    together = module.concatenate_datasets(list(parts.values()))
    check_size(name, together.data.nbytes)
    images = [column for column, kind in together.features.items() if isinstance(kind, module.Image)]
    where = f"The data set {PREFIX}{name}"
    if len(images) > 1:
        raise FedtailorError(f"{where} has several images a sample ({listed(images)}): write it as an npz file.")
    if images:
        data = _images(together, images[0], settings, size, where)
    else:
        columns = {column: _column(together, column, where) for column in together.column_names}
        data = from_columns(PREFIX + name, columns, settings, purpose, where)
    known = [PARTS.get(part) for part in parts]
    if len(parts) < 2 or None in known or len(data) != len(together) or data.part is not None:
        return data
    marks = np.repeat(np.array(known, np.uint8), [len(part) for part in parts.values()])
    return replace(data, part=torch.from_numpy(marks))


def _module() -> Any:
    try:
        import datasets
    except ImportError:
        command = install_command("huggingface")
        raise FedtailorError(f"Data sets of Hugging Face need the package datasets: {command}.") from None
    return datasets


def _parts(module: Any, name: str) -> dict[str, Any]:
    """Load the parts of a data set by name."""
    try:
        if Path(name).is_dir():
            found = module.load_from_disk(name)
        else:
            found = _cached(name)
    except Exception as error:  # of many kinds
        raise FedtailorError(
            f"The data set {PREFIX}{name} is neither a folder of save_to_disk nor in the local cache, where one of "
            f"several configurations is {PREFIX}NAME:CONFIGURATION ({brief(error)})."
        ) from None
    return dict(found) if isinstance(found, module.DatasetDict) else {"": found}


def _cached(name: str) -> Any:
    """Open a data set in the cache. `load_dataset` would ask the hub first, whatever its settings say."""
    from datasets.packaged_modules.cache.cache import Cache

    repository, _, configuration = name.partition(":")
    where = {"repo_id": repository, "dataset_name": repository.rpartition("/")[2]}
    return Cache(**where, config_name=configuration or None, version="auto", hash="auto").as_dataset()


def _column(data: Any, column: str, where: str) -> Any:
    """Return a column as an array; the numbers of classes as their names."""
    kind = data.features[column]
    if hasattr(kind, "int2str"):
        return np.array([None if k is None or k < 0 else kind.int2str(k) for k in data[column]], dtype=object)
    values = data.data.column(column).to_numpy() if data._indices is None else np.array(list(data[column]))
    if len(values) and isinstance(values[0], np.ndarray | list | dict):
        raise FedtailorError(f"{where} has lists in the column {column!r}: write it as an npz file.")
    return values


def _images(data: Any, column: str, settings: TableSettings, size: int | None, where: str) -> Dataset:
    """Make a data set of images, with the label and client columns that are named, or have the usual names."""
    label = settings.get("label_column") or next((name for name in LABELS if name in data.column_names), None)
    if label is None or label not in data.column_names:
        raise FedtailorError(f"{where} has no label column: name one of {listed(data.column_names)} (--label-column).")
    files = [f"{place} of {where[0].lower() + where[1:]}" for place in range(len(data))]
    pixels = [as_pixels(image, file, size) for file, image in zip(files, data[column], strict=True)]
    x = stacked_images(files, pixels)
    y, classes = encode([str(value) for value in _column(data, label, where)], f"The classes of {where}")
    client: Tensor | None = None
    names: tuple[str, ...] = ()
    owner = settings.get("client_column") or (CLIENT if CLIENT in data.column_names else None)
    if owner is not None:
        if owner not in data.column_names:
            raise FedtailorError(f"{where} has no column {owner!r}: it has {listed(data.column_names)}.")
        client, names = encode([str(value) for value in _column(data, owner, where)], f"The clients of {where}")
    return Dataset(where.removeprefix("The data set "), x, y, classes, client=client, client_names=names)
