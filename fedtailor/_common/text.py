"""Numbers, names and tables for people to read, on the command line and in reports.

Names of clients and classes, paths and messages come from files of strangers. So text is shown as it is: nothing in it
is taken for markup, and characters that would steer the terminal are written out.
"""

import json
import math
import re
from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

# Characters that steer a terminal or turn the direction of writing, line separators, and halves of characters.
_STEERING = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT, _IN_LINE = re.compile(f"[{_STEERING}]"), re.compile(f"[\t\n{_STEERING}]")
_FORMULA = "=+-@\t\r＝＋－＠"  # what a spreadsheet takes for a formula, in the first place of a cell


def visible(text: object) -> str:
    """Write a name or a message of anybody's in one line, with control characters as `\\x1b`."""
    return _IN_LINE.sub(_escape, str(text))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


class SafeConsole(Console):
    """A console that shows every text as it is: no markup, no emoji codes, control characters written out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, force_jupyter=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None and _IN_TEXT.search(segment.text):
                segment = Segment(_IN_TEXT.sub(_escape, segment.text), segment.style)
            yield segment


def json_text(value: Any, indent: int | None = 2) -> str:
    """Write JSON for programs, which may also be shown by a terminal."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _IN_TEXT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def spreadsheet_cell(value: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would take for a formula; numbers stay numbers."""
    if not isinstance(value, str) or not value.startswith(tuple(_FORMULA)):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def human_bytes(count: float) -> str:
    """Format a number of bytes: 0 B, 12.3 kB, 4.56 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def human_count(count: float) -> str:
    """Format a large number: 950, 12.3 thousand, 4.5 million."""
    for unit in ("", " thousand", " million"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} billion"


def human_time(seconds: float) -> str:
    """Format a time: 40 s, 5 min, 3.2 h, 2.1 days."""
    for unit, length in (("s", 60), ("min", 60), ("h", 24)):
        if seconds < length * 1.5 or (unit == "h" and seconds < length * 2):
            return f"{seconds:.0f} {unit}" if unit != "h" else f"{seconds:.1f} h"
        seconds /= length
    return f"{seconds:.1f} days"


def percent(value: float | None) -> str:
    """Format a share of 1 in percent; a dash where there is none."""
    return "–" if value is None else f"{100 * value:.2f}"


def decimals(value: float | None) -> str:
    """Format a loss or an AUC; a dash where there is none."""
    return "–" if value is None else f"{value:.4f}"


def plain_table(title: str, **options: Any) -> Table:
    """Make a table as all commands show it: without frames, so that it fits a terminal of 80 columns."""
    table = Table(
        title=Text(visible(title), style="table.title"),
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        **options,
    )
    table.title_justify = table.caption_justify = "left"
    return table


def epsilon_text(epsilon: float | None) -> str:
    """Format a privacy budget that was spent: three digits, rounded up; ∞ without privacy."""
    if epsilon is None:
        return "∞"
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 2) if epsilon > 0 else 1.0
    return f"{math.ceil(epsilon / unit - 1e-9) * unit:.3g}"
