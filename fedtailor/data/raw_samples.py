"""From samples as a user has them to a network's inputs, as a run or a model file had it in training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.data.arrays import Array, as_array, as_samples, is_frame
from fedtailor.data.dataset import Dataset, without_labels
from fedtailor.data.federation import as_inputs
from fedtailor.data.frames import frame_names
from fedtailor.data.matched_columns import columns_of, match, with_columns, without_columns
from fedtailor.data.preprocessing import Preprocessing
from fedtailor.data.table import Purpose, from_frame
from fedtailor.training.inputs import Inputs, as_floats, select


@dataclass(frozen=True)
class RawFormat:
    """The way from raw samples to inputs."""

    table: Preprocessing | None  # how a table's columns become features
    pixels: str
    dtype: torch.dtype
    whole: bool  # the network takes whole numbers
    several: bool  # a sample has several inputs
    regression: bool
    roles: Mapping[str, str | None] = field(default_factory=dict)  # label_column and client_column of a table

    def dataset(self, x: Any) -> Dataset:
        """Make a data set of an array, a tensor or a table, which may have labels."""
        table = self.table
        if table is None:
            array = tuple(x) if self.several else as_array(x, "x")
            return without_labels("x", as_samples(array, "x", double=True))
        if not (is_frame(x) or isinstance(x, Mapping)):
            array = as_array(x, "x")
            if array.dtype.kind != "O" or array.ndim != 2 or array.shape[1] != len(table.columns):
                return _of_array(array, table)
            x = {column.name: array[:, place] for place, column in enumerate(table.columns)}
        columns = {name: column for name, column in self.roles.items() if column in frame_names(x)}
        purpose = Purpose(labelled=False, regression=self.regression, knows=table.kinds())
        return from_frame(x, columns, purpose, "x")  # type: ignore[arg-type]

    def inputs(self, x: Inputs) -> Inputs:
        """Make inputs of raw samples that are no table."""
        x = as_inputs(x, self.pixels, self.dtype)
        return x if self.whole else as_floats(x, self.dtype)

    def select(self, data: Dataset, chosen: Tensor) -> tuple[Inputs, list[str]]:
        """Make inputs of the chosen samples (a boolean for each), and return them with notes for the user."""
        if self.table is not None:
            data = with_columns(data, self.table)
            raw, notes = match(self.table, data.cells[chosen].numpy(), data.columns, data.name)
            return self.inputs(torch.from_numpy(self.table.transform(raw))), list(notes)
        x = (without_columns(data) if data.columns else data).x
        return self.inputs(select(x, chosen.nonzero().flatten())), []


def _of_array(array: Array, table: Preprocessing) -> Dataset:
    if array.dtype.kind not in "biuf":
        raise FedtailorError(f"The features of 'x' are of type {array.dtype}: give numbers, or a table.")
    x = torch.from_numpy(array.astype(np.float64))
    return Dataset("x", x, torch.zeros(x.shape[:1]), (), columns=columns_of(table, x, "x"))
