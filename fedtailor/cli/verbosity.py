"""The switches --quiet and --verbose: how much commands say beside their results.

They stand before a command or behind it. Warnings and errors are shown always.
"""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from fedtailor._common.errors import FedtailorError

PANEL = "Output"
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", rich_help_panel=PANEL, help="no progress and no notes; results, warnings and errors stay"
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        rich_help_panel=PANEL,
        help="a line for each round, run directories, and where warnings come from",
    ),
]


class Loudness:
    """The state of the switches in this process."""

    quiet = verbose = False

    def reset(self, quiet: bool, verbose: bool) -> None:
        """Take the switches that stand before a command."""
        self.quiet = self.verbose = False
        self.add(quiet, verbose)

    def add(self, quiet: bool, verbose: bool) -> None:
        """Take those behind it, too."""
        self.quiet, self.verbose = self.quiet or quiet, self.verbose or verbose
        if self.quiet and self.verbose:
            raise FedtailorError("--quiet and --verbose exclude each other: give one of them.")


loudness = Loudness()


def with_switches(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the two switches, which it need not know."""

    def wrapped(quiet: bool, verbose: bool, **values: Any) -> None:
        loudness.add(quiet, verbose)
        command(**values)

    own = inspect.signature(command).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    switches = {"quiet": Quiet, "verbose": Verbose}
    added = [inspect.Parameter(name, kind, default=False, annotation=about) for name, about in switches.items()]
    parameters = [*(p.replace(kind=kind) for p in own), *added]
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped
