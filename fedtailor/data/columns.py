"""The columns of a table: numbers, categories, or ignored. As the user says, or as their cells suggest."""

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedtailor._common.errors import FedtailorError, listed, nearest, shown, unknown
from fedtailor.data.cells import Cells, number

Kind = Literal["number", "category"]
KINDS = ("number", "category", "ignore")
FEW = 20  # different texts that are categories in any case
MANY = 100  # different texts that are not, unless the user says so
MOSTLY = 0.8  # share of numbers among the cells of a column in which another text is a mistake
LIKE = 0.7  # likeness from which on a column may be meant by another name
DIFFERENT = 0.9  # share of different texts that makes a column an id
_ID = re.compile(r"|(.*[\W_])?(id|ID|Id|uuid|UUID|guid|GUID)|\w*[a-z]I[dD]|[Ii]ndex|Unnamed: 0|mrn|MRN|ssn|SSN")
_CLOCK = r"([T ]\d{1,2}:\d\d(:\d\d(\.\d+)?)?( ?[Zz]|[+-]\d\d:?\d\d)?)?"
_DATE = re.compile(rf"(\d{{4}}-\d\d?-\d\d?|\d{{4}}/\d\d?/\d\d?|\d\d?\.\d\d?\.\d{{4}}|\d\d?/\d\d?/\d{{4}}){_CLOCK}")


@dataclass(frozen=True)
class Column:
    """A feature of a table. In the samples a category is its place in `values`, and NaN stands for a missing cell."""

    name: str
    kind: Kind
    values: tuple[str, ...] = ()  # of a category, sorted


def parse_columns(text: str) -> dict[str, str]:
    """Read `age=number, ward=category, id=ignore`. A name with a comma stands in quotes: `"a, b=ignore"`."""
    said: dict[str, str] = {}
    for part in next(csv.reader([text], skipinitialspace=True), []):
        name, _, kind = (piece.strip() for piece in part.rpartition("="))
        if not name or not kind:
            raise FedtailorError(f"The columns say {shown(part)}: write name=number, name=category or name=ignore.")
        if kind not in KINDS:
            raise unknown("kind of column", kind, KINDS)
        if said.setdefault(name, kind) != kind:
            raise FedtailorError(f"The columns say two things of {shown(name)}: {said[name]} and {kind}.")
    return said


def check_named(said: Iterable[str], header: list[str], where: str) -> None:
    """Refuse kinds for columns that are not there."""
    for name in said:
        if name not in header:
            near = nearest(name, header, LIKE)
            hint = f"its columns are {listed(header)}." if near is None else f"did you mean {shown(near)}?"
            raise FedtailorError(f"{where} has no column {shown(name)}: {hint}")


def decide(name: str, cells: Cells, said: str | None) -> tuple[Column | None, str]:
    """Choose what a column is, unless the user said it; None if it is ignored. Say why, where the user should know."""
    if said == "number" or (said is None and cells.numbers is not None):
        if cells.numbers is None:
            raise FedtailorError(
                f"{cells.place(cells.lines[0])} has {shown(cells.texts[0])} in column {shown(name)}: give a number."
            )
        return (Column(name, "number"), "") if said else _of_numbers(name, cells.numbers)
    if said == "category":
        if cells.too_many:
            raise FedtailorError(f"The column {shown(name)} has too many different texts for a category: ignore it.")
        return Column(name, "category", tuple(sorted(cells.texts))), ""
    return _of_texts(name, cells)


def _of_numbers(name: str, numbers: NDArray[np.float64]) -> tuple[Column | None, str]:
    present = numbers[~np.isnan(numbers)]
    if not len(present):
        return None, "it is empty"
    whole = bool((present == np.floor(present)).all())
    if whole and _ID.fullmatch(name):
        different = len(np.unique(present))
        if different > FEW or different == len(present) > 1:
            return None, "it looks like an id"
    if whole and len(present) == len(numbers) > FEW and (np.diff(numbers) == 1).all():
        return Column(name, "number"), "it counts the lines (if that says nothing, ignore it)"
    return Column(name, "number"), ""


def _of_texts(name: str, cells: Cells) -> tuple[Column | None, str]:
    texts = cells.texts
    if not texts:
        return None, "it is empty"
    if not cells.too_many and all(map(_DATE.fullmatch, texts)):
        return None, "it holds dates (make numbers of them, such as an age, to use it)"
    if len(texts) <= FEW and not cells.too_many:
        return Column(name, "category", tuple(sorted(texts))), ""
    times = np.bincount(cells.codes[cells.codes >= 0], minlength=len(texts))
    present = int(times.sum())
    numeric = np.array([number(text, cells.decimal) is not None for text in texts])
    if times[numeric].sum() >= MOSTLY * present:
        odd = int(np.flatnonzero(~numeric)[0]) if not numeric.all() else 0
        raise FedtailorError(
            f"{cells.place(cells.lines[odd])} has {shown(texts[odd])} in column {shown(name)}, where most cells are "
            f"numbers: mend it, or leave the column out with --columns {_quoted(name)}=ignore."
        )
    if len(texts) >= DIFFERENT * present or _ID.fullmatch(name):
        return None, "it looks like an id or free text (nearly all cells differ)"
    if len(texts) > MANY or cells.too_many:
        return None, f"it has {len(texts):,} different texts (--columns {_quoted(name)}=category would take them)"
    return Column(name, "category", tuple(sorted(texts))), ""


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[\w.-]+", name) else f"'{name}'"
