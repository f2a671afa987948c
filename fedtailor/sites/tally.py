"""A site's tally: how many letters it answered, how large they were, how long it worked, and how often it failed.

`tally.json` in the site's directory is for its owner's monitoring. Nothing else reads it; one that is lost begins anew.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import make_directory, read_bytes, write_atomically
from fedtailor.messages.letters import fault_of

FILE = "tally.json"  # in the site's directory


@dataclass
class Tally:
    """Counts over all runs of a site."""

    rounds: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)  # by kind
    last: float = 0.0  # when the last letter was answered, in Unix time

    def add(self, letter: bytes, answer: bytes, seconds: float) -> None:
        """Count a letter and its answer."""
        self.bytes_in += len(letter)
        self.bytes_out += len(answer)
        self.seconds += seconds
        self.last = time.time()
        if kind := fault_of(answer):
            self.faults[kind] = self.faults.get(kind, 0) + 1

    def write(self, directory: Path) -> None:
        """Write it into the site's directory."""
        make_directory(directory)
        write_atomically(directory / FILE, _FORMAT.dump_json(self), durable=False)


_FORMAT = TypeAdapter(Tally)


def read_tally(directory: Path) -> Tally:
    """Read a site's tally; begin anew without one."""
    try:
        return _FORMAT.validate_json(read_bytes(directory / FILE)) if (directory / FILE).is_file() else Tally()
    except (FedtailorError, ValidationError):
        return Tally()
