"""The command line. A command's module is imported when that command is called, so that `--help` answers at once."""

import importlib
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fedtailor._common.errors import FedtailorError, brief, lacks_memory
from fedtailor._common.version import __version__
from fedtailor.cli.completion import mend_bash_words
from fedtailor.cli.help import print_help

# In the order of `--help`: each command's module, and the first line of its docstring. Reading that from the module
# would import it, which takes far longer than all of `--help`.
BY_PURPOSE = {
    "Run and look": {
        "run": ("run", "Run one method, or several side by side on the same clients."),
        "resume": ("run", "Continue an interrupted run from its last checkpoint."),
        "show": (
            "run",
            "Show a run: its metrics, its rounds, its clients. Or a comparison: its tables, and what is unfinished.",
        ),
        "watch": ("watch", "Watch a run or a comparison from another terminal: progress, metric, bytes, time left."),
        "report": (
            "report",
            "Make one HTML page of runs: table, learning curves, clients, data, and each method's own figures.",
        ),
    },
    "Compare and choose": {
        "compare": (
            "compare",
            "Run methods on the same clients with several seeds, and print the table that papers print.",
        ),
        "tune": ("tune", "Choose each method's settings on validation data, with the same budget for all."),
        "advise": ("advise", "Recommend a method for these clients, or none, after a short race between several."),
        "leak": ("leak", "Reconstruct clients' samples from what methods really upload, as a curious server could."),
    },
    "Use the models": {
        "export": ("model_files", "Write the models of a run as files that plain PyTorch loads."),
        "predict": (
            "model_files",
            "Predict with a model file: classes and probabilities, and the accuracy if there are labels.",
        ),
        "adapt": ("model_files", "Give clients that never took part a model, and fine-tune it on their own data."),
    },
    "Papers": {
        "presets": ("reproduce", "List the papers' tables and figures that can be reproduced; with a NAME, show one."),
        "reproduce": ("reproduce", "Reproduce a table or figure of a paper: our numbers beside theirs."),
    },
    "Catalogues": {
        "methods": ("catalogues", "List the methods: what each does, its parameters, and what leaves a client."),
        "data": ("catalogues", "List the data sets; with a NAME, show how it is partitioned among clients."),
        "models": ("catalogues", "List the networks; with a NAME, show its layers on a data set."),
        "settings": (
            "catalogues",
            "List the settings that come with fedtailor: tuned once for each method, on several data.",
        ),
    },
    "This machine": {"doctor": ("doctor", "Look at this installation and this machine: what a bug report needs.")},
}
COMMANDS = {name: about for commands in BY_PURPOSE.values() for name, about in commands.items()}
# Groups of commands for federations of real sites: the coordinator's, and a site's.
GROUPS = {
    "deploy": (
        "Plan and run a federation of real sites: what its coordinator does.",
        {
            "plan": ("kits", "Check a plan, and make a directory for each role: what to run, and its keys."),
            "approve": ("kits", "Sign the request of a site, so that it may take part."),
            "renew": ("kits", "Make new keys of the server and the admin, before their certificates end."),
            "revoke": ("kits", "Revoke all certificates that a site has so far."),
            "run": ("site_run", "Run the plan with its sites, on from where it was stopped."),
            "status": ("site_run", "Show which sites are there, and how far the run is."),
            "share": ("kits", "Write what a hospital that comes later needs to adapt the model, and no more."),
            "doctor": ("kits", "Check a kit, or a running site, for unsafe settings and old certificates."),
        },
    ),
    "site": (
        "Take part in a federation: what the engineer of a site does.",
        {
            "check": ("site_check", "Read the site's data, and show exactly what would leave. Nothing is sent."),
            "status": ("site_check", "Show what private trainings have cost the site's data so far."),
            "request": ("kits", "Make the site's keys, which stay here, and a request to be signed."),
            "install": ("kits", "Make the site's kit from the coordinator's answer."),
            "start": ("site_run", "Take part: connect to the server and do the work that it asks for."),
            "leave": ("site_check", "Remove the site's states and keys, and say what remains of its data elsewhere."),
        },
    ),
}
REAL_SITES = "Real sites"  # the title of both in `--help`
AT_WORK = {
    *("run", "resume", "report", "compare", "tune", "advise", "leak", "export", "adapt", "reproduce")
}  # commands that take their time: they have the switches, which may also stand before them
PANEL = "Output"
Json = Annotated[bool, typer.Option("--json", help="for programs")]
JsonOfMany = Annotated[bool, typer.Option("--json", rich_help_panel=PANEL, help="for programs")]  # of many options
STYLE: dict[str, Any] = {"rich_markup_mode": "rich", "pretty_exceptions_enable": False}


