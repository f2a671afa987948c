"""The cells of one column as they are read: numbers for as long as all of them are, different texts otherwise."""

import re
from collections.abc import Callable, Sequence
from math import nan

import numpy as np
from numpy.typing import NDArray

from fedtailor._common.errors import FedtailorError, shown

MISSING = frozenset(("", "na", "n/a", "#n/a", "nan", "null", "none", "?", "-"))  # in lower case
NO_LABELS = MISSING - {"none", "-"}  # these two may be names of classes
LONGEST = 1_000  # characters of a label, of a client's name, of a category
MOST_TEXTS = 10_000  # different texts of a column that may be a category
_WHOLE = re.compile(r"([+-]?\d+)\.0+")  # as pandas writes whole numbers where others are missing

Floats = NDArray[np.float64]
Place = Callable[[int], str]  # from a line to words: "Line 3 of patients.csv"


def number(cell: str, decimal: str = ".") -> float | None:
    """Read a cell: a number, NaN if it is missing, None if it is neither."""
    cell = cell.strip()
    if cell.lower() in MISSING:
        return nan
    if "_" in cell:  # Python would read 1_000
        return None
    if decimal == ",":
        if "." in cell:
            return None
        cell = cell.replace(",", ".")
    try:
        return float(cell)
    except ValueError:
        return None


class Cells:
    """A column's cells.

    `role` is what the column is for, if it is no feature: its texts are then taken as they are, and none may be
    missing, unless it `drops` lines without a label. `kind` is what the user says of a feature. `again` says that texts
    came after numbers: the column must be read once more, from the beginning, with `kind` "text".
    """

    def __init__(
        self,
        name: str,
        place: Place,
        kind: str | None = None,
        role: str = "",
        decimal: str = ".",
        drops: bool = False,
    ) -> None:
        self.name, self.place, self.kind, self.role, self.decimal = name, place, kind, role, decimal
        self.may_miss = drops and role in ("label", "target")
        self.reads_numbers = kind in (None, "number") and (not role or role == "target")
        self.again = self.too_many = False
        self.texts: list[str] = []  # the different ones
        self.lines: list[int] = []  # where each of them is first
        self._codes: dict[str, int] = {}  # of each text, by the cells as they are written too
        self._parts: list[NDArray[np.generic]] = []

    @property
    def numbers(self) -> Floats | None:
        """The numbers, NaN where a cell is missing; None if the column has texts."""
        return np.concatenate(self._parts) if self.reads_numbers and self._parts else None

    @property
    def codes(self) -> NDArray[np.int64]:
        """Each cell's place in `texts`; -1 where it is missing."""
        return np.concatenate([np.empty(0, np.int64), *self._parts]).astype(np.int64)

    @property
    def present(self) -> NDArray[np.bool_]:
        """Which cells are not missing."""
        return self.codes >= 0 if self.numbers is None else ~np.isnan(self.numbers)

    def keep(self, rows: NDArray[np.bool_]) -> None:
        """Keep these cells alone, and the texts that they have."""
        if not self._parts:
            return
        kept = np.concatenate(self._parts)[rows]
        if not self.reads_numbers:
            used = np.unique(kept[kept >= 0]).astype(np.int64)
            number = np.full(len(self.texts) + 1, -1, dtype=np.int32)  # the last entry serves -1: missing
            number[used] = np.arange(len(used))
            kept = number[kept.astype(np.int64)]
            self.texts, self.lines = ([kind[code] for code in used] for kind in (self.texts, self.lines))
        self._parts = [kept]

    def add(self, cells: Sequence[str], lines: Sequence[int]) -> None:
        """Take the next cells, of these lines."""
        if self.again or self.too_many:
            return
        if self.reads_numbers:
            found = self._as_numbers(cells, lines)
            if found is not None:
                self._parts.append(found)
                return
            self.again = bool(self._parts)
            self.reads_numbers = False
        if not self.again:
            codes = self._codes
            new = [codes[cell] if cell in codes else self._new(cell, at) for cell, at in zip(cells, lines, strict=True)]
            self._parts.append(np.array(new, dtype=np.int32))

    def add_numbers(self, numbers: Floats) -> None:
        """Take numbers that are numbers already."""
        if self.reads_numbers:
            self._check_present(numbers, ["NaN"] * len(numbers), range(len(numbers)))
            self._parts.append(numbers)
        else:
            texts = {value: _written(value) for value in np.unique(numbers[~np.isnan(numbers)]).tolist()}
            self.add([texts.get(value, "") for value in numbers.tolist()], range(len(numbers)))

    def _as_numbers(self, cells: Sequence[str], lines: Sequence[int]) -> Floats | None:
        try:
            if self.decimal == "," or "_" in "".join(cells):
                raise ValueError
            numbers = np.fromiter(map(float, cells), np.float64, len(cells))
        except ValueError:  # or some are missing
            found = [number(cell, self.decimal) for cell in cells]
            if None in found:
                if self.kind == "number" or self.role:
                    odd = found.index(None)
                    raise self._refused(lines[odd], cells[odd], "give a number, or nothing if it is missing") from None
                return None
            numbers = np.array(found, dtype=np.float64)
        self._check_present(numbers, cells, lines)
        return numbers

    def _check_present(self, numbers: Floats, cells: Sequence[str], lines: Sequence[int]) -> None:
        if self.role and not self.may_miss and np.isnan(numbers).any():
            first = int(np.isnan(numbers).argmax())
            raise self._refused(lines[first], cells[first], "give a number, or say --drop-unlabelled")

    def _new(self, cell: str, line: int) -> int:
        """Number a text that was not seen before."""
        text = cell.strip()
        if self.may_miss and text.lower() in NO_LABELS:
            return self._codes.setdefault(cell, -1)
        if self.role:
            self._check_name(text, line)
        elif text.lower() in MISSING:
            return self._codes.setdefault(cell, -1)
        elif "\0" in text:
            raise self._refused(line, text, "give texts without control characters")
        elif len(text) > LONGEST or len(self.texts) >= MOST_TEXTS:
            if self.kind == "category":
                limits = f"at most {MOST_TEXTS:,} different texts of at most {LONGEST} characters"
                raise self._refused(line, text, f"a category has {limits}")
            self.too_many = True
            return -1
        elif whole := _WHOLE.fullmatch(text):
            text = whole[1]
        if text not in self._codes:
            self._codes[text] = len(self.texts)
            self.texts.append(text)
            self.lines.append(line)
        return self._codes.setdefault(cell, self._codes[text])

    def _check_name(self, name: str, line: int) -> None:
        if self.role == "label" and name.lower() in NO_LABELS:
            raise self._refused(line, name, "fill it in, or say --drop-unlabelled")
        if not name:
            raise self._refused(line, name, "fill it in")
        if "\0" in name or len(name) > LONGEST:
            raise self._refused(line, name, f"give a name of at most {LONGEST} characters")

    def _refused(self, line: int, cell: str, remedy: str) -> FedtailorError:
        what = shown(cell) if cell.strip() else "nothing"
        return FedtailorError(f"{self.place(line)} has {what} in column {shown(self.name)}: {remedy}.")


def _written(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
