"""Every reader of files and every message, mutated for a while: `make fuzz`, or `python -m tests.fuzz`.

It ends with exit code 1 if anything but a FedtailorError came out, or if something hung. The same seed tries the same
mutants in the same order.
"""

import argparse
import faulthandler
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.fuzz import data_files, messages, run_directories

PARTS: dict[str, Callable[[int, float], dict[str, Any]]] = {
    "run directories": run_directories.fuzz,
    "data, models, settings": data_files.fuzz,
    "messages": messages.fuzz,
}
HANG = 120.0  # seconds beyond its time after which a part hangs: all tracebacks are printed, and it ends


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="of all parts together")
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    asked = parser.parse_args()
    chosen = [asked.only] if asked.only else list(PARTS)
    failures = 0
    for name in chosen:
        seconds, begin = asked.seconds / len(chosen), time.monotonic()
        faulthandler.dump_traceback_later(seconds + HANG, exit=True)
        found = PARTS[name](asked.seed, seconds)
        faulthandler.cancel_dump_traceback_later()
        failures += len(found["failures"])
        print(f"{name}: {time.monotonic() - begin:.0f} s, {json.dumps(found['counts'])}", flush=True)
        for failure in found["failures"]:
            print(failure, flush=True)
    print(f"{failures} tracebacks or hangs")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
