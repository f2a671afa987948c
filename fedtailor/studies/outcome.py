"""The outcome of a reproduction as JSON has it: what follows from its numbers, and how they are written."""

import math
from dataclasses import dataclass
from itertools import pairwise

from fedtailor.server.records import Plain
from fedtailor.studies.presets import Preset

BIN = 5  # points of gain in a bar of a histogram


@dataclass(frozen=True)
class Table:
    """A table beside the main one, as text."""

    title: str
    head: list[str]
    rows: list[list[str]]


# --- what follows from the numbers ---


def add_speedups(outcome: Plain, preset: Preset) -> None:
    """Add the speed-ups to a table of rounds: over the slowest method of the column, of those that reached the target.

    With a single method there is nothing to compare. The paper's are over its own slowest method, shown or not.
    """
    rows = outcome["rows"]
    for place, column in enumerate(preset.columns):
        reached = [rounds for row in rows if (rounds := row["cells"][place]["ours"]) is not None]
        for row, line in zip(preset.rows, rows, strict=True):
            cell, alone = line["cells"][place], len(rows) < 2
            cell["speedup"] = None if alone or cell["ours"] is None else max(reached) / cell["ours"]
            cell["paper_speedup"] = preset.paper_speedup(row, column)


def add_histogram(outcome: Plain) -> None:
    """Count the clients' gains in bins of equal width, the same for all rows. `bins` are the bins' limits."""
    gains = {row["row"]: [round(gain, 6) for gain in row["gains"]] for row in outcome["rows"] if row.get("gains")}
    if not gains:
        return
    every = [gain for found in gains.values() for gain in found]
    first, end = math.floor(min(every) / BIN), math.floor(max(every) / BIN) + 1
    outcome["bins"] = [BIN * number for number in range(first, end + 1)]
    for row in outcome["rows"]:
        numbers = [math.floor(gain / BIN) for gain in gains.get(row["row"], ())]
        row["histogram"] = [numbers.count(number) for number in range(first, end)]


# --- text ---


def markdown(outcome: Plain) -> str:
    """Write the tables as Markdown, with the paper's notes on how to read them."""
    columns, last = [cell["column"] for cell in outcome["rows"][0]["cells"]], has_last(outcome)
    whose = ("ours", "ours in the last round", "paper") if last else ("ours", "paper")
    head = ["method", *(f"{column}, {which}" for column in columns for which in whose)]
    lines = [f"# {outcome['preset']}", "", outcome["title"], "", f"{outcome['paper']}.", ""]
    if text := shortened(outcome):
        lines += [f"**{text}**", ""]
    rows = []
    for row in outcome["rows"]:
        cells = []
        for cell in row["cells"]:
            cells += [ours_text(outcome, row, cell), *([last_text(cell)] if last else []), paper_text(cell)]
        rows.append([row["title"], *cells])
    lines += _table(head, rows)
    for table in further_tables(outcome):
        lines += ["", f"{table.title}:", "", *_table(table.head, table.rows)]
    return "\n".join([*lines, "", *(f"- {note}" for note in remarks(outcome))]) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def remarks(outcome: Plain) -> list[str]:
    """List all that is said below the tables."""
    said = [majority_text(outcome), outcome["not_in_paper"], *outcome["notes"]]
    said += [f"The paper: {outcome['claim']}"] if outcome["claim"] else []
    return [text for text in said if text]


def majority_text(outcome: Plain) -> str:
    """Say which accuracy needs no training; "" where that is not known."""
    found: dict[str, float] = outcome["majority"]
    several = len(outcome["rows"][0]["cells"]) > 1
    numbers = "; ".join(f"{column}: {share:.2f}" if several else f"{share:.2f}" for column, share in found.items())
    return f"Predicting each client's most frequent training class, in %: {numbers}." if found else ""


def further_tables(outcome: Plain) -> list[Table]:
    """Make the tables of what a figure shows: curves, a histogram, α over rounds."""
    rows, tables = outcome["rows"], []
    titles = [row["title"] for row in rows]
    if length := max((len(row.get("curve", ())) for row in rows), default=0):
        lines = [
            [str(step), *(f"{row['curve'][step]:.2f}" if row.get("curve") else "–" for row in rows)]
            for step in range(length)
        ]
        unit = "step" if outcome["measure"] == "explicit" else "epoch"
        tables.append(Table(f"Mean test accuracy in % after each {unit}", [unit, *titles], lines))
    if bins := outcome.get("bins"):
        counts = zip(*(row["histogram"] for row in rows), strict=True)
        limits = [f"{low} to {high}" for low, high in pairwise(bins)]
        lines = [[name, *map(str, found)] for name, found in zip(limits, counts, strict=True)]
        tables.append(Table("Number of clients by their gain", ["gain in points", *titles], lines))
    if rounds := sorted({found["round"] for row in rows for found in row.get("alpha", ())}):
        known = [{at["round"]: f"{at['pairs']}, {at['branches']}" for at in row.get("alpha", ())} for row in rows]
        lines = [[str(number), *(found.get(number, "–") for found in known)] for number in rounds]
        tables.append(Table("Pairs on the same branch, and their branches", ["round", *titles], lines))
    return tables


def last_round(outcome: Plain) -> Table | None:
    """Make the table of the last round, where the numbers are those of the best one."""
    if not has_last(outcome):
        return None
    columns = [cell["column"] for cell in outcome["rows"][0]["cells"]]
    lines = [[row["title"], *map(last_text, row["cells"])] for row in outcome["rows"]]
    return Table("Ours in the last round, not the best on test data", ["method", *columns], lines)


def has_last(outcome: Plain) -> bool:
    """Find out whether the numbers are of the best round, and those of the last one stand beside them."""
    return any("last" in cell for row in outcome["rows"] for cell in row["cells"])


def shortened(outcome: Plain) -> str:
    """Warn of an outcome with fewer rounds than the paper's, or with other settings; "" if it is the preset's own."""
    asked, full = outcome["rounds"], outcome["full_rounds"]
    said = [f"Shortened: {asked} of {full} rounds."] if asked < full else []
    if changed := ", ".join(f"{name} = {value}" for name, value in outcome["changed"].items()):
        said.append(f"Changed: {changed}.")
    return " ".join([*said, "The numbers cannot be compared as they stand."]) if said else ""


def ours_text(outcome: Plain, row: Plain, cell: Plain) -> str:
    """Format our number of one cell."""
    if row["missing"]:
        return "missing"
    if cell["ours"] is None:
        return f"> {outcome['rounds']}" if outcome["measure"] == "rounds" else "–"
    digits = 0 if outcome["measure"] in ("rounds", "pairs") and outcome["seeds"] == 1 else 2
    spread = "" if cell["spread"] is None else f" ± {cell['spread']:.2f}"
    return f"{cell['ours']:.{digits}f}{spread}{speedup_text(cell.get('speedup'))}"


def paper_text(cell: Plain) -> str:
    """Format the paper's number of one cell."""
    return f"{cell['paper'] or '–'}{speedup_text(cell.get('paper_speedup'))}"


def last_text(cell: Plain) -> str:
    """Format our number of one cell in the last round."""
    return "–" if cell.get("last") is None else f"{cell['last']:.2f}"


def speedup_text(speedup: float | None) -> str:
    """Format a speed-up to stand behind the rounds that it is made of."""
    return "" if speedup is None else f" ({speedup:.1f}×)"
