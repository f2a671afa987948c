"""Everything that strangers may give, with harm done to it, for a while: `make fuzz`, or `python -m tests.fuzz`.

A line for each target says what became of its cases. The exit code is 1 if anything but a FedtailorError came out, if
something hung, or if no case of a target counts. The same seed tries the same cases in the same order.
"""

import argparse
import faulthandler
import sys

from tests.fuzz import data_files, messages, run_directories
from tests.fuzz.engine import fuzz

TARGETS = {**run_directories.TARGETS, **data_files.TARGETS, **messages.TARGETS}
HANG = 120.0  # seconds beyond its time after which it hangs: all tracebacks are printed, and it ends


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="of all targets together")
    parser.add_argument("--only", choices=TARGETS, metavar="TARGET", help=f"one alone: {', '.join(TARGETS)}")
    asked = parser.parse_args()
    chosen = {asked.only: TARGETS[asked.only]} if asked.only else TARGETS
    faulthandler.dump_traceback_later(asked.seconds + HANG, exit=True)
    failures = cases = 0
    for name, tally in fuzz(chosen, asked.seed, asked.seconds):
        print(f"{name}: {tally}", *tally.failures, sep="\n", flush=True)
        failures, cases = failures + len(tally.failures), cases + tally.cases
    faulthandler.cancel_dump_traceback_later()
    print(f"{len(chosen)} targets, {cases} cases, {failures} failures")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
