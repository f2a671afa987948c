"""The switches of a command's output: --json, and --quiet and --verbose, which say how much there is beside results.

The latter two stand before a command or behind it. Warnings and errors are shown always.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from fedtailor._common.errors import FedtailorError

PANEL = "Output"
Json = Annotated[bool, typer.Option("--json", help="for programs")]
JsonOfMany = Annotated[bool, typer.Option("--json", rich_help_panel=PANEL, help="for programs")]  # of many options
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

    switches = [parameter("quiet", Quiet, False), parameter("verbose", Verbose, False)]
    return with_parameters(wrapped, command, [*inspect.signature(command).parameters.values(), *switches])


def parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """A parameter that becomes an option of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_parameters(
    wrapped: Callable[..., None], command: Callable[..., None], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """Give a wrapper the name and help of its command, and these parameters, from which Typer makes the options."""
    by_name = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {one.name: one.annotation for one in by_name}
    return wrapped
