"""How long one waits for the first answer: `fedtailor --help`, and `fedtailor run` up to its first round.

    python -m benchmarks.start_up

Each command is a process of its own, as users start it, in turn with Python alone and with `import torch`. The way to
the first round is that of a whole run of one round, with its checkpoint, its table and the end of its processes, less
`import torch`: no less than the first round takes to arrive. Both are judged by the processor's time, which is what the
clock shows where nobody else computes: these commands wait for nothing, and the clock of a busy machine counts others.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial

from benchmarks.measuring import Goal, Seconds, best_of, table, timed

HELP = ("-m", "fedtailor", "--help")
RUN = ("-m", "fedtailor", "run", "fedavg", "--data", "digits", "--clients", "10", "--rounds", "1")
RUN_BEHIND_TORCH = ("-c", "import torch; from fedtailor.cli import main; main()", *RUN[2:])
HELP_GOAL, RUN_GOAL = 0.3, 3.0  # seconds
SHOWN = 12  # imports in a profile


def called(*words: str) -> str:
    """Call Python with these words, in a new directory, and with compiled modules as users have them. Return what it
    wrote to stderr."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, *words]
        ended = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=True)
    return ended.stderr


def calling(*words: str) -> Callable[[], Seconds]:
    return lambda: timed(lambda: called(*words))


def imports(*words: str) -> str:
    """List the imports of a command that take longest, each with those inside it; where it begins with PyTorch's, the
    rest of them."""
    said = called("-X", "importtime", *words).rpartition("| torch\n")[2]
    lines = [line.removeprefix("import time:").split("|") for line in said.splitlines()]
    times = [(int(line[1]), line[2].strip()) for line in lines if len(line) == 3 and line[1].strip().isdecimal()]
    longest = sorted(times, reverse=True)[:SHOWN]
    return table(["import", "ms"], [[name, f"{microseconds / 1e3:.0f}"] for microseconds, name in longest])


def run(repeat: int = 3, tiny: bool = False) -> list[Goal]:
    """Print what the commands take, and judge the two that have goals. The tiny version runs nothing but `--help`."""
    quick = {"python": ("-c", "pass"), "fedtailor --help": HELP}
    slow = {
        "fedtailor run --help": (*RUN[:3], "--help"),
        "import torch": ("-c", "pass" if tiny else "import torch"),
        "a run of one round": HELP if tiny else RUN,
    }
    found = best_of({name: calling(*words) for name, words in quick.items()}, repeat if tiny else 4 * repeat)
    found |= best_of({name: calling(*words) for name, words in slow.items()}, repeat)
    rows = [[name, f"{seconds.wall:.2f} s", f"{seconds.cpu:.2f} s"] for name, seconds in found.items()]
    print(table(["", "clock", "processor"], rows), flush=True)
    to_first_round = found["a run of one round"].cpu - found["import torch"].cpu
    reason = partial(imports, *(HELP if tiny else RUN_BEHIND_TORCH))
    return [
        Goal("fedtailor --help", found["fedtailor --help"].cpu, HELP_GOAL, "s", why=partial(imports, *HELP)),
        Goal("a run's first round, beyond import torch", to_first_round, RUN_GOAL, "s", why=reason),
    ]


if __name__ == "__main__":
    for goal in run():
        print(*goal.row())
