"""Make docs/results.md: our numbers beside the papers', from the records in this directory."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedtailor.cli.reproduce import sections
from fedtailor.studies.outcome import (
    further_tables,
    has_last,
    last_text,
    majority_text,
    ours_text,
    paper_text,
    shortened,
)
from fedtailor.studies.presets import find_preset, presets
from fedtailor.studies.reproduction import Reproduction

HERE = Path(__file__).parent
PAPERS, COMPARISONS, STUDIES = HERE / "papers", HERE / "comparisons", HERE / "studies.toml"
POINTS = ("accuracy", "gain")  # measures of which a difference from the paper's is in points
FAR = 2.0  # points from which a difference is marked and must have a remark
SYMBOLS = {"mu": "μ", "quantile": "p", "alpha_lr": "η_α"}
Study = dict[str, Any]

INTRODUCTION = """\
# Results

<!-- Written by `python -m results`: change results/studies.toml or the records, not this page. -->

Our numbers beside the papers'. Every number of ours is read from the records in [`results/`](../results) (runs without
their checkpoints) by `python -m results`; nothing here is typed. The command below a table does its runs again;
`--only ROW` does one row. It gives the same bits on the same kind of processor. Another one rounds differently, which
[training amplifies](leaderboard.md#on-another-processor). Runs were made on 2 cores that did other work too, and not
all on the same processor.

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
    return "\n".join([*parts, *not_run()]) + "\n"


def not_run() -> Iterator[str]:
    """List the presets, and the columns of presets, that have no table here."""
    shown = {study["preset"] for study in studies() if "preset" in study}
    left = []
    for name, preset in presets().items():
        columns = [column for column in preset.columns if f"{name}-{column}" not in shown]
        if name not in shown and columns:
            some = len(columns) < len(preset.columns)
            left.append(f"- `{name}`" + (f" ({', '.join(columns)})" if some else "") + f": {preset.title}")
    yield "\n## Not run here\n"
    yield "Tables and figures of the four papers that have a preset and no records yet (`fedtailor reproduce NAME`):\n"
    yield from left


def paper_table(study: Study) -> Iterator[str]:
    """Write the table of a preset: ours, the last round, the paper's and the difference, for each column."""
    outcome = reproduction(study).outcome()
    title, colon, what = outcome["title"].partition(":")
    variant = f" ({study['variant']})" if "variant" in study else ""
    yield f"### {title}{variant}{colon}{what}\n"
    yield f"`{study['preset']}`. {outcome['paper']}. {how_short(study, outcome)}\n"
    columns, last = [cell["column"] for cell in outcome["rows"][0]["cells"]], has_last(outcome)
    head = ["row"]
    for column in columns:
        of = f"{column}, " if len(columns) > 1 else ""
        head += [f"{of}ours", *([f"{of}last round"] if last else [])]
        head += [f"{of}paper"] if has_numbers(outcome) else []
        head += ["difference"] if has_differences(outcome) else []
    yield from _table(head, [list(_cells(row, outcome)) for row in outcome["rows"]])
    for table in further_tables(outcome):
        yield f"\n{table.title}:\n"
        yield from _table(table.head, table.rows)
    if said := " ".join(text for text in (outcome["not_in_paper"], majority_text(outcome)) if text):
        yield f"\n{said}"
    if outcome["claim"]:
        yield f"\nThe paper: {outcome['claim']}"
    yield f"\n    {command(study)}\n"
    yield from _remarks(study)


def reproduction(study: Study) -> Reproduction:
    """Open the kept runs of a preset."""
    preset = find_preset(study["preset"])
    preset = preset.of_rows(study["only"]) if "only" in study else preset
    changes = sections(preset, study.get("set", {}))
    changes |= {"rounds": study["rounds"]} if "rounds" in study else {}
    return Reproduction(preset, PAPERS, study.get("seeds", 1), changes)


def how_short(study: Study, outcome: dict[str, Any]) -> str:
    """Say what of the paper's setting is less here, and what is other."""
    preset, seeds = find_preset(study["preset"]), study.get("seeds", 1)
    said = ["seed 0" if seeds == 1 else f"seeds 0 to {seeds - 1}"]
    if len(outcome["rows"]) < len(preset.rows):
        said.append(f"{len(outcome['rows'])} of {len(preset.rows)} rows")
    short = shortened(outcome).removesuffix(" The numbers cannot be compared as they stand.")
    return " ".join([f"**{short}**"] if short else ["**All rounds.**"]) + f" {', '.join(said).capitalize()}."


def command(study: Study) -> str:
    """Write the command that makes a study's runs."""
    words = ["fedtailor", "reproduce", study["preset"]]
    words += [word for row in study.get("only", []) for word in ("--only", row)]
    words += [word for name, value in study.get("set", {}).items() for word in ("--set", f"{name}={value}")]
    words += [word for name in ("rounds", "seeds") if name in study for word in (f"--{name}", str(study[name]))]
    return shlex.join(words)


def _cells(row: dict[str, Any], outcome: dict[str, Any]) -> Iterator[str]:
    yield f"`{row['row']}`"
    for cell in row["cells"]:
        yield ours_text(outcome, row, cell)
        if has_last(outcome):
            yield last_text(cell)
        if has_numbers(outcome):
            yield paper_text(cell)
        if has_differences(outcome):
            yield difference(cell)


def has_numbers(outcome: dict[str, Any]) -> bool:
    """Find out whether the paper prints any number; of many figures it does not."""
    return any(cell["paper"] for row in outcome["rows"] for cell in row["cells"])


def has_differences(outcome: dict[str, Any]) -> bool:
    """Find out whether numbers can be compared with the paper's, in points."""
    return has_numbers(outcome) and outcome["measure"] in POINTS


def difference(cell: dict[str, Any]) -> str:
    """Write ours minus the paper's, marked if it is far."""
    found = re.match(r"-?\d+(\.\d+)?", cell["paper"])
    if not found or cell["ours"] is None:
        return "–"
    points = cell["ours"] - float(found[0])
    return f"{points:+.2f}".replace("-", "−") + (" ≠" if abs(points) > FAR else "")


def comparison_table(study: Study) -> Iterator[str]:
    """Write a table of several comparisons over one setting: a line for each, or for each value of another setting."""
    yield f"### {study['title']}\n"
    if "text" in study:
        yield f"{study['text']}\n"
    found = {name: read_result(name) for name in study["comparisons"]}
    over, by = study["over"], study.get("by")
    values = list(dict.fromkeys(line["settings"].get(over) for result in found.values() for line in result["lines"]))
    rows = []
    for name, result in found.items():
        for value in dict.fromkeys(line["settings"].get(by) for line in result["lines"]):
            title = study["comparisons"][name] + ("" if by is None else f"{by} = {value:g}")
            cells = {line["settings"].get(over): line for line in result["lines"] if line["settings"].get(by) == value}
            most = max(len(line["seeds"]) for line in result["lines"])
            rows.append([title, *(_value(cells.get(column), most) for column in values)])
    yield from _table(["", *(f"{SYMBOLS.get(over, over)} = {value:g}" for value in values)], rows)
    seeds = sorted({seed for result in found.values() for line in result["lines"] for seed in line["seeds"]})
    over_seeds = f"Mean ± standard deviation over the seeds {', '.join(map(str, seeds))}."
    yield f"\n{over_seeds if len(seeds) > 1 else f'Seed {seeds[0]}.'} ✓: chosen by validation data.\n"
    for name in found:
        yield f"    fedtailor compare results/studies/{name}.toml"
    yield ""
    yield from _remarks(study)


def read_result(name: str) -> dict[str, Any]:
    """Read the summary of a comparison."""
    content: dict[str, Any] = json.loads((COMPARISONS / name / "result.json").read_text(encoding="utf-8"))
    return content


def _value(line: dict[str, Any] | None, seeds: int) -> str:
    """Write the value of a line, and of how many seeds it is if some of its runs failed."""
    if line is None or line["value"] is None:
        return "–"
    found = len(line["seeds"])
    failed = "" if found == seeds else f" ({seeds - found} of {seeds} runs failed)"
    spread = "" if line["value_std"] is None else f" ± {100 * line['value_std']:.2f}"
    return f"{100 * line['value']:.2f}{spread}{' ✓' if line['chosen'] else ''}{failed}"


def _remarks(study: Study) -> Iterator[str]:
    yield from (f"- {remark}" for remark in study.get("remarks", []))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "| --- |" + " ---: |" * (len(head) - 1)
    yield from ("| " + " | ".join(row) + " |" for row in rows)
