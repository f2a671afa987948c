"""The errors that are the user's to mend: one sentence that says what is wrong and what to do. Warnings, too."""

import errno
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).parents[1]
SHOWN = 30  # names in a message


class FedtailorError(Exception):
    """Bad input. The command line prints its message without a traceback and exits with code 2."""


class ClientFailure(UserWarning):
    """A client was left out of a round, or was not measured in it."""


class ClientNote(UserWarning):
    """Something to know of a client that is no failure: it is back, or it tells no metrics."""


def unknown(kind: str, name: str, known: Iterable[str]) -> FedtailorError:
    """The error for a name that does not exist, with the nearest one that does."""
    known = sorted(known)
    near = nearest(name, known)
    hint = f"known are {listed(known)}." if near is None else f"did you mean {shown(near)}?"
    return FedtailorError(f"There is no {kind} {shown(name)}: {hint}")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Find the name that is most like this one, whatever their case; None if none is like it (1: equal)."""
    by_lower = {each.lower(): each for each in known}
    near = get_close_matches(str(name)[:100].lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None


def brief(error: BaseException) -> str:
    """A foreign error in one line: its kind and the first sentence of what it says, without the full stop."""
    text = re.sub(r"^\[enforce fail at \S+\] .*?\. ", "", str(error).strip())  # where PyTorch's source says so
    said = re.split(r"\n|\.\s+(?=[A-Z])", text)[0].rstrip(".")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def shown(value: Any, most: int = 80) -> str:
    """Write a value of anybody's into a message: in one line, and the beginning of a long one."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of too many digits, a list in a list in a list …
        text = f"a {type(value).__name__} that is too large"
    return text if len(text) <= most else f"{text[:most]}…"


def listed(names: Sequence[str]) -> str:
    """List names of anybody's in a message: the first of many, the beginning of long ones."""
    short = [name if name.isprintable() and len(name) <= 40 else shown(name, 40) for name in names[:SHOWN]]
    return ", ".join(short) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def wanted(problem: Any) -> str:
    """Say in plain words what a value must be, from one of pydantic's problems."""
    kind, context = problem["type"], problem.get("ctx", {})
    words = {
        "int_parsing": "a whole number",
        "int_from_float": "a whole number",
        "int_type": "a whole number",
        "float_parsing": "a number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_parsing": "true or false",
        "string_type": "text",
        "dict_type": "a table of names and values",
        "model_type": "a table of names and values",
    }
    limits = {
        "greater_than": ("above", "gt"),
        "greater_than_equal": ("at least", "ge"),
        "less_than": ("below", "lt"),
        "less_than_equal": ("at most", "le"),
    }
    if kind in limits:
        return f"{limits[kind][0]} {context[limits[kind][1]]:g}"
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "")
    if kind == "value_error":
        return str(context["error"])
    return words.get(kind, str(problem["msg"]).lower())


def explained(error: BaseException) -> str:
    """A foreign error in one line, with the file and line of the user's code that raised it; our own as it is."""
    if isinstance(error, FedtailorError):
        return str(error).rstrip(".")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{brief(error)}{where}"


def lacks_memory(error: BaseException | None) -> bool:
    """Find out whether an error says that there is not enough memory; PyTorch's have no class of their own."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or bool(re.search("can't allocate memory|out of memory", str(error)))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's code that called the library: what Python shows beside the message is that line,
    and none of fedtailor's own."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and (_is_library(file := frame.f_code.co_filename) or Path(file).is_relative_to(PACKAGE)):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_library(file: str) -> bool:
    """Find out whether a source file is fedtailor's own (not a method's), PyTorch's or Python's."""
    path = Path(file)
    ours = path.is_relative_to(PACKAGE) and "methods" not in path.parts
    return ours or "site-packages" in path.parts or path.is_relative_to(Path(os.__file__).parent)
