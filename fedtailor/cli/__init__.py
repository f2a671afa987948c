"""The command line. A command's module is imported when that command is called, so that `--help` answers at once."""

import importlib
import re
import signal
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from fedtailor import __version__
from fedtailor.errors import FedtailorError

# The commands by the module that has them, in the order of `--help`.
COMMANDS = {
    "running": ("run", "resume", "show"),
    "advising": ("advise",),
    "comparing": ("compare",),
    "reporting": ("report",),
    "watching": ("watch",),
    "deploying": ("export", "predict", "adapt"),
    "reproducing": ("presets", "reproduce"),
    "catalogues": ("methods", "data", "models"),
}
STYLE: dict[str, Any] = {"add_completion": False, "rich_markup_mode": "rich", "pretty_exceptions_enable": False}


class Commands(TyperGroup):
    """All commands by name and first line. The one that is called is built from its function, with its options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, known, rest = super().resolve_command(ctx, args)
        return name, known and _built(str(name)), rest


def _built(name: str) -> Any:
    module = next(module for module, names in COMMANDS.items() if name in names)
    alone = typer.Typer(**STYLE)
    alone.command(name)(getattr(importlib.import_module(f"fedtailor.cli.{module}"), name))
    return typer.main.get_command(alone)


app = typer.Typer(
    name="fedtailor",
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Personalized federated learning: a model tailored to every client, learned together, with the data staying "
    "where it is.\n\nBegin with [bold]fedtailor run fedavg[/]: it needs no files.",
    **STYLE,
)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="print the version")) -> None:
    if version:
        typer.echo(f"fedtailor {__version__}")
        raise typer.Exit


def _first_line(name: str, source: str) -> str:
    """The first line of a function's docstring, read from the source: importing the module takes far longer."""
    found = re.search(rf'^def {name}\(.*?"""(.*?)("""|\n)', source, re.MULTILINE | re.DOTALL)
    assert found, f"{name} has no docstring"
    return found[1]


for module, names in COMMANDS.items():
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    for name in names:
        app.command(name, help=_first_line(name, source))(lambda: None)


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
    from rich.markup import escape

    from fedtailor.cli.display import err

    err.print(f"[bold red]Error:[/] {escape(sentence)}", soft_wrap=True, highlight=False)
    sys.exit(2)


def _as_interrupt(*_: Any) -> None:
    """A polite end by the system leaves a resumable run, as Ctrl-C does."""
    raise KeyboardInterrupt
