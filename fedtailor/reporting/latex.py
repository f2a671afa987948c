"""The table for LaTeX: it fits the text width of the class article, in several tables where it is too wide for one.

LaTeX sets a table that is too wide all the same, beyond the page. So its width is computed here, from the widths of the
letters of Computer Modern, which are wider than those of most journals' fonts.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from fedtailor._common.text import visible
from fedtailor.data.own_data import data_in_words
from fedtailor.reporting.column_names import METRIC
from fedtailor.reporting.table_columns import Column, columns, shown_in
from fedtailor.studies.captions import about_columns, sentences
from fedtailor.studies.summary import Summary

TEXT_WIDTH = 345.0  # points: article at 10 pt, on A4 and letter paper
GAP = 8.0  # between two columns, and half of it at both ends
WIDEST_TITLE = TEXT_WIDTH / 2  # of a line: a longer one is continued in the next row
WIDEST_HEADER = 70.0
BOLD = 1.17  # as wide as the same text in medium weight, at most
# Widths in points at 9 pt (\small), rounded up. What is not here is no wider than OTHER.
_WIDTHS = {
    letter: width
    for letters, width in (
        (" !',.:;[]_`il|–", 3.1), ("fj-", 3.2), ("I()rst", 3.7), ("cezεδ", 4.2), ("?\"$*/0123456789^ago{}~\\", 4.7),
        ("Jkqvxy", 5.0), ("Sbdhnpu", 5.2), ("ZL", 5.9), ("FEP", 6.4), ("BCTwRAHNUVXY", 7.0), ("D&+=@KOQG<>±≈×≥−", 7.4),
        ("#%m✓", 7.8), ("M", 8.6), ("W∞", 9.6),
    )
    for letter in letters
}  # fmt: skip
OTHER = 9.6
BREAK = r"\\"
_SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
        "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "±": r"$\pm$", "≈": r"$\approx$",
        "×": r"$\times$", "≥": r"$\geq$", "−": "$-$", "–": "--", "✓": r"$\surd$", "|": r"\textbar{}",
        "ε": r"$\varepsilon$", "δ": r"$\delta$", "∞": r"$\infty$",
    }
)  # fmt: skip
_LETTERS = "ßøØæÆœŒåÅłŁ…—‘’“”"  # that every LaTeX has
_ACCENTS = "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030b\u030c\u0327"


def latex(summary: Summary, chosen: Sequence[str] | None = None) -> str:
    """One or more table environments; they need `\\usepackage{booktabs}`."""
    parts = list(_parts(summary, columns(summary, chosen)))
    data = data_in_words(summary.lines[0].results[0].experiment.data).removeprefix("your ")
    stem = re.sub(r"[^a-z0-9]+", "-", data.lower()).strip("-") or "table"
    labels = [f"tab:{stem}", *(f"tab:{stem}-{number}" for number in range(2, len(parts) + 1))]
    tables = []
    for part, label in zip(parts, labels, strict=True):
        if label == labels[0]:
            caption = for_latex(" ".join([f"{summary.title}.", *sentences(summary, shown_in(part))]))
        else:
            what = "Costs of" if all(column.cost for column in part) else "More about"
            caption = rf"{what} the methods in Table~\ref{{{labels[0]}}}. "
            caption += for_latex(" ".join(about_columns(summary, shown_in(part))))
        tables.append("\n".join(_table(summary, part, caption, label)))
    return "% \\usepackage{booktabs}\n" + "\n\n".join(tables) + "\n"


def _parts(summary: Summary, all_columns: list[Column]) -> Iterator[list[Column]]:
    """Divide the columns among as many tables as they need: into results and costs, and further where these are too
    wide."""
    room = TEXT_WIDTH - min(max(width(line.label) for line in summary.lines), WIDEST_TITLE) - GAP
    widths = {column.name: _width(summary, column) + GAP for column in all_columns}
    if sum(widths.values()) <= room:
        yield all_columns
        return
    for cost in (False, True):
        left = [column for column in all_columns if column.cost == cost]
        while left:
            count = max(1, sum(sum(widths[c.name] for c in left[: n + 1]) <= room for n in range(len(left))))
            yield left[:count]
            left = left[count:]


def _width(summary: Summary, column: Column) -> float:
    """The width of a column's cells and of its header."""
    cells = [width(column.cell(line)) * (BOLD if column.name == METRIC else 1) for line in summary.lines]
    return max(*cells, *map(width, _heading(column)))


def _heading(column: Column) -> list[str]:
    """A header in two lines, or in more if these are long: they may name settings of a line."""
    lines = column.heading
    return lines if max(map(width, lines)) <= WIDEST_HEADER else wrapped(column.header, WIDEST_HEADER)


def _table(summary: Summary, part: list[Column], caption: str, label: str) -> Iterator[str]:
    yield from (r"\begin{table}", r"\centering", r"\emergencystretch=3em", rf"\caption{{{caption}}}")
    yield from (rf"\label{{{label}}}", r"\medskip", r"\small", rf"\setlength{{\tabcolsep}}{{{GAP / 2:g}pt}}")
    yield from (rf"\begin{{tabular}}{{l{'r' * len(part)}}}", r"\toprule")
    heads = [_stacked(list(map(for_latex, _heading(column)))) for column in part]
    yield " & ".join(["method", *heads]) + f" {BREAK}"
    yield r"\midrule"
    for line in summary.lines:
        title, *more = wrapped(line.label, WIDEST_TITLE)
        mark = r"\textbf{{{}}}" if line.best else r"\underline{{{}}}" if line.second else "{}"
        cells = [(mark if column.name == METRIC else "{}").format(for_latex(column.cell(line))) for column in part]
        yield " & ".join([for_latex(title), *cells]) + f" {BREAK}"
        for rest in more:
            yield rf"\quad {for_latex(rest)}" + " &" * len(part) + f" {BREAK}"
    yield from (r"\bottomrule", r"\end{tabular}", r"\end{table}")


def _stacked(lines: list[str]) -> str:
    return lines[0] if len(lines) == 1 else rf"\begin{{tabular}}[b]{{@{{}}r@{{}}}}{BREAK.join(lines)}\end{{tabular}}"


def wrapped(text: str, most: float) -> list[str]:
    """Break a text into lines that are no wider than this, between words or, where one is too long, within it."""
    lines = [""]
    for word in text.split():
        if width(f"{lines[-1]} {word}") <= most or not lines[-1]:
            lines[-1] = f"{lines[-1]} {word}".strip()
        else:
            lines.append(word)
        while width(lines[-1]) > most and len(lines[-1]) > 1:
            fits = max(1, sum(width(lines[-1][: n + 1]) <= most for n in range(len(lines[-1]))))
            lines[-1:] = [lines[-1][:fits], lines[-1][fits:]]
    return lines


def width(text: str) -> float:
    """The width of a text in points, as it is written by `for_latex`."""
    return sum(_WIDTHS.get(letter, OTHER) for character in visible(text) for letter in _written(character))


def _written(character: str) -> str:
    return character if _is_known(character) else f"U+{ord(character):04X}"


def _is_known(character: str) -> bool:
    if character.isascii() or ord(character) in _SPECIAL or character in _LETTERS:
        return True
    parts = unicodedata.normalize("NFD", character)
    return character < "\u0180" and len(parts) == 2 and parts[0].isascii() and parts[1] in _ACCENTS


def for_latex(text: str) -> str:
    """Escape what LaTeX would run, and write characters that it may not have as their number (U+4E2D)."""
    return "".join(_escaped(visible(text)))


def _escaped(text: str) -> Iterable[str]:
    return (_written(character).translate(_SPECIAL) for character in text)
