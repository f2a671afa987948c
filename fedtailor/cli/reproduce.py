"""`fedtailor presets` and `reproduce`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor._common.errors import FedtailorError
from fedtailor.cli import Json, loudness
from fedtailor.cli.completion import completer_of, methods
from fedtailor.cli.completion import presets as preset_names
from fedtailor.cli.display import (
    RoundProgress,
    definition_table,
    human_count,
    human_time,
    interrupted,
    marked,
    out,
    plain_table,
    print_json,
    progress_bars,
    say,
    table_of,
)
from fedtailor.cli.options import Assignments, check_assignment, parse_assignments, with_assignments

if TYPE_CHECKING:
    from fedtailor.server.records import Plain
    from fedtailor.studies.presets import Preset
    from fedtailor.studies.reproduction import Reproduction

OF_PRESETS: dict[str, Any] = {"autocompletion": preset_names}


def presets(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="a preset, to see its settings", **OF_PRESETS)
    ] = None,
    json: Json = False,
) -> None:
    """List the papers' tables and figures that can be reproduced; with a NAME, show one."""
    from fedtailor.studies.presets import find_preset
    from fedtailor.studies.presets import presets as all_presets

    shown = [find_preset(name)] if name else list(all_presets().values())
    if json:
        print_json([_plain(preset) for preset in shown])
    elif name:
        _show(shown[0])
    else:
        cells = [(p.name, f"{p.title} ({len(p.rows)} methods)", _columns(p)) for p in shown]
        out.print(definition_table("Presets", ("name", "what it is", "columns: NAME-COLUMN"), cells))
        out.print("Reproduce one with: fedtailor reproduce NAME")


def _columns(preset: "Preset") -> str:
    whole = preset.one_run or len(preset.columns) == 1
    return "" if whole else ", ".join(preset.columns)


def _plain(preset: "Preset") -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(preset), "missing": [row.name for row in preset.rows if row.missing]}


def _show(preset: "Preset") -> None:
    """Print a preset with its settings and the paper's numbers."""
    from fedtailor._common.toml import write_toml
    from fedtailor.studies.outcome import speedup_text

    rows = []
    for row in preset.rows:
        printed = zip(preset.columns, row.theirs, strict=True)
        cells = [f"{text or '–'}{speedup_text(preset.paper_speedup(row, column))}" for column, text in printed]
        rows.append([row.title + " (missing)" * row.missing, *_narrow(cells, 5)])
    out.print(table_of(f"{preset.name}: {preset.title}", ("method", *preset.columns), rows))
    claim = f"The paper: {preset.claim}" if preset.claim else ""
    _print_notes(preset.paper, [text for text in (preset.not_in_paper, *preset.notes, claim) if text])
    out.print("\nSettings:", style="bold")
    out.print(write_toml(preset.settings))
    for column, settings in preset.columns.items():
        if settings:
            out.print(f"{column}: {settings}")
    for row in preset.rows:
        if row.settings:
            out.print(f"{row.name}: {row.settings}")


def _narrow(cells: list[str], many: int) -> list[str]:
    """Leave out the spaces around ± where there are `many` cells, so that a line fits 80 columns."""
    return [cell.replace(" ± ", "±") for cell in cells] if len(cells) >= many else cells


def _print_notes(paper: str, notes: list[str]) -> None:
    out.print(f"{paper}.")
    for note in notes:
        out.print(f"- {note}")


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a preset: see fedtailor presets", **OF_PRESETS)],
    rounds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="a shorter version, which says so in its result")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="METHOD", autocompletion=methods, help="one of its methods (may be repeated)"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="runs of every cell, with the seeds 0, 1, …")] = 1,
    cost: Annotated[bool, typer.Option("--cost", help="say what it costs, and stop")] = False,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="other data in place of the preset's, or where its folder lies",
            autocompletion=completer_of("data"),
        ),
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help=r"where data sets lie \[FEDTAILOR_DATA, else ./data]")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=r"worker processes \[as many as cores]")
    ] = None,
    assignments: Assignments = None,
    to: Annotated[Path, typer.Option("--out", metavar="DIR", help="where its runs are kept")] = Path("reproductions"),
) -> None:
    """Reproduce a table or figure of a paper: our numbers beside theirs.

    It says what it costs before it begins. Runs that are finished are not run again, and one that was interrupted
    goes on, with the same command.

    [bold]Examples[/]
      fedtailor reproduce pflego/table1-fmnist-high
      fedtailor reproduce pgfed/table2-25 --only pgfed --only fedper
      fedtailor reproduce pgfed/table1-cifar10-25 --rounds 5
      fedtailor reproduce fedacs/table1-fmnist --set model=mlp --set lr=0.05
    """
    from fedtailor.reporting.reproduced import draw_outcome
    from fedtailor.studies.presets import find_preset
    from fedtailor.studies.reproduction import Reproduction

    preset = find_preset(name)
    given = {"rounds": rounds, "data": data, "data_dir": data_dir, "workers": workers}
    changes = sections(preset, parse_assignments(assignments or []))
    changes |= {setting: value for setting, value in given.items() if value is not None}
    work = Reproduction(preset.of_rows(only) if only else preset, to, seeds, changes)
    try:
        todo = work.todo() if loudness.quiet and not cost else _announce(work)
        if cost:
            return
        _perform(work, todo)
        _compute_curves(work)
        outcome = work.outcome()
    except KeyboardInterrupt:
        interrupted(f"Interrupted. Continue with the same command: fedtailor reproduce {name} …")
    _print_outcome(outcome)
    stem = work.write(outcome)
    drawn = "".join(f", {path.suffix}" for path in draw_outcome(outcome, stem))
    say(f"Recorded in {stem}.md, .json{drawn}")


