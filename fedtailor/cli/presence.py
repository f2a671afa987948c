"""The sites of a federation, as its coordinator last wrote them down: which are present, and why others are not."""

import json
from pathlib import Path
from typing import Any

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import read_bytes
from fedtailor._common.text import visible

STATUS, PRESENT = "status.json", "present"
NAMED, LONG = 10, 100  # silent sites that are named, and characters of each text


def read_status(run: Path) -> dict[str, Any]:
    """Read what the coordinator wrote down: its phase, the round and the sites. {} if that cannot be read."""
    try:
        return dict(json.loads(read_bytes(run / STATUS))) if (run / STATUS).is_file() else {}
    except (FedtailorError, ValueError, TypeError, RecursionError):
        return {}


def sites_line(run: Path) -> str:
    """Say which sites of a run are present and why others are not; "" if it has none, or its file cannot be read."""
    status = read_status(run)
    try:
        sites = {str(name): str(state) for name, state in status["sites"].items()}
        phase = f"round {status['round']}" if status["phase"] == "round" else str(status["phase"])
    except (KeyError, AttributeError):
        return ""
    silent = [f"{_short(name)} ({_short(why)})" for name, why in sites.items() if why != PRESENT]
    more = [f"and {len(silent) - NAMED} more"] if len(silent) > NAMED else []
    said = f"{len(sites) - len(silent)} of {len(sites)} sites present ({_short(phase)})."
    return said + (f" Silent: {', '.join([*silent[:NAMED], *more])}." if silent else "")


def _short(text: str) -> str:
    """Write a text of a stranger's in one line, and the beginning of a long one."""
    return visible(text if len(text) <= LONG else f"{text[:LONG]}…")
