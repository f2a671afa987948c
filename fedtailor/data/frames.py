"""Tables in memory: those of pandas or a library like it, dictionaries of columns, and Parquet files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor._common.errors import FedtailorError, brief
from fedtailor._common.extras import install_command
from fedtailor.data.arrays import is_frame
from fedtailor.data.cells import Cells
from fedtailor.data.foreign_files import check_size, reading


def is_frames(data: Any) -> bool:
    """Recognise a table of pandas or a library like it, or a list or dictionary of such tables."""
    data = list(data.values()) if isinstance(data, Mapping) else data
    several = isinstance(data, Sequence) and not isinstance(data, str) and len(data) > 0 and all(map(is_frame, data))
    return is_frame(data) or several


def frame_names(data: Any) -> list[str]:
    """List the columns of a pandas table, of a dictionary, or of the first of several tables."""
    data = list(data.values()) if is_frames(data) and isinstance(data, Mapping) else data
    first = data[0] if isinstance(data, Sequence) else data
    return [str(name) for name in (first if isinstance(first, Mapping) else first.columns)]


def frame_columns(frame: Any) -> dict[str, NDArray[Any]]:
    """Take a pandas table, or a dictionary, apart into its columns."""
    names = list(frame) if isinstance(frame, Mapping) else list(frame.columns)
    if len(set(map(str, names))) < len(names):
        raise FedtailorError("The table names a column twice: name each differently.")
    try:
        arrays = {str(name): frame[name] for name in names}
        return {n: np.asarray(a.to_numpy() if hasattr(a, "to_numpy") else a) for n, a in arrays.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise FedtailorError(f"The table cannot be read ({brief(error)}).") from None


def add_array(cells: Cells, array: NDArray[Any]) -> None:
    """Read a column of a pandas table: numbers as they are, all else by the text that stands for it."""
    if array.dtype.kind in "iuf":
        cells.add_numbers(array.astype(np.float64))
        return
    if array.dtype.kind == "M":
        array = np.datetime_as_string(array, unit="s")
    cells.add([_text(value) for value in array.tolist()], range(len(array)))


def _text(value: Any) -> str:
    """Write a cell of a pandas table as a CSV file has it. What is missing there is not equal to itself, or is called
    NA or NaT."""
    if value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value):
        return ""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def parquet_names(path: Path) -> list[str]:
    """Read the names of a Parquet file's columns alone."""
    with reading(path):
        return [str(name) for name in _pyarrow().ParquetFile(path).schema_arrow.names]


def read_parquet(path: Path) -> dict[str, NDArray[Any]]:
    """Read a Parquet file, if it has no more cells than there is memory for."""
    parquet = _pyarrow()
    with reading(path):
        file = parquet.ParquetFile(path)
        about = file.metadata
        unpacked = sum(about.row_group(group).total_byte_size for group in range(about.num_row_groups))
        check_size(path, max(unpacked, 8 * about.num_rows * about.num_columns))
        table = file.read()
        names = [str(name) for name in table.column_names]
        if len(set(names)) < len(names):
            raise FedtailorError(f"The file {path} names a column twice: name each differently.")
        return {name: np.asarray(table.column(k).to_numpy()) for k, name in enumerate(names)}


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise FedtailorError(f"Parquet files need pyarrow: save as CSV, or {install_command('parquet')}.") from None
    return pyarrow.parquet
