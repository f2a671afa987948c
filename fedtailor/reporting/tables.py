"""The table that papers print, as text, Markdown and CSV; `latex` has it for LaTeX."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fedtailor._common.files import make_directory, write_atomically
from fedtailor._common.text import plain_table, spreadsheet_cell, visible
from fedtailor.reporting.client_tables import as_text, clients_csv, needed_width
from fedtailor.reporting.column_names import METRIC
from fedtailor.reporting.latex import latex
from fedtailor.reporting.table_columns import Column, columns, shown_in
from fedtailor.server.records import Plain
from fedtailor.server.run_directory import plain
from fedtailor.studies.captions import sentences
from fedtailor.studies.client_results import client_table
from fedtailor.studies.conditions import Conditions, conditions
from fedtailor.studies.summary import Line, Summary, check_comparable, summarize

__all__ = ["FORMATS", "Line", "Summary", "check_comparable", "latex", "rich_table", "summarize", "write_tables"]

PAGE = 180  # columns of the table in a file


def rich_table(summary: Summary, width: int, chosen: Sequence[str] | None = None) -> Group:
    """The table for a terminal; in two parts where the page is too narrow for one."""
    every = columns(summary, chosen)
    whole = _rich(summary, every, summary.title)
    result, cost = ([column for column in every if column.cost == of] for of in (False, True))
    parts = [whole]
    if needed_width(whole) > width and result and cost:
        parts = [_rich(summary, result, summary.title), _rich(summary, cost, "Costs")]
    under = [part for table in conditions(summary) for part in ("", _rich_conditions(table))]
    return Group(*parts, Text(caption(summary, chosen), style="dim"), *under)


def _rich_conditions(table: Conditions) -> Table:
    """A table over attacks or privacy budgets."""
    made = plain_table(table.title, caption=Text(visible(table.caption)))
    made.add_column("method", style="bold", no_wrap=True)
    for name in table.columns:
        made.add_column(Text(visible(name)), justify="right")
    for row in table.rows:
        made.add_row(Text(visible(row)), *(table.text(row, place) for place in range(len(table.columns))))
    return made


def caption(summary: Summary, chosen: Sequence[str] | None = None) -> str:
    """The text below a table: about the runs, and about these columns."""
    return " ".join(sentences(summary, shown_in(columns(summary, chosen))))


def _rich(summary: Summary, shown: list[Column], title: str) -> Table:
    table = plain_table(title)
    table.add_column("method", style="bold", no_wrap=True)
    for column in shown:
        table.add_column("\n".join(column.heading), justify="right", no_wrap=True)
    for line in summary.lines:
        mark = "bold green" if line.best else "underline" if line.second else ""
        cells = [Text(column.cell(line), style=mark if column.name == METRIC else "") for column in shown]
        table.add_row(Text(visible(line.label)), *cells)
    return table


def plain_text(summary: Summary, chosen: Sequence[str] | None = None) -> str:
    """The table without colours, for a file."""
    return as_text(rich_table(summary, PAGE, chosen), PAGE)


def table_rows(
    summary: Summary, bold: str, underlined: str, escape: Callable[[str], str], chosen: Sequence[str] | None = None
) -> Iterable[list[str]]:
    """Yield the header and the lines as escaped text, the best and the second marked."""
    shown = columns(summary, chosen)
    yield [escape(name) for name in ("method", *(column.header for column in shown))]
    for line in summary.lines:
        mark = bold if line.best else underlined if line.second else "{}"
        cells = [(mark if column.name == METRIC else "{}").format(escape(column.cell(line))) for column in shown]
        yield [escape(line.label), *cells]


def _for_markdown(text: str) -> str:
    """Escape what would be a mark, a link, HTML, or the end of a cell."""
    special = r"[\\`*\[\]|~$]|<(?=[A-Za-z/!?])|&(?=#?\w+;)|(?<!\w)_|_(?!\w)"
    return re.sub(special, lambda found: "\\" + found[0], visible(text))


def markdown(summary: Summary, chosen: Sequence[str] | None = None) -> str:
    head, *rows = table_rows(summary, "**{}**", "<u>{}</u>", _for_markdown, chosen)
    ruler = "| --- |" + " ---: |" * (len(head) - 1)
    table = ["| " + " | ".join(head) + " |", ruler, *("| " + " | ".join(row) + " |" for row in rows)]
    title = re.sub(r"^[#>+=-]", r"\\\g<0>", _for_markdown(summary.title))
    under = [line for each in conditions(summary) for line in _markdown_conditions(each)]
    return "\n".join([title, "", *table, "", _for_markdown(caption(summary, chosen)), *under]) + "\n"


def _markdown_conditions(table: Conditions) -> Iterable[str]:
    cells = [["method", *table.columns]]
    cells += [[row, *(table.text(row, place) for place in range(len(table.columns)))] for row in table.rows]
    head, *rows = ("| " + " | ".join(map(_for_markdown, row)) + " |" for row in cells)
    yield from ("", _for_markdown(table.title), "", head, "| --- |" + " ---: |" * len(table.columns), *rows, "")
    yield _for_markdown(table.caption)


def comma_separated(summary: Summary) -> str:
    """Raw numbers: accuracies are shares of 1, missing values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    records = [line.plain() for line in summary.lines]
    writer.writerow([*records[0], "target"])
    for record in records:
        record |= {"settings": json.dumps(record["settings"]), "seeds": " ".join(map(str, record["seeds"]))}
        writer.writerow(map(spreadsheet_cell, [*record.values(), summary.target]))
    return text.getvalue()


FORMATS = {"txt": plain_text, "md": markdown, "tex": latex}


def write_readable(summary: Summary, directory: Path, chosen: Sequence[str] | None = None) -> list[Path]:
    """Write DIR/table.txt, .md and .tex, with all columns or the chosen ones."""
    make_directory(directory)
    paths = {directory / f"table.{ending}": make for ending, make in FORMATS.items()}
    for path, make in paths.items():
        write_atomically(path, make(summary, chosen))
    return list(paths)


def write_tables(summary: Summary, directory: Path, more: Plain | None = None) -> list[Path]:
    """Write the tables for readers, and everything as table.csv, clients.csv and result.json."""
    paths, clients = write_readable(summary, directory), client_table(summary)
    write_atomically(directory / "table.csv", comma_separated(summary))
    write_atomically(directory / "clients.csv", clients_csv(clients))
    record = plain({**summary.plain(), "clients": clients.plain(), **(more or {})})
    write_atomically(directory / "result.json", json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return [*paths, *(directory / name for name in ("table.csv", "clients.csv", "result.json"))]
