"""Comparisons, tunings and reproductions, killed, and begun again by the same command."""

import io
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

from fedtailor.cli import main
from tests.kills.engine import Case, tries
from tests.kills.runs import kept

DATA = "--data digits --clients 3 --model mlp:4 --epochs 1 --rounds 2 --engine in-process --set max_train=16 --out out"
COMMANDS = {
    "compare": f"compare fedavg ditto {DATA} --seeds 0,1",
    "compare a grid": f"compare local ditto {DATA} --seeds 0 --grid lr=0.1|0.2",
    "compare, tuned before": f"compare fedavg ditto {DATA} --seeds 0 --tune 3 --validation 0.2",
    "tune": f"tune ditto {DATA} --seeds 0 --trials 4 --validation 0.2",
    "reproduce": "reproduce pgfed/table2-25 --only fedper --only pgfed --data digits --rounds 1 --out out "
    "--set model=mlp:4 --set clients=4 --set epochs=1 --set max_train=16 --set engine=in-process",
}


class Failed(Exception):
    """A command ended with another exit code than 0."""


def call(command: str, folder: Path) -> None:
    """Call a command in this folder, in this process, which should be one of its own."""
    os.chdir(folder)
    os.environ["COLUMNS"], sys.argv = "200", ["fedtailor", *command.split()]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    if code:
        raise Failed(f"exit code {code}: {err.getvalue()}")


def is_sentence(raised: str) -> bool:
    """Find out whether a command failed with one sentence, of which this is the traceback here. (A library that panics
    prints one of its own.)"""
    said = raised.rpartition("Failed: exit code 2: ")[2]
    return said != raised and "/fedtailor/" not in said and said.strip().rpartition("\n")[2].startswith("Error: ")


def called(command: str, folder: Path) -> Mapping[str, object]:
    """Call a command, and return every file that it has written, to the byte."""
    call(command, folder)
    return kept(folder)


CASES = [Case(name, partial(called, command)) for name, command in COMMANDS.items()]
attempt = tries(CASES)
