"""The command line. Commands import what they need when they are called, so that `--help` answers at once."""

import signal
import sys
from typing import Any

import typer
from rich.markup import escape

from fedtailor import __version__
from fedtailor.cli import advising, catalogues, comparing, deploying, reporting, reproducing, running, watching
from fedtailor.cli.display import err
from fedtailor.errors import FedtailorError

app = typer.Typer(
    name="fedtailor",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Personalized federated learning: a model tailored to every client, learned together, with the data staying "
    "where it is.\n\nBegin with [bold]fedtailor run fedavg[/]: it needs no files.",
)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="print the version")) -> None:
    if version:
        typer.echo(f"fedtailor {__version__}")
        raise typer.Exit


for command in (
    running.run,
    running.resume,
    running.show,
    advising.advise,
    comparing.compare,
    reporting.report,
    watching.watch,
    deploying.export,
    deploying.predict,
    deploying.adapt,
    reproducing.presets,
    reproducing.reproduce,
    catalogues.methods,
    catalogues.data,
    catalogues.models,
):
    app.command()(command)


def main() -> None:
    """Run the command line: bad input is one sentence and exit code 2, never a traceback."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        app()
    except FedtailorError as error:
        _refuse(str(error))
    except OSError as error:  # a file that may not be read, a disk that is full
        _refuse(": ".join(str(part) for part in (error.filename, error.strerror or error) if part) + ".")


def _refuse(sentence: str) -> None:
    err.print(f"[bold red]Error:[/] {escape(sentence)}", soft_wrap=True, highlight=False)
    sys.exit(2)


def _as_interrupt(*_: Any) -> None:
    """A polite end by the system leaves a resumable run, as Ctrl-C does."""
    raise KeyboardInterrupt
