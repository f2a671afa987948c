"""Tables of clients: clients × methods for a terminal, as CSV and as HTML; and the clients of one run."""

import csv
import io
from collections import Counter
from collections.abc import Sequence
from html import escape

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedtailor._common.text import SafeConsole, plain_table, spreadsheet_cell, visible
from fedtailor.engines.result import RunResult
from fedtailor.studies.client_results import ClientRow, ClientTable, best_of
from fedtailor.training.metrics import LOSS, METRICS, Metric

FEW = 30  # clients that are all printed
ENDS = 10  # of more, the worst and the best
LINES = 12  # of a comparison that are printed: the best of more


def rich_clients(table: ClientTable, width: int, whole: str) -> Group:
    """The table for a terminal: all clients, or the worst and the best of many; all lines, or the best of many; `whole`
    says where all are. In several parts where the page is too narrow for all lines."""
    rows: list[ClientRow | None] = [*table.shown_rows]
    left, cut = [*table.shown_lines], []
    if len(left) > LINES:
        cut.append(f"the best {LINES} of {len(left)} lines")
        left = sorted(table.best_lines()[:LINES])
    if len(rows) > FEW:
        ranked, leader = table.ranked(), table.labels[table.leader]
        cut.append(f"the worst and the best {ENDS} of {len(ranked)}, by {visible(leader)}")
        rows = [*ranked[:ENDS], None, *ranked[-ENDS:]]
    title, note = (f"Clients: {'; '.join(cut)}", f" All are in {whole}.") if cut else ("Clients", "")
    parts: list[RenderableType] = ["", Text(title, style="table.title")]
    while left:
        shown = next(
            n for n in range(len(left), 0, -1) if n == 1 or needed_width(_rich(table, rows, left[:n])) <= width
        )
        parts.append(_rich(table, rows, left[:shown]))
        left = left[shown:]
    return Group(*parts, Text(visible(table.caption + note), style="dim"))


def needed_width(table: Table) -> int:
    """The columns of a page that a table needs: its title and caption are wrapped."""
    return SafeConsole(width=10_000, file=io.StringIO()).measure(table).maximum


def as_text(table: RenderableType, width: int) -> str:
    """A table without colours, for a file."""
    console = SafeConsole(
        width=width, file=io.StringIO(), color_system=None, force_terminal=False, legacy_windows=False
    )
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _rich(table: ClientTable, rows: Sequence[ClientRow | None], lines: Sequence[int]) -> Table:
    made, several = plain_table(""), len(table.ranked_lines) > 1
    made.add_column("client", style="bold", overflow="fold")
    for name in ("train", "test", *(table.labels[line] for line in lines)):
        made.add_column(visible(name), justify="right", no_wrap=True)
    if several:
        made.add_column("best")
    for row in rows:
        if row is None:
            made.add_row("…")
            continue
        cells = [Text(table.shown(row.values[n]), style="bold green" if row.best[n] else "") for n in lines]
        best = [Text(visible(", ".join(best_of(table.labels, row))))] if several else []
        made.add_row(Text(visible(row.title)), _count(row.n_train), _count(row.n_test), *cells, *best)
    made.add_section()
    overall = [table.shown(table.overall[n]) for n in lines]
    made.add_row("all", "", "", *overall, *([Text(visible(table.labels[table.leader]))] if several else []))
    return made


def _count(samples: float) -> str:
    """A number of samples, which is a mean over seeds."""
    return f"{samples:,.1f}".removesuffix(".0")


def rich_clients_of_run(result: RunResult, whole: str) -> Table:
    """The clients of one run, the worst first: all, or the worst of many, and `whole` is the command that shows all."""
    metric, metrics = result.metric, _measured(result)
    of = {client: metric.of(measured) for client, measured in result.per_client.items()}
    ranked = sorted(of, key=lambda client: (of[client] is None, metric.gain(of[client] or 0.0, 0.0)))
    shown = ranked if len(ranked) <= FEW else ranked[: 2 * ENDS]
    note = "" if shown == ranked else f"All clients: {whole}"
    table = plain_table(f"Clients, the worst {len(shown)} of {len(ranked)} first", caption=Text(visible(note)))
    called = Counter(client for record in result.rounds for client in record.participants)
    columns = ["client", *(each.title for each in metrics), "train", "test", "rounds", "failed"]
    for name in columns if result.failures else columns[:-1]:
        words = name.split()  # below each other: at 80 columns no word of a header is cut
        table.add_column("\n".join(words), justify="right", min_width=max(map(len, words)))
    for client in shown:
        table.add_row(
            visible(result.names[client] + (" (hostile)" if client in result.hostile else "")),
            *(each.text(each.of(result.per_client[client])) for each in metrics),
            f"{result.partition['n_train'][client]:,}",
            f"{result.per_client[client].n_samples:,}",
            str(called[client]),
            *([str(result.failures.get(client, (0, 0))[0])] if result.failures else []),
        )
    return table


def _measured(result: RunResult) -> list[Metric]:
    """List the metrics that some client has, the one that decides first; the log loss alone where it is the loss."""
    measured = result.per_client.values()
    some = [m for m in METRICS.values() if any(m.of(metrics) is not None for metrics in measured)]
    some += [Metric(name, more=True) for name in dict.fromkeys(name for metrics in measured for name in metrics.more)]
    if all(METRICS["log_loss"].of(metrics) == LOSS.of(metrics) for metrics in measured):
        some.remove(LOSS)
    return [result.metric, *(metric for metric in dict.fromkeys(some) if metric.name != result.metric.name)]


def clients_csv(table: ClientTable) -> str:
    """Raw numbers: accuracies are shares of 1, missing values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(spreadsheet_cell, ["client", "train", "test", *table.titles, "best"]))
    for row in table.rows:
        best = ", ".join(best_of(table.titles, row))
        writer.writerow(map(spreadsheet_cell, [row.title, row.n_train, row.n_test, *row.values, best]))
    return text.getvalue()


def clients_html(table: ClientTable) -> str:
    """A table whose columns sort by a click on their header (see page.js)."""
    heads = "".join(
        f'<th scope="col" aria-sort="none"><button>{escape(name)}</button></th>'
        for name in ("client", "train", "test", *(table.labels[line] for line in table.shown_lines))
    )
    body = []
    for row in table.shown_rows:
        counts = "".join(_cell(n, _count(n), False) for n in (row.n_train, row.n_test))
        own = ((row.values[line], row.best[line]) for line in table.shown_lines)
        cells = counts + "".join(_cell(value, table.shown(value), best) for value, best in own)
        title = escape(row.title)
        body.append(f'<tr><th scope="row" class="name" title="{title}">{title}</th>{cells}</tr>')
    foot = "".join(_cell(value, table.shown(value), False) for value in (table.overall[n] for n in table.shown_lines))
    return f"""<div class="wide tall-table"><table class="sortable">
<thead><tr>{heads}</tr></thead>
<tbody>{"".join(body)}</tbody>
<tfoot><tr><th scope="row">all</th><td></td><td></td>{foot}</tr></tfoot>
</table></div>
<p class="caption">{escape(table.caption)} The best of each client is bold. Click on a column to sort by it.</p>"""


def _cell(value: float | None, text: str, best: bool) -> str:
    number = "" if value is None else f' data-value="{value!r}"'
    return f"<td{number}>{f'<strong>{text}</strong>' if best else text}</td>"
