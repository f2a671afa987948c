"""The memory of this machine."""

import os

ASSUMED = 16e9  # bytes, where the system does not say


def half_of_memory() -> float:
    """Return half of the bytes of this machine's memory: the most that one thing may take."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    except (AttributeError, ValueError, OSError):
        return ASSUMED / 2