def sections(preset: "Preset", assigned: dict[str, Any]) -> dict[str, Any]:
    """Put what --set names into its sections: a parameter goes to the rows whose method has it."""
    from fedtailor.methods import method_class

    methods = sorted({row.method for row in preset.rows if not row.missing})
    known = {name for method in methods for name in method_class(method).model_fields}
    for name in assigned:
        check_assignment(name, known, methods)
        if name in ("method", "seed", "parameters"):
            raise FedtailorError(f"A preset's {name} cannot be set: choose rows by --only, and seeds by --seeds.")
    return with_assignments({}, assigned, known)


def _announce(work: "Reproduction") -> dict[Path, Any]:
    """Say what will be run and what it costs, after a short measurement. Returns the runs that are left."""
    preset, every, todo = work.preset, work.experiments(), work.todo()
    samples = seconds = 0.0
    with progress_bars() as bars:
        task = bars.add_task("measuring", total=len(todo), status="", unit="run")
        for experiment in todo.values():
            estimate = work.cost(experiment)
            samples, seconds = samples + estimate.samples, seconds + estimate.seconds
            bars.advance(task)
        bars.update(task, visible=False)
    out.print(marked(f"{preset.name}:", "bold", preset.title))
    if missing := [row.name for row in preset.rows if row.missing]:
        out.print(f"Missing, as not in the catalogue yet: {', '.join(missing)}", style="yellow")
    ready = len(every) - len(todo)
    until = ", at most" if preset.target is not None else ""
    runs = f"{len(every)} run{'s' if len(every) > 1 else ''} of {work.rounds} rounds"
    before = f", {ready} of them done already" if ready else ""
    out.print(
        f"{runs}{before}. "
        f"To be trained on{until}: {human_count(samples)} samples, about {human_time(seconds)} on this machine."
    )
    return todo


def _perform(work: "Reproduction", todo: dict[Path, Any]) -> None:
    with progress_bars() as bars:
        overall = bars.add_task("all runs", total=len(todo), status="", unit="run") if len(todo) > 1 else None
        for path, experiment in todo.items():
            bar = RoundProgress(bars, f"{experiment.method}, {_difference(experiment)}", experiment.rounds)
            work.run(path, experiment, bar.round, bar.start)
            if overall is not None:
                bars.advance(overall)


def _compute_curves(work: "Reproduction") -> None:
    """Compute what a figure shows beside its runs' numbers, which are then found in files."""
    if rows := work.curves():
        with progress_bars() as bars:
            task = bars.add_task("curves", total=len(rows), status="", unit="row")
            for row in rows:
                work.details(row)
                bars.advance(task)


def _difference(experiment: Any) -> str:
    return f"{experiment.clients or '?'} clients, seed {experiment.seed}"


def _print_outcome(outcome: "Plain") -> None:
    from fedtailor.studies.outcome import further_tables, last_round, ours_text, paper_text, remarks, shortened

    table = plain_table(f"{outcome['preset']}: {outcome['title']}")
    table.add_column("method", style="bold", no_wrap=True)
    columns = [cell["column"] for cell in outcome["rows"][0]["cells"]]
    for column in columns:
        table.add_column(f"{column}\nours", justify="right", style="green")
        table.add_column("\npaper", justify="right")
    for row in outcome["rows"]:
        pairs = [(ours_text(outcome, row, cell), paper_text(cell)) for cell in row["cells"]]
        table.add_row(row["title"], *_narrow([text for pair in pairs for text in pair], 6))
    out.print(table)
    last = last_round(outcome)
    for further in (*([last] if last else []), *further_tables(outcome)):
        out.print(further.title, style="table.title")  # as a table's title it would be as narrow
        out.print(table_of(None, further.head, further.rows))
    if text := shortened(outcome):
        out.print(text, style="yellow")
    _print_notes(outcome["paper"], remarks(outcome))
