"""The table that papers print, as text, Markdown, LaTeX (booktabs) and CSV."""

import csv
import io
import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fedtailor.files import write_atomically
from fedtailor.metric import LOSS, Metric
from fedtailor.reporting.clients import clients_csv
from fedtailor.server.record import plain
from fedtailor.server.records import Plain
from fedtailor.studies.captions import target_text
from fedtailor.studies.clients import client_table
from fedtailor.studies.comparable import check_comparable
from fedtailor.studies.conditions import Conditions, conditions
from fedtailor.studies.summary import Line, Summary, summarize
from fedtailor.text import SafeConsole, epsilon_text, human_bytes, plain_table, spreadsheet_cell, visible

__all__ = ["FORMATS", "Line", "Summary", "check_comparable", "rich_table", "summarize", "write_tables"]

PAGE = 180  # columns of the table in a file
Cell = Callable[[Line], str]


def _columns(summary: Summary) -> tuple[list[tuple[str, Cell]], list[tuple[str, Cell]]]:
    """The columns of results and those of costs, as header and cells, without columns that no line has."""
    lines, metric = summary.lines, summary.metric
    result: list[tuple[str, Cell]] = [
        (metric.title, lambda line: _of(line, _spread(metric, line.value, line.value_std)))
    ]
    if all(line.value is None for line in lines):
        result = [("loss", lambda line: _of(line, LOSS.text(line.loss)))]
    if any(line.epsilon is not None for line in lines):
        result.append(("ε", lambda line: epsilon_text(line.epsilon)))
    if any(line.chosen for line in lines):
        result.append(("validation", _validation))
    if any(line.p is not None for line in lines):
        result.append(("vs best", _versus_best))
    if any(line.gain is not None for line in lines):
        result.append((f"gain over {summary.base}", lambda line: _spread(metric, line.gain, line.gain_std, "+")))
        result.append(("clients that lose", _losing))
    if any(line.worst_decile is not None for line in lines):
        result.append(("worst decile", lambda line: metric.text(line.worst_decile)))
    if any(line.hostile_value is not None for line in lines):
        result.append(("hostile clients", lambda line: metric.text(line.hostile_value)))
    if any(line.backdoor is not None for line in lines):
        result.append(("backdoor", lambda line: "–" if line.backdoor is None else f"{100 * line.backdoor:.1f} %"))
    if any(line.failed for line in lines):
        result.append(("clients that failed", _failed))
    cost: list[tuple[str, Cell]] = []
    if summary.target is not None:
        reached = target_text(summary)
        cost.append((f"rounds to {reached}", _rounds))
        if len(lines) > 1:
            cost.append(("speed-up", lambda line: "–" if line.speed_up is None else f"{_short(line.speed_up)}×"))
        cost.append((f"bytes to {reached}", lambda line: _bytes(line.bytes_to_target)))
    cost.append(("bytes in all", lambda line: _bytes(line.bytes)))
    if any(line.passes for line in lines):
        cost.append(("passes a round", lambda line: "–" if line.passes is None else _short(line.passes)))
    cost.append(("samples/s", lambda line: _rate(line.samples_per_second)))
    return result, cost


def _of(line: Line, text: str) -> str:
    """Say beside a result of how many clients it is, if some were not measured."""
    return f"{text} ({line.of_clients})" if line.missing else text


def _spread(metric: Metric, mean: float | None, std: float | None, sign: str = "") -> str:
    if mean is None:
        return "–"
    text = metric.text(mean, sign).replace("-", "−")
    return text if std is None else f"{text} ± {metric.text(std)}"


def _validation(line: Line) -> str:
    return line.metric.text(line.validation) + (" ✓" if line.chosen else "")


def _versus_best(line: Line) -> str:
    if line.best:
        return "best"
    if line.p is None:
        return "–"
    p = "< 0.001" if line.p < 0.001 else f"{line.p:.3f}" if line.p < 0.1 else f"{line.p:.2f}"
    return f"{p} ≈" if line.like_best else p


def _losing(line: Line) -> str:
    return "–" if line.losing is None else f"{_short(line.losing)} of {line.clients}"


def _failed(line: Line) -> str:
    return f"{_short(line.failed)} of {len(line.results[0].names)}" if line.failed else "–"


def _rounds(line: Line) -> str:
    if line.rounds_to_target is None:
        return f"> {max(len(result.rounds) for result in line.results)}"
    return _short(line.rounds_to_target)


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _bytes(count: float | None) -> str:
    return "–" if count is None else human_bytes(count)


def _rate(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:,.0f}"


def rich_table(summary: Summary, width: int) -> Group:
    """The table for a terminal; in two parts where the page is too narrow for one."""
    result, cost = _columns(summary)
    whole = _rich(summary, [*result, *cost], summary.title)
    console = SafeConsole(width=10_000, file=io.StringIO())
    needed = console.measure(whole).maximum  # the columns alone: title and caption are wrapped
    parts = [whole] if needed <= width else [_rich(summary, result, summary.title), _rich(summary, cost, "Costs")]
    under = [part for table in conditions(summary) for part in ("", _rich_conditions(table))]
    return Group(*parts, Text(summary.caption, style="dim"), *under)


def _rich_conditions(table: Conditions) -> Table:
    """A table over attacks or privacy budgets."""
    made = plain_table(table.title, caption=Text(visible(table.caption)))
    made.add_column("method", style="bold", no_wrap=True)
    for name in table.columns:
        made.add_column(Text(visible(name)), justify="right")
    for row in table.rows:
        made.add_row(Text(visible(row)), *(table.text(row, place) for place in range(len(table.columns))))
    return made


