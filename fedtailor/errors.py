"""The errors that are the user's to mend: one sentence that says what is wrong and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class FedtailorError(Exception):
    """Bad input. The command line prints its message without a traceback and exits with code 2."""


def unknown(kind: str, name: str, known: Iterable[str]) -> FedtailorError:
    """The error for a name that does not exist, with the nearest one that does."""
    known = sorted(known)
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
    return FedtailorError(f"There is no {kind} {name!r}: {hint}")
