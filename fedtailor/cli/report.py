"""`fedtailor report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedtailor._common.errors import FedtailorError
from fedtailor.cli.completion import runs_and_comparisons
from fedtailor.cli.display import complain, human_bytes, interrupted, progress_bars, say, working
from fedtailor.reporting.column_names import HELP, read_columns

if TYPE_CHECKING:
    from fedtailor.reporting.marks import Figure


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR", help="run directories, or directories that contain some", autocompletion=runs_and_comparisons
        ),
    ],
    to: Annotated[Path, typer.Option("--out", metavar="FILE", help="the page")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="every figure as PNG, PDF and SVG for a paper, too")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(metavar="DIR", help="the table as text, Markdown and LaTeX for a paper, too")
    ] = None,
    columns: Annotated[str | None, typer.Option(metavar="NAME,…", help=HELP)] = None,
    x: Annotated[
        Literal["rounds", "bytes", "time", "clock"],
        typer.Option(
            "--x",
            metavar="rounds|bytes|time|clock",
            help="what curves are drawn over first (clock: virtual time), and those of diagnostics at all",
        ),
    ] = "rounds",
) -> None:
    """Make one HTML page of runs: table, learning curves, clients, data, and each method's own figures.

    The page needs no server and no network. All runs in or below the directories are in it; they must be of the same
    data and by the same evaluation.

    [bold]Examples[/]
      fedtailor report runs/ditto-digits-1
      fedtailor report comparisons/digits-1 --out digits.html
      fedtailor report runs/local runs/pgfed --figures paper/figures --x bytes
      fedtailor report comparisons/digits-1 --tables paper --columns accuracy,gain,bytes
    """
    if to.is_dir():
        raise FedtailorError(f"{to} is a directory: give --out the name of a file, like {to / 'report.html'}.")
    for option, directory in (("figures", figures), ("tables", tables)):
        if directory is not None and directory.exists() and not directory.is_dir():
            raise FedtailorError(f"{directory} is a file: give --{option} the name of a directory.")
    chosen = read_columns(columns)
    from fedtailor.reporting.found_runs import read_runs
    from fedtailor.reporting.page import prepare, write_page
    from fedtailor.reporting.tables import write_readable

    if figures is not None:
        from fedtailor.reporting.paper import check_matplotlib

        check_matplotlib()
    try:
        with working("reading runs"):
            prepared = prepare(read_runs(directories), chosen, x)
        for note in prepared.notes:
            complain("Warning:", note)
        with working("drawing"):
            size = write_page(prepared, to)
        shown = f"{len(prepared.runs.results)} run{'s' if len(prepared.runs.results) > 1 else ''}"
        say(f"{shown} in {to} ({human_bytes(size)})")
        if figures is not None:
            _save(prepared.figures, figures)
        if tables is not None:
            names = ", ".join(path.name for path in write_readable(prepared.summary, tables, chosen))
            say(f"{names} in {tables}")
    except KeyboardInterrupt:
        interrupted("Interrupted. Call the same command again.")


def _save(prepared: "list[Figure]", directory: Path) -> None:
    from fedtailor.reporting.paper import FORMATS, save

    with progress_bars() as bars:
        task = bars.add_task("figures", total=len(prepared) * len(FORMATS), status="", unit="file")
        for path in save(prepared, directory):
            bars.update(task, advance=1, status=path.name)
    say(f"{len(prepared)} figures in {directory}, each as {', '.join(FORMATS)}")
