"""Numbers and tables for people to read, on the command line and in reports."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


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
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), **options)
    table.title_justify = table.caption_justify = "left"
    return table