def _rich(summary: Summary, columns: list[tuple[str, Cell]], title: str) -> Table:
    table = plain_table(title)
    table.add_column("method", style="bold", no_wrap=True)
    for name, _ in columns:
        table.add_column(_broken(name), justify="right", no_wrap=True)
    for line in summary.lines:
        marked = {summary.metric.title: "bold green" if line.best else "underline" if line.second else ""}
        cells = [Text(cell(line), style=marked.get(name, "")) for name, cell in columns]
        table.add_row(Text(visible(line.title)), *cells)
    return table


def _broken(header: str) -> Text:
    """Break a header into two lines of about equal length."""
    words = header.split()
    places = range(1, len(words))
    at = min(places, key=lambda n: max(len(" ".join(words[:n])), len(" ".join(words[n:]))), default=0)
    return Text(" ".join(words[:at]) + ("\n" if at else "") + " ".join(words[at:]))


def plain_text(summary: Summary) -> str:
    """The table without colours, for a file."""
    console = SafeConsole(width=PAGE, file=io.StringIO(), color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(rich_table(summary, PAGE))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def table_rows(summary: Summary, bold: str, underlined: str, escape: Callable[[str], str]) -> Iterable[list[str]]:
    """Yield the header and the lines as escaped text, the best and the second marked."""
    columns = [column for part in _columns(summary) for column in part]
    yield [escape(name) for name in ("method", *(name for name, _ in columns))]
    for line in summary.lines:
        mark = bold if line.best else underlined if line.second else "{}"
        cells = [(name, escape(cell(line))) for name, cell in columns]
        yield [
            escape(line.title),
            *(mark.format(text) if name == summary.metric.title else text for name, text in cells),
        ]


def _for_markdown(text: str) -> str:
    """Escape what would be a mark, a link, HTML, or the end of a cell."""
    special = r"[\\`*\[\]|~$]|<(?=[A-Za-z/!?])|&(?=#?\w+;)|(?<!\w)_|_(?!\w)"
    return re.sub(special, lambda found: "\\" + found[0], visible(text))


def markdown(summary: Summary) -> str:
    head, *rows = table_rows(summary, "**{}**", "<u>{}</u>", _for_markdown)
    ruler = "| --- |" + " ---: |" * (len(head) - 1)
    table = ["| " + " | ".join(head) + " |", ruler, *("| " + " | ".join(row) + " |" for row in rows)]
    title = re.sub(r"^[#>+=-]", r"\\\g<0>", _for_markdown(summary.title))
    under = [line for each in conditions(summary) for line in _markdown_conditions(each)]
    return "\n".join([title, "", *table, "", _for_markdown(summary.caption), *under]) + "\n"


def _markdown_conditions(table: Conditions) -> Iterable[str]:
    cells = [["method", *table.columns]]
    cells += [[row, *(table.text(row, place) for place in range(len(table.columns)))] for row in table.rows]
    head, *rows = ("| " + " | ".join(map(_for_markdown, row)) + " |" for row in cells)
    yield from ("", _for_markdown(table.title), "", head, "| --- |" + " ---: |" * len(table.columns), *rows, "")
    yield _for_markdown(table.caption)


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
        "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "±": r"$\pm$", "≈": r"$\approx$",
        "×": r"$\times$", "≥": r"$\geq$", "−": "$-$", "–": "--", "✓": r"$\surd$", "|": r"\textbar{}",
        "ε": r"$\varepsilon$", "δ": r"$\delta$", "∞": r"$\infty$",
    }
)  # fmt: skip


_LETTERS = "ßøØæÆœŒåÅłŁ…—‘’“”"  # that every LaTeX has
_ACCENTS = "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030b\u030c\u0327"


def _for_latex(text: str) -> str:
    """Escape what LaTeX would run, and write characters that it may not have as their number (U+4E2D)."""
    return "".join(map(_latex_character, visible(text)))


def _latex_character(character: str) -> str:
    parts = unicodedata.normalize("NFD", character)
    if character.isascii() or ord(character) in _LATEX or character in _LETTERS:
        return character.translate(_LATEX)
    known = character < "\u0180" and len(parts) == 2 and parts[0].isascii() and parts[1] in _ACCENTS
    return character if known else f"U+{ord(character):04X}"


def latex(summary: Summary) -> str:
    """A table environment; it needs `\\usepackage{booktabs}`."""
    head, *rows = table_rows(summary, r"\textbf{{{}}}", r"\underline{{{}}}", _for_latex)
    caption = _for_latex(f"{summary.title}. {summary.caption}")
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{caption}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
        " & ".join(head) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


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


FORMATS = {"txt": plain_text, "md": markdown, "tex": latex, "csv": comma_separated}


def write_tables(summary: Summary, directory: Path, more: Plain | None = None) -> list[Path]:
    """Write DIR/table.txt, .md, .tex and .csv, the clients as clients.csv, and everything as result.json."""
    paths, clients = [], client_table(summary)
    for ending, make in FORMATS.items():
        paths.append(directory / f"table.{ending}")
        write_atomically(paths[-1], make(summary))
    write_atomically(directory / "clients.csv", clients_csv(clients))
    record = plain({**summary.plain(), "clients": clients.plain(), **(more or {})})
    write_atomically(directory / "result.json", json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return [*paths, directory / "clients.csv", directory / "result.json"]
