"""Make docs/results.md: our numbers beside the papers', from the records in this directory."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedtailor.cli.reproduce import sections
from fedtailor.studies.measures import LEVEL, client_values
from fedtailor.studies.outcome import (
    further_tables,
    has_last,
    last_text,
    majority_text,
    ours_text,
    paper_text,
    shortened,
)
from fedtailor.studies.presets import Row, find_preset, presets
from fedtailor.studies.reproduction import Reproduction
from results.pairs import HEAD, Pair, decided, of_clients, points
from results.pairs import rows as rows_of_pairs

HERE = Path(__file__).parent
PAPERS, COMPARISONS, STUDIES = HERE / "papers", HERE / "comparisons", HERE / "studies.toml"
POINTS = ("accuracy", "gain")  # measures of which a difference from the paper's is in points
FAR = 2.0  # points from which a difference is marked and must have a remark
SYMBOLS = {"mu": "μ", "quantile": "p", "alpha_lr": "η_α"}
Study = dict[str, Any]
ClientsOfSeeds = dict[tuple[int, int], float]  # values by seed and client

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

**Whether one row is better than another is decided over the clients that both have**, not by the spread over seeds,
which is mostly that of partitions. Below a table stand each row's differences from one of them: the mean over clients
(and seeds) with its standard error, for how many clients the row is better or worse, and the p of Wilcoxon's
signed-rank test, corrected for the number of rows (Holm). "Ahead" and "behind" mean p < 0.05 for these clients of these
seeds, with most clients on the side of the mean; "not decided" is all else, and does not mean that there is no
difference. Clients of one training influence each other, so that p says less than one of independent trainings would.

*M of N rounds*: N are the paper's, or the preset's where the paper prints none (FedACS, pFedMB).
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
    yield "What has no records yet: tables and figures of the four papers (`fedtailor reproduce NAME`), and questions"
    yield "of our own.\n"
    yield from left
    yield from (
        f"- {study['title']} (`fedtailor compare results/studies/{name}.toml`)"
        for study in studies()
        if "preset" not in study and not has_records(study)
        for name in study["comparisons"]
    )


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
    if "against" in study:
        yield from pairs_of_rows(study)
    yield f"\n    {command(study)}\n"
    yield from _remarks(study)


def pairs_of_rows(study: Study) -> Iterator[str]:
    """Write the differences of the rows from one of them, or from its run with `against_set`, over the clients of all
    seeds. Where the paper's round is the best by test data, they are of the last one."""
    made, base = reproduction(study), study["against"]
    other = reproduction({**study, "set": study.get("against_set", study.get("set", {}))})
    last, several, pairs = has_last(made.outcome()), len(made.preset.columns) > 1, []
    against = next(row for row in other.preset.rows if row.name == base)
    for row, column in made.cells():
        values, theirs = clients_of(made, row, column, last), clients_of(other, against, column, last)
        if values and theirs and values != theirs:
            title = f"{column}, `{row.name}`" if several else f"`{row.name}`"
            pairs.append(Pair.of(title + by_seed(values, theirs), values, theirs))
    changed = ", ".join(f"{name} = {value}" for name, value in study.get("against_set", {}).items())
    beside = f"`{base}`" + (f" with {changed}" if changed else "")
    yield f"\nDifference from {beside} on the same clients ({'last round' if last else 'same rounds'}):\n"
    yield from _table(HEAD, list(rows_of_pairs(pairs)))


def by_seed(values: ClientsOfSeeds, theirs: ClientsOfSeeds) -> str:
    """Write the mean difference of each seed, if there are several."""
    seeds = sorted({seed for seed, _ in values})
    found = (Pair.of("", {key: value for key, value in values.items() if key[0] == seed}, theirs) for seed in seeds)
    return f" (by seed: {', '.join(points(pair.mean) for pair in found)})" if len(seeds) > 1 else ""


def clients_of(made: Reproduction, row: Row, column: str, last: bool) -> ClientsOfSeeds:
    """Read the values of one cell's clients, of all seeds."""
    return {
        (result.experiment.seed, client): value
        for result in made.results(row, column, last)
        for client, value in client_values(result).items()
    }


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
    if not short.startswith("Shortened"):
        short = f"All {outcome['rounds']} rounds. {short}".rstrip()
    return f"**{short}** {', '.join(said).capitalize()}."


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
    if "gain" in study:
        yield f"{rule(study)}\n"
    if not has_records(study):
        yield "**Not run yet.**\n"
    else:
        yield from lines_of_comparisons(study)
    yield from (f"    fedtailor compare results/studies/{name}.toml" for name in study["comparisons"])
    yield ""
    yield from _remarks(study)


