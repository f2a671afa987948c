"""The report: one HTML file that needs nothing else, with everything that a comparison has to show."""

import base64
import gzip
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import make_directory, write_atomically
from fedtailor._common.text import human_bytes, human_time
from fedtailor._common.toml import write_toml
from fedtailor.data.own_data import data_in_words
from fedtailor.data.shifts import in_words as shift_in_words
from fedtailor.engines.result import RunResult
from fedtailor.experiment.participation import Participation
from fedtailor.reporting import figures as general
from fedtailor.reporting.axes import Along, chosen_axis
from fedtailor.reporting.client_tables import clients_html
from fedtailor.reporting.conclusion import conclusion
from fedtailor.reporting.diagnostics import diagnostics
from fedtailor.reporting.figures import partition_in_words
from fedtailor.reporting.found_runs import Runs
from fedtailor.reporting.interactive import chart, shape
from fedtailor.reporting.marks import Figure, Style, styles
from fedtailor.reporting.tables import caption, table_rows
from fedtailor.studies.client_results import client_table
from fedtailor.studies.summary import Summary, summarize

# Nothing is ever loaded from elsewhere: the browser is told to refuse.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class Section:
    """A part of the report: figures that are shown one below the other, or take turns where they have tabs."""

    anchor: str
    title: str
    figures: Sequence[Figure]
    table: str = ""  # HTML below them


@dataclass(frozen=True)
class Report:
    """The content of a report, before it is drawn."""

    runs: Runs
    summary: Summary
    styles: dict[str, Style]
    sections: list[Section]
    notes: list[str]
    columns: Sequence[str] | None = None  # of the table, by name

    @property
    def figures(self) -> list[Figure]:
        return [figure for section in self.sections for figure in section.figures]


def prepare(runs: Runs, columns: Sequence[str] | None = None, x: Along = "rounds") -> Report:
    """Make all figures and notes of these runs; refuse runs that cannot be compared. `x` is what the page's curves are
    drawn over at first, and those of the diagnostics always."""
    summary = summarize(runs.results, runs.target, runs.tuned)
    look = styles([(line.title, line.method) for line in summary.lines])
    notes = [*_notes(runs)]
    axis = chosen_axis(summary, x)
    sections = [Section("curves", "Learning curves", general.curves(summary, look, x))]
    if each := general.clients(summary, look):
        sections.append(Section("clients", "Clients", [each], clients_html(client_table(summary))))
    if gains := general.gains(summary, look):
        sections.append(Section("gains", gains.title, [gains]))
    for anchor, figure in (("privacy", general.privacy(summary, look)), ("attacks", general.attacked(summary))):
        if figure:
            sections.append(Section(anchor, figure.title, [figure]))
    sections.append(Section("data", "Data", general.partitions(summary), _pictures(summary)))
    for place, line in enumerate(summary.lines):
        try:
            own = diagnostics(line, look[line.title], axis)
        except FedtailorError as error:
            notes.append(f"The diagnostics of {line.label} are left out: {error}")
            continue
        if own:
            sections.append(Section(f"method-{place}", line.label, own))
    return Report(runs, summary, look, sections, notes, columns)


def _pictures(summary: Summary) -> str:
    """One image of each client where features shift, and each client's shift."""
    result = summary.lines[0].results[0]
    if not (shifts := result.partition["shifts"]):
        return ""
    columns = [column["name"] for column in (result.partition["preprocessing"] or {"columns": ()})["columns"]]
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(shift_in_words(shift, columns))}</td></tr>'
        for name, shift in zip(result.names, shifts, strict=True)
    )
    picture = escape(result.partition["picture"])
    image = f'<p><img alt="One image of each client" src="data:image/png;base64,{picture}"></p>' if picture else ""
    return f"""<h3>Each client's shift of features (seed {result.experiment.seed})</h3>
{image}<details><summary>Shifts</summary><table><tbody>{rows}</tbody></table></details>"""


def _notes(runs: Runs) -> Iterator[str]:
    """Name the runs that are not finished or broken."""
    for result in runs.unfinished:
        done, asked = len(result.rounds), result.experiment.rounds
        what = "it has nothing to show yet" if result in runs.begun else "its metrics are of the rounds until then"
        yield f"{result.path or result.method} is not finished ({done} of {asked} rounds): {what}."
    for path, why in runs.broken.items():
        yield f"{path} is left out, as it is broken: {why}"
    for title, why in runs.failed.items():
        yield f"{title} came to no end: {why}"


# --- words ---


def heading(summary: Summary) -> str:
    titles = [line.label for line in summary.lines]
    data = summary.lines[0].results[0].data_title
    if len(titles) > 4:
        return f"{len(titles)} methods on {data}"
    return f"{', '.join(titles[:-1])}{' and ' if len(titles) > 1 else ''}{titles[-1]} on {data}"


