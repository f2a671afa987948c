"""The fixture that calls the command line."""

from tests.cli.calling import call

__all__ = ["call"]
