"""The names of a table's columns, for `--columns`."""

from collections.abc import Sequence

from fedtailor._common.errors import FedtailorError, unknown
from fedtailor.training.metrics import METRICS

METRIC = "metric"  # the one that decides; it also goes by its own name
NAMES = (
    METRIC, "epsilon", "validation", "vs-best", "gain", "losing", "worst-decile", "std", "hostile", "backdoor",
    "failed", "rounds", "speed-up", "bytes-to-target", "clock-to-target", "bytes", "passes", "samples-per-second",
)  # fmt: skip
HELP = (
    "the table's columns in this order, with commas between them: accuracy or another metric (also one of yours), "
    f"{', '.join(NAMES[1:])} \\[all but other metrics]"
)


def read_columns(text: str | None) -> list[str] | None:
    """Read names with commas between them. Which are known depends on the runs, too."""
    if text is None:
        return None
    names = text.replace(",", " ").split()
    if not names:
        raise FedtailorError(f"--columns takes names with commas between them, like accuracy,gain,bytes, not {text!r}.")
    return names


def check_columns(names: Sequence[str], own: Sequence[str] = ()) -> None:
    """Refuse unknown names, and say which there are. `own` are those of the user's metrics."""
    known = [*NAMES, *METRICS, *own]
    for name in names:
        if name not in known:
            said = str(unknown("column", name, known))
            raise FedtailorError(f"{said[:-1]}, of {', '.join(known)}?" if said.endswith("?") else said)