def in_words(summary: Summary) -> str:
    """Describe the data, their partition, the training and the evaluation in a few sentences."""
    result = summary.lines[0].results[0]
    experiment, partition = result.experiment, result.partition
    total, classes, new = sum(partition["n_train"]), len(partition["classes"]), len(partition["new"])
    what = f"{total:,} training samples of {data_in_words(experiment.data)} "
    what += f"({classes} classes)" if classes else "(numbers to predict)"
    held_out = f", {new} of them new" if new else ""
    if (attack := _common(summary, "attack")) and result.hostile:
        held_out += f", {len(result.hostile)} of them hostile ({attack.partition(',')[0]})"
    protocol = experiment.evaluation
    tuned = {line.results[0].experiment.evaluation.fine_tune for line in summary.lines}
    sentences = [
        f"{what} at {_counted(len(result.names), 'client')}{held_out}",
        f"partition: {partition_in_words(result)}",
        _participation(experiment.participation, _common(summary, "rounds")),
        _local_work(summary),
        protocol.model_copy(update={"fine_tune": protocol.fine_tune if len(tuned) == 1 else 0})
        .in_words(summary.metric)
        .rstrip("."),
    ]
    return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences if sentence)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _local_work(summary: Summary) -> str:
    """Describe the settings of local training that are the same in all runs."""
    names = ("steps", "epochs", "batch", "optimizer", "lr", "model")
    steps, epochs, batch, optimizer, lr, model = (_common(summary, name) for name in names)
    parts = [
        _counted(steps, "local step") if steps else f"{_counted(epochs, 'epoch')} of local work" if epochs else "",
        "with all samples in one batch" if batch == "full" else f"in batches of {batch}" if batch else "",
        f"by {optimizer}" if optimizer not in (None, "sgd") else "",
        f"at learning rate {lr:g}" if lr else "",
        f"with the network {model}" if model else "",
    ]
    return " ".join(filter(None, parts))


def _common(summary: Summary, setting: str) -> Any:
    """A setting that is the same in all runs; None if it is not."""
    values = {getattr(result.experiment, setting) for line in summary.lines for result in line.results}
    return values.pop() if len(values) == 1 else None


def _participation(text: str, rounds: int | None) -> str:
    drawn = Participation.parse(text)
    who = {
        "all": "all clients take part",
        "count": f"{drawn.amount:.0f} clients take part",
        "fraction": f"{100 * drawn.amount:g} % of the clients take part",
        "range": f"{drawn.amount:.0f} to {drawn.most} clients take part",
        "independent": f"each client takes part with probability {drawn.amount:g}",
    }[drawn.kind]
    return f"{_counted(rounds, 'round')}; {who} in each" if rounds else f"{who} in each round"


# --- HTML ---


def html(report: Report) -> str:
    """The whole page."""
    from plotly.offline import get_plotlyjs

    title = heading(report.summary)
    charts: dict[str, Any] = {}
    body = "\n".join(_section(section, charts) for section in report.sections)
    links = [("results", "Results"), *((s.anchor, s.title) for s in report.sections), ("runs", "Runs")]
    contents = "".join(f'<li><a href="#{anchor}">{escape(name)}</a></li>' for anchor, name in links)
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="fedtailor">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{_asset("page.css")}
</style>
</head>
<body>
<nav aria-label="Contents"><p>fedtailor report</p><ol>{contents}</ol></nav>
<main>
<header>
<h1>{escape(title)}</h1>
<p class="conclusion">{escape(conclusion(report.summary))}</p>
<p class="lead">{escape(in_words(report.summary))}</p>
{f'<ul class="notes">{notes}</ul>' if notes else ""}
<p class="notes" id="undrawn">Drawing the figures … This needs JavaScript, and a browser of 2023 or later.</p>
</header>
<section id="results">
<h2>Results</h2>
{_results(report)}
</section>
{body}
{_runs(report)}
</main>
<script type="text/plain" id="plotly">{_packed(get_plotlyjs())}</script>
<script type="text/plain" id="charts">{_packed(_json(charts))}</script>
<script>
{_asset("page.js")}
</script>
</body>
</html>
"""


def write_page(report: Report, to: Path) -> int:
    """Write the page, and return its size in bytes."""
    page = html(report).encode()
    make_directory(to.parent)
    write_atomically(to, page)
    return len(page)


def _asset(name: str) -> str:
    return files("fedtailor.reporting").joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _packed(text: str) -> str:
    """Compress a text to a third of its size; the same text always gives the same."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _results(report: Report) -> str:
    head, *rows = table_rows(report.summary, "<strong>{}</strong>", "<u>{}</u>", escape, report.columns)
    colours = [report.styles[line.title].colour for line in report.summary.lines]
    cells = []
    for colour, (name, *numbers) in zip(colours, rows, strict=True):
        key = f'<i class="key" style="background:{colour}"></i>'
        cells.append(f'<tr><th scope="row">{key}{name}</th>{_cells(map(_minus, numbers))}</tr>')
    headers = "".join(f'<th scope="col">{name}</th>' for name in head)
    best = f"The best {escape(report.summary.metric.title)} is bold, the second underlined. "
    marked = best if report.summary.best else ""
    return f"""<div class="wide"><table>
<thead><tr>{headers}</tr></thead>
<tbody>{"".join(cells)}</tbody>
</table></div>
<p class="caption">{marked}{escape(caption(report.summary, report.columns))}</p>"""


