"""Seconds a round of a federation of real sites over NVFlare, on loopback: `python -m benchmarks.sites`.

A server and three sites with mutual TLS, in a network namespace of their own. Most of a round is waiting: a site asks
for work five times a second. It is no part of `make bench`, as it needs NVFlare and Linux.
"""

import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from fedtailor.engines.runs import load
from tests.sites.loopback import Deployed, impossible

ROUNDS = 40
MODEL = "mlp:116,116"


def main() -> None:
    """Run federations of some methods and print the seconds of their rounds."""
    if reason := impossible():
        sys.exit(f"This needs a network namespace: {reason}.")
    for method in ("fedavg", "pgfed", "pflego"):
        with TemporaryDirectory() as root:
            begin = time.perf_counter()
            with Deployed(Path(root), None, method, rounds=ROUNDS, model=MODEL) as federation:
                federation.start_sites()
                federation.start_driver()
                federation.wait_for_round(1, 300)
                first = time.perf_counter() - begin
                federation.wait_for_end(600)
            result = load(federation.directory)
            seconds = sorted(record.seconds for record in result.rounds[1:])
            size, median = result.simulation.server.initial.numel(), statistics.median(seconds)
            span = f"median; {seconds[0]:.2f} to {seconds[-1]:.2f}"
            print(f"{method}: d = {size}, round 1 after {first:.1f} s, then {median:.2f} s each ({span})", flush=True)


if __name__ == "__main__":
    main()
