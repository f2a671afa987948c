"""`fedtailor show` of a comparison: its tables again, and what is unfinished."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtailor.cli.display import json_text, out

if TYPE_CHECKING:
    from fedtailor.studies.comparison import Progress


def show_comparison(directory: Path, json: bool) -> None:
    """Show a comparison as `compare` did. Nothing that it names is run."""
    from fedtailor.reporting.client_tables import rich_clients
    from fedtailor.reporting.tables import rich_table
    from fedtailor.studies.client_results import client_table
    from fedtailor.studies.comparison import read_comparison

    progress = read_comparison(directory)
    if json:
        typer.echo(json_text(_plain(progress)))
        return
    if progress.summary is not None:
        whole = f"`fedtailor show {directory} --json`"
        out.print(rich_table(progress.summary, out.width))
        out.print(rich_clients(client_table(progress.summary), out.width, whole))
    for title, (rounds, asked) in progress.unfinished.items():
        why = f": {progress.failed[title]}" if title in progress.failed else "."
        out.print(f"Not finished: {title}, {rounds} of {asked} rounds{why}", highlight=False, soft_wrap=True)
    if progress.unfinished:
        again = f"fedtailor compare {directory / 'comparison.toml'} --out {directory}"
        out.print(f"Continue with: {again}", highlight=False, soft_wrap=True)


def _plain(progress: "Progress") -> dict[str, object]:
    from fedtailor.server.run_directory import plain
    from fedtailor.studies.client_results import client_table

    summary = progress.summary
    tables = {} if summary is None else {**summary.plain(), "clients": client_table(summary).plain()}
    unfinished = {title: {"rounds": done, "of": asked} for title, (done, asked) in progress.unfinished.items()}
    return {**plain(tables), "unfinished": unfinished, "failed": progress.failed}
