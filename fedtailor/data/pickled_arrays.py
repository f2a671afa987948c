"""Pickles of arrays, read with stand-ins for NumPy's classes and nothing else, so that reading one cannot run code."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor._common.errors import FedtailorError

Raw = bytes | bytearray | memoryview
NUMBERS = ("u1", "i4", "i8", "f4", "f8")


class PickledArray:
    """A stand-in for numpy.ndarray while unpickling: takes the bytes, runs nothing."""

    def __init__(self, *arguments: object) -> None:
        self.array: NDArray[Any] = np.empty(0, dtype=np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], "_Type", bool, Any]) -> None:
        _, shape, kind, column_first, raw = state
        if kind.code == "O8":  # of Python's objects, which are stand-ins and plain values here
            self.array = np.empty(len(raw), dtype=object)
            self.array[:] = raw
        elif kind.code in NUMBERS:
            self.array = np.frombuffer(raw, kind.code).reshape(shape, order="F" if column_first else "C")
        else:
            raise ValueError("arrays are of numbers")


class _Type:
    """A stand-in for numpy.dtype."""

    def __init__(self, code: bytes | str, *flags: object) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in (">", b">"):
            raise ValueError("numbers are little-endian")


def _latin_1(text: str, encoding: str) -> bytes:
    """Stand in for the function by which Python 3 writes bytes for Python 2."""
    if encoding != "latin1":
        raise ValueError("encoding")
    return text.encode("latin-1")


class _Unpickler(pickle._Unpickler):  # the one in C would reserve 64 GB for a wrong number in a damaged file
    STAND_INS = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): PickledArray,
        ("numpy", "ndarray"): PickledArray,
        ("numpy", "dtype"): _Type,
        ("_codecs", "encode"): _latin_1,
    }

    def __init__(self, file: Path, raw: Raw, encoding: str, what: str) -> None:
        super().__init__(io.BytesIO(raw), encoding=encoding)
        self.file, self.what = file, what

    def find_class(self, module: str, name: str) -> Any:
        stand_in = self.STAND_INS.get((module, name))
        if stand_in is None:
            raise FedtailorError(
                f"The file {self.file} is not {self.what}: it asks for {module}.{name}, which fedtailor "
                "refuses to run; get the published file."
            )
        return stand_in


def unpickle(file: Path, raw: Raw, what: str, encoding: str = "bytes") -> Any:
    """Read a pickle of plain values and arrays, which come as `PickledArray`. A broken one can raise anything."""
    return _Unpickler(file, raw, encoding, what).load()