def rule(study: Study) -> str:
    """Write the rule of a study that decides a question."""
    base = f"{SYMBOLS[study['over']]} = {study['against']:g}"
    return (
        f"**The rule, fixed before the first run**: a gain over {base} of more than {study['gain']:g} points with "
        f"p < {LEVEL:g} decides for that {SYMBOLS[study['over']]}; all else decides nothing for it. Differences are of "
        "one client within one seed, then their mean over the seeds; p is Wilcoxon's over the clients, by Holm."
    )


def has_records(study: Study) -> bool:
    """Find out whether the comparisons of a study were run."""
    return all((COMPARISONS / name / "result.json").is_file() for name in study["comparisons"])


def lines_of_comparisons(study: Study) -> Iterator[str]:
    """Write the tables of a study's comparisons."""
    found = {name: read_result(name) for name in study["comparisons"]}
    over, by = study["over"], study.get("by")
    values = list(dict.fromkeys(line["settings"].get(over) for result in found.values() for line in result["lines"]))
    rows = []
    for name, result in found.items():
        for value in dict.fromkeys(_setting(line, by) for line in result["lines"]):
            cells = {line["settings"].get(over): line for line in result["lines"] if _setting(line, by) == value}
            most = max(len(line["seeds"]) for line in result["lines"])
            rows.append([line_title(study, name, value), *(_value(cells.get(column), most) for column in values)])
    yield from _table(["", *(f"{SYMBOLS.get(over, over)} = {value:g}" for value in values)], rows)
    seeds = sorted({seed for result in found.values() for line in result["lines"] for seed in line["seeds"]})
    over_seeds = f"Mean ± standard deviation over the seeds {', '.join(map(str, seeds))}."
    yield f"\n{over_seeds if len(seeds) > 1 else f'Seed {seeds[0]}.'} ✓: chosen by validation data.\n"
    if study.get("by") == "method":
        yield from pairs_of_methods(study, found)
    elif "against" in study:
        yield from pairs_of_lines(study, found)


def _setting(line: dict[str, Any], name: str | None) -> Any:
    """Return what a line has for a setting, or its method."""
    return line["method"] if name == "method" else line["settings"].get(name)


def line_title(study: Study, name: str, value: float | str | None) -> str:
    """Name a line of a table of comparisons: the comparison, and the value of its second setting, or its method."""
    title: str = study["comparisons"][name]
    if isinstance(value, str):
        return f"{title}`{value}`"
    return title if value is None else f"{title}{study['by']} = {value:g}"


def pairs_of_methods(study: Study, found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Write the differences of all methods from one of them, each with the value that validation data chose for it."""
    pairs = []
    for name, result in found.items():
        chosen = {line["method"]: line["title"] for line in result["lines"] if line["chosen"]}
        values = {method: of_clients(result["clients"]["clients"], title) for method, title in chosen.items()}
        base = values.pop(study["against"])
        pairs += [Pair.of(line_title(study, name, method), own, base) for method, own in values.items()]
    over = SYMBOLS.get(study["over"], study["over"])
    yield f"Difference from `{study['against']}` on the same clients, each with its own {over} (✓), mean over seeds:\n"
    yield from _table(HEAD, list(rows_of_pairs(pairs)))
    yield ""


def pairs_of_lines(study: Study, found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Write the differences of the lines of comparisons from the one with a value of the setting."""
    over, by, base = study["over"], study.get("by"), study["against"]
    pairs = []
    for name, result in found.items():
        clients = result["clients"]["clients"]
        of_base = {line["settings"].get(by): line for line in result["lines"] if line["settings"].get(over) == base}
        for line in result["lines"]:
            settings = line["settings"]
            theirs = of_base.get(settings.get(by))
            if settings.get(over) == base or theirs is None or line["seeds"] != theirs["seeds"]:
                continue  # runs that failed have no pair
            title = f"{line_title(study, name, settings.get(by))}, {SYMBOLS.get(over, over)} = {settings[over]:g}"
            pairs.append(Pair.of(title, *(of_clients(clients, each["title"]) for each in (line, theirs))))
    yield f"Difference from {SYMBOLS.get(over, over)} = {base:g} on the same clients, mean over seeds:\n"
    yield from _table(HEAD, list(rows_of_pairs(pairs)))
    yield ""
    if "gain" in study:
        better = [pair.title for pair in decided(pairs) if pair.mean > study["gain"]]
        yield f"**By the rule, this decides for {', '.join(better) or 'none'}.**\n"


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
