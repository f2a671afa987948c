"""A finding of the doctor."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something unsafe: which check found it, what is wrong, and how to mend it."""

    check: str
    what: str
    mend: str
