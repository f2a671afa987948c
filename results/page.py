"""Make docs/results.md: our numbers beside the papers', from the records in this directory."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedtailor.presets import find_preset
from fedtailor.studies.reproduction import Reproduction

HERE = Path(__file__).parent
PAPERS, COMPARISONS, STUDIES = HERE / "papers", HERE / "comparisons", HERE / "studies.toml"
FAR = 2.0  # points from which a difference is marked and must have a remark
Study = dict[str, Any]

INTRODUCTION = """\
# Results

<!-- Written by `python -m results`: change results/studies.toml or the records, not this page. -->

Our numbers beside the papers'. Every number of ours is read from the records in [`results/`](../results) (runs without
their checkpoints) by `python -m results`; nothing here is typed. The command below a table does its runs again, to the
same bits; `--only ROW` does one row. They were run on 2 cores of a machine that did other work too.

**The papers' tables take days on such a machine, so most are shortened**, and each says how: fewer rounds than the
paper's, one seed where it has three, some of its rows. A shortened number cannot be compared with the paper's as it
stands; rows of the same table can be compared with each other. *Last round* is our number without the choice of the
best round by test data. `≠` marks a number that is more than 2 points from the paper's: why stands below.
"""


def studies() -> list[Study]:
    """Read the list of studies, in the order of the page."""
    return list(tomllib.loads(STUDIES.read_text(encoding="utf-8"))["study"])


def page() -> str:
    """Write the whole page."""
    parts, section = [INTRODUCTION], ""
    for study in studies():
        if study["section"] != section:
            section = study["section"]
            parts.append(f"\n## {section}\n")
        made = paper_table(study) if "preset" in study else comparison_table(study)
        parts.append("\n".join(made) + "\n")
    return "\n".join(parts)


def paper_table(study: Study) -> Iterator[str]:
    """Write the table of a preset: ours, the last round, the paper's and the difference, for each column."""
    work = reproduction(study)
    outcome = work.outcome()
    unit = " (points)" if outcome["measure"] in ("accuracy", "gain") else ""
    yield f"### {outcome['title']}\n"
    yield f"{outcome['paper']}. {how_short(study, outcome)}\n"
    columns = [cell["column"] for cell in outcome["rows"][0]["cells"]]
    head = ["row"]
    for column in columns:
        of = f" {column}" if len(columns) > 1 else ""
        head += [f"ours{of}", *([f"last round{of}"] if _has_last(outcome) else []), f"paper{of}", f"difference{unit}"]
    yield from _table(head, [list(_cells(row, outcome)) for row in outcome["rows"]])
    if outcome["claim"]:
        yield f"\nThe paper: {outcome['claim']}"
    yield f"\n    {command(study)}\n"
    yield from _remarks(study)


def reproduction(study: Study) -> Reproduction:
    """Open the kept runs of a preset."""
    preset = find_preset(study["preset"])
    preset = preset.of_rows(study["only"]) if "only" in study else preset
    return Reproduction(preset, PAPERS, study.get("seeds", 1), {n: study[n] for n in CHANGES if n in study})


CHANGES = ("rounds", "max_train", "model", "lr")  # what a study may change of its preset


def how_short(study: Study, outcome: dict[str, Any]) -> str:
    """Say what of the paper's setting is less here, and what is other."""
    preset, seeds = find_preset(study["preset"]), study.get("seeds", 1)
    said = []
    if outcome["rounds"] < outcome["full_rounds"]:
        said.append(f"{outcome['rounds']} of {outcome['full_rounds']} rounds")
    if "max_train" in study:
        said.append(f"at most {study['max_train']} training samples a client")
    said += [f"{name} {study[name]}" for name in ("model", "lr") if name in study]
    said.append("seed 0" if seeds == 1 else f"seeds 0 to {seeds - 1}")
    if "only" in study and len(study["only"]) < len(preset.rows):
        said.append(f"{len(study['only'])} of {len(preset.rows)} rows")
    text = ", ".join(said)
    return f"**{'Shortened: ' if outcome['rounds'] < outcome['full_rounds'] or len(said) > 1 else ''}{text}.**"


def command(study: Study) -> str:
    """Write the command that makes a study's runs."""
    words = ["fedtailor", "reproduce", study["preset"]]
    words += [word for row in study.get("only", []) for word in ("--only", row)]
    for name in (*CHANGES, "seeds"):
        if name in study:
            words += [f"--{name.replace('_', '-')}", str(study[name])]
    return shlex.join(words)


def _has_last(outcome: dict[str, Any]) -> bool:
    return any(cell.get("last") is not None for row in outcome["rows"] for cell in row["cells"])


def _cells(row: dict[str, Any], outcome: dict[str, Any]) -> Iterator[str]:
    from fedtailor.studies.reproduction import ours_text

    yield f"`{row['row']}`"
    for cell in row["cells"]:
        yield ours_text(outcome, row, cell)
        if _has_last(outcome):
            yield "–" if cell.get("last") is None else f"{cell['last']:.2f}"
        yield cell["paper"] or "–"
        yield difference(cell)


def difference(cell: dict[str, Any]) -> str:
    """Write ours minus the paper's, marked if it is far."""
    found = re.match(r"-?\d+(\.\d+)?", cell["paper"])
    if not found or cell["ours"] is None:
        return "–"
    points = cell["ours"] - float(found[0])
    return f"{points:+.2f}".replace("-", "−") + (" ≠" if abs(points) > FAR else "")


def comparison_table(study: Study) -> Iterator[str]:
    """Write a table of several comparisons over one setting: a line for each comparison."""
    yield f"### {study['title']}\n"
    if "text" in study:
        yield f"{study['text']}\n"
    found = {name: read_result(name) for name in study["comparisons"]}
    over = study["over"]
    values = list(dict.fromkeys(line["settings"].get(over) for result in found.values() for line in result["lines"]))
    rows = []
    for name, result in found.items():
        cells = {line["settings"].get(over): line for line in result["lines"]}
        rows.append([study["comparisons"][name], *(_value(cells.get(value)) for value in values)])
    yield from _table(["", *(f"{over} = {value:g}" for value in values)], rows)
    seeds = sorted({seed for result in found.values() for line in result["lines"] for seed in line["seeds"]})
    yield f"\nMean ± standard deviation over the seeds {', '.join(map(str, seeds))}. ✓: chosen by validation data.\n"
    for name in found:
        yield f"    fedtailor compare results/studies/{name}.toml"
    yield ""
    yield from _remarks(study)


def read_result(name: str) -> dict[str, Any]:
    """Read the summary of a comparison."""
    content: dict[str, Any] = json.loads((COMPARISONS / name / "result.json").read_text(encoding="utf-8"))
    return content


def _value(line: dict[str, Any] | None) -> str:
    if line is None or line["value"] is None:
        return "–"
    spread = "" if line["value_std"] is None else f" ± {100 * line['value_std']:.2f}"
    return f"{100 * line['value']:.2f}{spread}{' ✓' if line['chosen'] else ''}"


def _remarks(study: Study) -> Iterator[str]:
    yield from (f"- {remark}" for remark in study.get("remarks", []))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "| --- |" + " ---: |" * (len(head) - 1)
    yield from ("| " + " | ".join(row) + " |" for row in rows)
