"""CSV files as people have them: separator, decimal comma and encoding are found out, unless the user says them.

pandas.read_csv is faster: 0.9 s for a file of 48 MB (90,000 rows, 66 columns), which takes 9 to 12 s here up to the
data set; both take about 150 MB more. But it is an extra, and of nine odd files it reads two as they are meant, or
three with sep=None; here seven are read so and two refused. It finds no decimal comma, refuses UTF-16 and
Windows-1252, fills up a line that is too short with NaN, and renames a column that is there twice.
"""

import codecs
import csv
import gzip
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

from fedtailor._common.errors import FedtailorError, shown
from fedtailor.data.cells import Cells, number
from fedtailor.data.foreign_files import PIECE, check_size, reading

SEPARATORS = (",", ";", "\t", "|")
SAMPLE = 50  # lines by which the separator is found
CELLS = 200_000  # are read before they are looked at, column by column
_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


@dataclass(frozen=True)
class CsvFile:
    """A CSV file, perhaps packed by gzip, and how to read it."""

    path: Path
    encoding: str
    separator: str = ","
    decimal: str = "."
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, path: Path, separator: str | None = None, decimal: str | None = None, encoding: str | None = None
    ) -> "CsvFile":
        """Find out what the user does not say."""
        found = _encoding_named(encoding) if encoding else _encoding(path)
        guessed = not encoding and not found.startswith("utf")
        file = cls(path, found, notes=(f"{path.name} is not UTF-8: it is read as {found}.",) if guessed else ())
        mark = {"tab": "\t", "\\t": "\t", None: ""}.get(separator, separator) or file._separator()
        if len(mark) != 1 or mark in '"\r\n':
            raise FedtailorError(f"The separator is {shown(separator)}: give one character, or tab.")
        if decimal not in (None, ".", ",") or decimal == mark:
            raise FedtailorError(
                f"The decimal mark is {shown(decimal)}: give a point, or a comma if it separates no cells."
            )
        file = replace(file, separator=mark)
        return replace(file, decimal=decimal or file._decimal())

    @contextmanager
    def text(self) -> Iterator[IO[str]]:
        """Open the file as text, and refuse what is none."""
        with reading(self.path):
            try:
                with _opened(self.path) as raw, io.TextIOWrapper(raw, self.encoding, newline="") as text:
                    yield text
            except (UnicodeError, csv.Error) as error:
                encoding = self.encoding.upper().removesuffix("-SIG")
                raise FedtailorError(
                    f"The file {self.path} is not a CSV text in {encoding} ({error}): save it as one in UTF-8, or say "
                    "--encoding."
                ) from None

    def header(self) -> list[str]:
        """Read the names of the columns."""
        with self.text() as text:
            header = [cell.strip() for cell in next(self._reader(text), [])]
        if not any(header) or all(number(cell, self.decimal) is not None for cell in header):
            raise FedtailorError(f"The file {self.path} has no header: its first line must name the columns.")
        if any("\0" in name for name in header):
            raise FedtailorError(
                f"The file {self.path} is no text in {self.encoding}: say --encoding, such as utf-16-le."
            )
        if len(set(header)) < len(header):
            twice = next(name for name, times in Counter(header).items() if times > 1)
            raise FedtailorError(f"The file {self.path} names a column twice, {shown(twice)}: name each differently.")
        return header

    def cells(
        self, header: list[str], kinds: Mapping[str, tuple[str | None, str]], drops: bool = False
    ) -> dict[str, Cells]:
        """Read these columns: what the user says of each, and its role. Texts may come after many numbers: then the
        file is read a second time. `drops` says that lines without a label will be left out."""
        found = self._read(header, kinds, drops)
        again: dict[str, tuple[str | None, str]] = {name: ("text", "") for name, cells in found.items() if cells.again}
        return found | self._read(header, again, drops) if again else found

    def _read(self, header: list[str], kinds: Mapping[str, tuple[str | None, str]], drops: bool) -> dict[str, Cells]:
        found = {name: Cells(name, self._place, *kinds[name], self.decimal, drops) for name in kinds}
        places = [(place, found[name]) for place, name in enumerate(header) if name in found]
        count = 0
        of_file = self.rows(header)
        while rows := list(islice(of_file, max(1, CELLS // len(header)))):
            lines = [line for line, _ in rows]
            columns = list(zip(*(cells for _, cells in rows), strict=True))
            for place, cells in places:
                cells.add(columns[place], lines)
            count += len(rows)
            check_size(self.path, 8 * count * len(found))
        if not count:
            raise FedtailorError(
                f"The file {self.path} has a header but no samples: it needs at least one line below it."
            )
        return found

    def rows(self, header: list[str]) -> Iterator[tuple[int, list[str]]]:
        """Yield the lines below the header that are not empty, with their numbers."""
        with self.text() as text:
            reader = self._reader(text)
            next(reader)
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    many = f"{len(cells)} cell{'' if len(cells) == 1 else 's'}, but the header {len(header)}"
                    raise FedtailorError(f"Line {reader.line_num} of {self.path} has {many}: mend that line.")
                yield reader.line_num, cells

    def _reader(self, text: IO[str]) -> Any:
        return csv.reader(text, delimiter=self.separator)

    def _place(self, line: int) -> str:
        return f"Line {line} of {self.path}"

    def _separator(self) -> str:
        """Find the separator that cuts most of the first lines into as many cells as the header, two or more."""
        with self.text() as text:
            lines = [text.readline(PIECE) for _ in range(SAMPLE)]
        best, score = ",", (0, 0)
        for mark in SEPARATORS:
            try:
                widths = [len(cells) for cells in csv.reader(lines, delimiter=mark) if cells]
            except csv.Error:
                continue
            if widths and widths[0] > 1 and (widths.count(widths[0]), widths[0]) > score:
                best, score = mark, (widths.count(widths[0]), widths[0])
        return best

    def _decimal(self) -> str:
        """Find out whether more numbers have a decimal comma than a decimal point."""
        if self.separator == ",":
            return "."
        mark = re.escape(self.separator)
        kinds = [re.compile(rf'(?<![^{mark}\n"])[+-]?\d*{point}\d+(?![^{mark}\r\n"])') for point in (",", r"\.")]
        times = [0, 0]
        with self.text() as text:
            while piece := text.read(PIECE):
                times = [before + len(kind.findall(piece)) for before, kind in zip(times, kinds, strict=True)]
        return "," if times[0] > times[1] else "."


def _opened(path: Path) -> Any:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")


def _encoding_named(name: str) -> str:
    try:
        known = codecs.lookup(name).name
        "".encode(known)
    except (LookupError, ValueError):
        raise FedtailorError(f"There is no encoding {shown(name)}: write for example utf-8 or windows-1252.") from None
    return "utf-8-sig" if known == "utf-8" else known


def _encoding(path: Path) -> str:
    """Find a file's encoding: by its first bytes, or else the first of three in which all of it is text."""
    with reading(path):
        possible = {name: codecs.getincrementaldecoder(name)() for name in ("utf-8", "cp1252")}
        with _opened(path) as raw:
            size, first = 0, True
            while piece := raw.read(PIECE):
                size += len(piece)
                if path.suffix.lower() == ".gz":  # it may unpack to any length
                    check_size(path, size)
                if first and (mark := next((name for bom, name in _BOMS.items() if piece.startswith(bom)), None)):
                    return mark
                first = False
                for name, decoder in list(possible.items()):
                    try:
                        decoder.decode(piece)
                    except UnicodeDecodeError:
                        del possible[name]
        return next(iter(possible), "latin-1")
