"""All benchmarks in one run: `python -m benchmarks`, or `make bench`."""

import argparse
import time
from collections.abc import Callable

from benchmarks import costs, floor, memory, million, peers, scale, stack, start_up
from benchmarks.measuring import CORES, Goal, table

PARTS: dict[str, Callable[..., list[Goal]]] = {
    "floor": floor.run,
    "peers": peers.run,
    "costs": costs.run,
    "scale": scale.run,
    "million": million.run,
    "memory": memory.run,
    "stack": stack.run,
    "start-up": start_up.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all of them if none is named")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions, of which the best counts")
    parser.add_argument("--tiny", action="store_true", help="sizes that tell nothing, to see that everything runs")
    parser.add_argument("--pfllib", metavar="PATH", help="a clone of PFLlib, to be measured beside fedtailor")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"There is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}.")
    begin = time.perf_counter()
    goals: list[Goal] = []
    for name in arguments.parts or PARTS:
        print(f"\n=== {name} ===", flush=True)
        of_part = {"pfllib": arguments.pfllib} if name == "peers" else {}
        goals += PARTS[name](repeat=arguments.repeat, tiny=arguments.tiny, **of_part)
    print(f"\n=== goals, on {CORES} cores ===\n" + table(["", "goal", "measured", ""], [goal.row() for goal in goals]))
    for goal in goals:
        if not goal.met and goal.why is not None:
            print(f"\nMissed: {goal.what}. Where the time goes:\n{goal.why()}")
    print(f"\n{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
