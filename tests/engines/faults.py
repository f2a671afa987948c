"""Exceptions of all kinds, and a method whose clients raise them."""

from typing import Any

import torch

import fedtailor as ft


class OutOfReagent(Exception):
    """An exception of the user's own that can be sent."""


class NeedsTwo(Exception):
    """An exception that is packed without a fault and cannot be unpacked."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def local_exception(text: str) -> Exception:
    class Local(Exception):
        """An exception that nobody elsewhere can name."""

    return Local(text)


def holding_a_function(text: str) -> Exception:
    error = OutOfReagent(text)
    error.function = lambda: 1  # type: ignore[attr-defined]
    return error


RAISED: dict[str, Any] = {
    "own": lambda: OutOfReagent("bottle 7 is empty"),
    "library": lambda: KeyError("theta"),
    "with a tensor": lambda: OutOfReagent("bottle 7 is empty", torch.ones(3)),
    "local": lambda: local_exception("bottle 7 is empty"),
    "cannot be unpacked": lambda: NeedsTwo("bottle 7", "8"),
    "holds a function": lambda: holding_a_function("bottle 7 is empty"),
}


class Raising(ft.Method):
    """FedAvg whose client 1 raises an exception in round 2."""

    kind: str = "own"

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        theta = client.descend(message["theta"])
        if client.id == 1 and client.round == 2:
            try:
                _ = {}["reagent"]
            except KeyError as error:
                raise RAISED[self.kind]() from error  # RAISED HERE
        return {"theta": theta}
