"""A site leaves: its states and keys are removed, and what remains of its data elsewhere is said."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import make_directory, read_bytes, writing
from fedtailor.experiment import NONE, make_experiment
from fedtailor.experiment.privacy import Privacy
from fedtailor.messages.letters import read_letter
from fedtailor.methods import find_method
from fedtailor.server.setup import describe_uploads
from fedtailor.sites.kits.exchange import REQUEST
from fedtailor.sites.local_site import BEGIN
from fedtailor.sites.nvflare.client import LOCK
from fedtailor.sites.nvflare.processes import alone
from fedtailor.sites.site_file import SiteFile
from fedtailor.sites.tally import FILE as TALLY

RUNS = "runs"  # in a site's directory
STATE = re.compile(r"client-\d+-round-(\d+)\.safetensors")


@dataclass(frozen=True)
class TakenPart:
    """A run that a site took part in: its last round, and what the server saw of each upload."""

    run: str
    method: str
    round: int
    uploads: dict[str, str]


def leave(site: SiteFile) -> tuple[list[TakenPart], list[Path]]:
    """Remove a site's states, key and kit. Return the runs that it took part in, and what was removed.

    The models, the log and the ledger stay: what the data have answered is not forgotten by leaving.
    """
    make_directory(site.private)
    with alone(site.private / LOCK, f"{site.name} takes part: end `fedtailor site start` first."):
        took_part = [found for path in sorted((site.private / RUNS).glob(f"*/{BEGIN}")) if (found := _read(path))]
        parts = (site.private / RUNS, site.private / REQUEST, site.private / TALLY, site.path(site.kit))
        removed = [path for path in parts if path.exists()]
        for path in removed:
            with writing(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return took_part, removed


def _read(begin: Path) -> TakenPart | None:
    """Read of a run what the site knows of it; None of one that it cannot read any more."""
    try:
        experiment = make_experiment(dict(read_letter(read_bytes(begin), str(begin)).header["experiment"]))
        privacy = Privacy.parse(experiment.privacy) if experiment.privacy else None
        method, fair = find_method(experiment.method, experiment.parameters), experiment.fairness != NONE
        uploads = describe_uploads(method, privacy, fair)
    except (FedtailorError, KeyError, TypeError, ValueError):
        return None
    states = [STATE.fullmatch(path.name) for path in (begin.parent / "states").glob("*")]
    last = max((int(match[1]) for match in states if match), default=0)
    return TakenPart(begin.parent.name, experiment.method, last, uploads)