def _minus(number: str) -> str:
    return re.sub(r"-(?=\d)", "−", number)


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"<td>{text}</td>" for text in texts)


def _section(section: Section, charts: dict[str, Any]) -> str:
    drawn = [_figure(figure, section, charts) for figure in section.figures]
    if len(drawn) == 1 or not section.figures[0].tab:
        content = "\n".join(drawn)
    else:
        tabs = "".join(
            f'<button role="tab" id="tab-{figure.name}" aria-controls="{figure.name}" '
            f'aria-selected="{str(place == 0).lower()}">{escape(figure.tab)}</button>'
            for place, figure in enumerate(section.figures)
        )
        content = f'<div class="tabs" role="tablist">{tabs}</div>\n<div class="turns">{"".join(drawn)}</div>'
    return f'<section id="{section.anchor}">\n<h2>{escape(section.title)}</h2>\n{content}\n{section.table}</section>'


def _figure(figure: Figure, section: Section, charts: dict[str, Any]) -> str:
    panels = []
    for place, panel in enumerate(figure.panels):
        name = f"{figure.name}-{place}"
        charts[name] = chart(figure, panel)
        choice = f' data-choice="{escape(panel.choice)}"' if panel.choice else ""
        title = f"<h4>{escape(panel.title)}</h4>" if panel.title else ""
        tall = " tall" if panel.tall else ""
        drawing = f'<div class="chart" id="chart-{escape(name)}" style="{shape(figure, panel)}"></div>'
        panels.append(f'<div class="panel{tall}"{choice}>{title}{drawing}</div>')
    title = f"<h3>{escape(figure.title)}</h3>" if figure.title != section.title and not figure.tab else ""
    said = f"<b>{escape(figure.tab.capitalize())}.</b> " if figure.tab and len(section.figures) > 1 else ""
    return f"""<figure id="{escape(figure.name)}" style="--columns:{figure.columns}">
{title}{_legend(figure)}
<div class="panels">{"".join(panels)}</div>
{_slider(figure)}
<figcaption>{said}{escape(figure.caption)}</figcaption>
</figure>"""


def _legend(figure: Figure) -> str:
    """Buttons that hide a method, in all figures, and show it again."""
    if len(figure.legend) < 2:
        return ""
    buttons = "".join(
        f'<button aria-pressed="true" data-choice="{escape(choice)}" style="--colour:{style.colour}">'
        f'<svg viewBox="0 0 26 8" aria-hidden="true"><line class="{style.dash}" x1="1" y1="4" x2="25" '
        f'y2="4"/></svg>{escape(label)}</button>'
        for choice, (label, style) in figure.legend.items()
    )
    return f'<div class="legend" title="Click: hide or show. Double click: show only this, or all.">{buttons}</div>'


def _slider(figure: Figure) -> str:
    """A handle to go through the rounds."""
    frames = figure.frames
    if len(frames) < 2:
        return ""
    last = len(frames) - 1
    return (
        f'<label class="slider">Round <output>{escape(frames[-1])}</output><input type="range" min="0" max="{last}" '
        f'value="{last}" data-frames="{escape(json.dumps(frames))}"></label>'
    )


def _runs(report: Report) -> str:
    """Every run, and the complete settings of the first."""
    results = [*report.runs.results, *report.runs.begun]
    rows = "".join(f'<tr><th scope="row">{escape(r.method_title)}</th>{_cells(_run(r))}</tr>' for r in results)
    first = results[0]
    heads = ("method", "seed", "rounds", escape(first.metric.title), "bytes", "time", "directory")
    return f"""<section id="runs">
<h2>Runs</h2>
<div class="wide"><table class="runs">
<thead><tr>{"".join(f'<th scope="col">{head}</th>' for head in heads)}</tr></thead>
<tbody>{rows}</tbody>
</table></div>
<details><summary>All settings of {escape(str(first.path or first.method))}</summary>
<pre>{escape(write_toml(first.experiment.model_dump()))}</pre></details>
</section>"""


def _run(result: RunResult) -> list[str]:
    done, asked = len(result.rounds), result.experiment.rounds
    rounds = f"{done} of {asked}, stopped early" if result.stopped else str(done)
    return [
        str(result.experiment.seed),
        rounds if result.finished else f"<em>{done} of {asked}</em>",
        f"{result.metric.text(result.value)} {record.of_clients if (record := result.chosen()) else ''}".rstrip(),
        human_bytes(sum(record.bytes for record in result.rounds)),
        human_time(sum(record.seconds for record in result.rounds)),
        f"<code>{escape(str(result.path or 'not recorded'))}</code>",
    ]