@dataclass
class Loudness:
    """The state of the switches in this process. Warnings and errors are shown always."""

    quiet: bool = False
    verbose: bool = False


loudness = Loudness()


class Command(TyperCommand):
    """A command whose page of help is our own, and whose function need not know the switches."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        print_help(self, ctx)

    def invoke(self, ctx: Any) -> Any:
        loudness.quiet |= ctx.params.pop("quiet", False)
        loudness.verbose |= ctx.params.pop("verbose", False)
        if loudness.quiet and loudness.verbose:
            raise FedtailorError("--quiet and --verbose exclude each other: give one of them.")
        return super().invoke(ctx)


class Commands(TyperGroup):
    """All commands by name and summary. The one that is called is built from its function, with its options."""

    table = COMMANDS

    def format_help(self, ctx: Any, formatter: Any) -> None:
        print_help(self, ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, known, rest = super().resolve_command(ctx, args)
        return name, _built(str(name), self.table[str(name)][0]) if known and str(name) in self.table else known, rest

    def invoke(self, ctx: Any) -> Any:
        """Run a command. An exception of a method's own, which `--debug` lets pass with a note of where it was raised,
        is shown in full here: Typer would take an EOFError for the user's wish to stop, `main` an OSError for a file
        that the user named."""
        try:
            return super().invoke(ctx)
        except FedtailorError:
            raise
        except Exception as error:
            if not getattr(error, "__notes__", None):
                raise
            traceback.print_exception(error)
            raise typer.Exit(1) from None


def _built(name: str, module: str) -> Any:
    alone = typer.Typer(add_completion=False, **STYLE)
    alone.command(name, cls=Command)(getattr(importlib.import_module(f"fedtailor.cli.{module}"), name))
    command = typer.main.get_command(alone)
    if name in AT_WORK:
        command.params += [option for option in typer.main.get_command(app).params if option.name in vars(loudness)]
    return command


app = typer.Typer(
    name="fedtailor",
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Personalized federated learning: a model tailored to every client, learned together, with the data staying "
    "where it is.\n\nBegin with `fedtailor run fedavg`: it needs no files.",
    **STYLE,
)


@app.callback(invoke_without_command=True)
def _begin(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", rich_help_panel=PANEL, help="no progress and no notes; results, warnings and errors stay"
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            rich_help_panel=PANEL,
            help="a line for each round, run directories, and where warnings come from",
        ),
    ] = False,
) -> None:
    if version:
        typer.echo(f"fedtailor {__version__}")
        raise typer.Exit
    loudness.quiet, loudness.verbose = quiet, verbose


for title, commands in BY_PURPOSE.items():
    for name, (_, summary) in commands.items():
        app.command(name, help=summary, rich_help_panel=title)(lambda: None)
for name, (summary, table) in GROUPS.items():
    group = typer.Typer(cls=type("Group", (Commands,), {"table": table}), no_args_is_help=True, **STYLE)
    for command, (_, about) in table.items():
        group.command(command, help=about)(lambda: None)
    app.add_typer(group, name=name, help=summary, rich_help_panel=REAL_SITES)


def main() -> None:
    """Run the command line. Bad input is one sentence and exit code 2, never a traceback."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    if os.environ.get("_FEDTAILOR_COMPLETE") == "complete_bash":
        mend_bash_words()
    try:
        app()
    except FedtailorError as error:
        _refuse(str(error))
    except Exception as error:
        if lacks_memory(error):
            _refuse(
                f"There is not enough memory ({brief(error)}): take a smaller model or batch, fewer --workers, or "
                "--states disk, and go on with `fedtailor resume` if the run had begun."
            )
        if not isinstance(error, OSError):
            raise
        # A file that may not be read, a disk that is full.
        _refuse(": ".join(str(part) for part in (error.filename, error.strerror or error) if part) + ".")


def _refuse(sentence: str) -> None:
    from fedtailor.cli.display import complain

    complain("Error:", sentence, "bold red")
    sys.exit(2)


def _as_interrupt(*_: Any) -> None:
    """Treat a polite end by the system as Ctrl-C: it leaves a resumable run."""
    raise KeyboardInterrupt
