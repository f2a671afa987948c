"""A thousand kills: `make kills`, or `python -m tests.kills`.

Work is killed at exact operations on files, at messages of workers, with the power, or is disturbed otherwise. Then it
goes on, and must come out as if nothing had happened: records, states and models, to the bit. The exit code is 1 if a
bit was lost, a traceback came out, a process survived, or something hung. The same seed makes the same attempts, except
for those at random times.
"""

import argparse
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from tests.kills import runs, secure, sites, studies, surroundings, workers
from tests.kills.engine import MEMORY, Try, tried

PARTS: dict[str, tuple[Try, float]] = {  # and the share of all kills
    "runs": (runs.attempt, 0.35),
    "workers": (workers.attempt, 0.18),
    "sites": (sites.attempt, 0.18),
    "secure": (secure.attempt, 0.05),
    "studies": (studies.attempt, 0.14),
    "surroundings": (surroundings.attempt, 0.1),
}
NEWS = 10.0  # seconds from one word of progress to the next


def part(name: str, seed: int, first: int, count: int) -> int:
    """Make attempts until there were so many kills. Print a line, and return the number of faults."""
    begin = said = time.monotonic()
    number, kills, faults = first, 0, 0
    while kills < count:
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            attempt = tried(PARTS[name][0], random.Random(f"{seed} {name} {number}"), Path(folder))
        kills += attempt.kills
        if attempt.fault:
            faults += 1
            again = f"python -m tests.kills --seed {seed} --only {name} --first {number} --count 1"
            print(f"FAULT {attempt.what}\n{attempt.fault}\nagain: {again}", flush=True)
        number += 1
        if time.monotonic() > said + NEWS:
            said = time.monotonic()
            print(f"{name}: {kills} of {count} kills, {said - begin:.0f} s", file=sys.stderr, flush=True)
    seconds = time.monotonic() - begin
    print(f"{name}: {kills} kills in {number - first} attempts, {seconds:.0f} s, {faults} faults", flush=True)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000, help="kills of all parts together")
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of each part's first attempt")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = {name: round(asked.count * share) for name, (_, share) in PARTS.items()}
    counts = {asked.only: asked.count} if asked.only else counts
    faults = sum(part(name, asked.seed, asked.first, count) for name, count in counts.items())
    print(f"{sum(counts.values())} kills, {faults} faults")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
