"""The errors that are the user's to mend: one sentence that says what is wrong and what to do."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class FedtailorError(Exception):
    """Bad input. The command line prints its message without a traceback and exits with code 2."""


def unknown(kind: str, name: str, known: Iterable[str]) -> FedtailorError:
    """The error for a name that does not exist, with the nearest one that does."""
    known = sorted(known)
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
    return FedtailorError(f"There is no {kind} {name!r}: {hint}")


def brief(error: BaseException) -> str:
    """A foreign error in one line: its kind and the first sentence of what it says, without the full stop."""
    said = re.split(r"\n|\.\s+(?=[A-Z])", str(error).strip())[0].rstrip(".")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def wanted(problem: Any) -> str:
    """What a value must be, in plain words, from one of pydantic's problems."""
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
