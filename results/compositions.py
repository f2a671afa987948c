"""The table of docs/compositions.md: does a composition help? Made of the records of four comparisons."""

from collections.abc import Iterator
from pathlib import Path

from fedtailor.studies.measures import holm, wilcoxon
from results.leaderboard import FEDERATIONS, Line, lines, result

PAGE = Path(__file__).parents[1] / "docs" / "compositions.md"
BEGIN, END = "<!-- Written by `python -m results` -->\n", "<!-- end -->\n"
KIND, LEVEL = "compositions", 0.05
OUTER = ("pgfed", "fedprox", "scaffold", "feddyn")


def with_table() -> str:
    """Put the table of the records into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{chr(10).join(table())}\n\n{END}{rest.partition(END)[2]}"


def table() -> Iterator[str]:
    """Write a row for each method that shares a part, and each correction of it."""
    found = {name: lines(KIND, name) for name in FEDERATIONS}
    level = {name: ps(name) for name in FEDERATIONS}
    first = next(iter(found.values()))
    yield f"| shared part | alone and with | {' | '.join(FEDERATIONS)} |"
    yield "| --- | --- |" + " ---: |" * len(FEDERATIONS)
    for inner in (method for method in first if any(f"{outer}+{method}" in first for outer in OUTER)):
        yield f"| `{inner}` | | {' | '.join(_alone(of[inner]) for of in found.values())} |"
        for outer in (outer for outer in OUTER if f"{outer}+{inner}" in first):
            name = f"{outer}+{inner}"
            cells = [_difference(of[name], of[inner], level[place][name]) for place, of in found.items()]
            yield f"| | `{outer}` | {' | '.join(cells)} |"


def ps(federation: str) -> dict[str, float]:
    """Compute p of each composition against its second method alone: a Wilcoxon test paired over the clients, whose
    accuracy is averaged over the seeds, corrected for all compositions of the federation."""
    clients = result(KIND, federation)["clients"]["clients"]
    of = {method: {n: c["values"][method] for n, c in enumerate(clients)} for method in clients[0]["values"]}
    names = [method for method in of if "+" in method]
    raw = [wilcoxon(of[name], of[name.partition("+")[2]]) for name in names]
    return dict(zip(names, holm([1.0 if p is None else p for p in raw]), strict=True))


def _alone(line: Line) -> str:
    return f"{100 * line['value']:.1f} ± {100 * (line['value_std'] or 0):.1f}"


def _difference(line: Line, alone: Line, p: float) -> str:
    if line["value"] is None:
        return "failed"
    text = f"{100 * (line['value'] - alone['value']):+.1f}".replace("-", "−")
    return f"**{text}**" if p < LEVEL else text
