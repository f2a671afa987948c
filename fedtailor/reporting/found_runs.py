"""The runs of a report: found below directories, read, and left out if they are broken."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from fedtailor._common.errors import FedtailorError
from fedtailor.engines.result import RunResult
from fedtailor.engines.runs import load
from fedtailor.experiment import read_experiment
from fedtailor.methods import CATALOGUE

COMPARISON = "comparison.toml"
TRACES = ("experiment.toml", "partition.json", "rounds.jsonl", "clients.jsonl")  # one of them makes a run directory


@dataclass
class Runs:
    """Runs to show, runs that have nothing to show yet, and broken ones with the reason."""

    results: list[RunResult] = field(default_factory=list)
    begun: list[RunResult] = field(default_factory=list)
    broken: dict[Path, str] = field(default_factory=dict)
    methods: list[str] = field(default_factory=lambda: [*CATALOGUE])  # in the order in which they are shown
    target: float | None = None  # the value of the metric that a comparison asked for
    tuned: str | None = None  # how its settings were chosen
    failed: dict[str, str] = field(default_factory=dict)  # by title: why a run of a table is not in it

    @property
    def unfinished(self) -> list[RunResult]:
        return [*self.begun, *(result for result in self.results if not result.finished)]


def read_runs(directories: Sequence[Path]) -> Runs:
    """Read all runs in or below these directories."""
    runs, seen = Runs(), set()
    for directory in directories:
        if not directory.is_dir():
            raise FedtailorError(f"There is no directory {directory}: name run directories, or what contains them.")
        if len(directories) == 1 and (directory / COMPARISON).is_file():
            runs.methods, runs.target, runs.tuned = _asked(directory / COMPARISON)
        for path in _below(directory):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                _read(path, runs)
    if not seen:
        where = ", ".join(map(str, directories))
        raise FedtailorError(f"There is no run in {where}: make one with `fedtailor run` or `fedtailor compare`.")
    if not runs.results:
        why = next(iter(runs.broken.values()), None) or f"{runs.begun[0].path} has no evaluated round yet"
        raise FedtailorError(f"There is nothing to report: {why.rstrip('.')}.")
    places = {method: place for place, method in enumerate(runs.methods)}
    runs.results.sort(key=lambda result: places.get(result.experiment.method, len(places)))
    return runs


def _asked(path: Path) -> tuple[list[str], float | None, str | None]:
    """Read the methods of a comparison in their order, its target, and how its settings were chosen. Its methods need
    not be importable here."""
    asked = read_experiment(path)
    methods, target = asked.get("methods"), asked.get("target")
    if not isinstance(methods, list) or not all(isinstance(method, str) for method in methods):
        raise FedtailorError(f"{path} is no comparison: its methods are {methods!r:.50}, no list of names.")
    if not (target is None or (isinstance(target, int | float) and isfinite(target))):
        raise FedtailorError(f"{path} is no comparison: its target is {target!r:.50}, no number.")
    return methods, target, None if asked.get("tuned") is None else str(asked["tuned"])


def _below(directory: Path) -> Iterator[Path]:
    """Find run directories, in a settled order. What lies inside of one belongs to it."""
    for path, folders, files in os.walk(directory):
        if any(trace in files for trace in TRACES):
            folders.clear()
            yield Path(path)
        folders.sort()


def _read(path: Path, runs: Runs) -> None:
    try:
        result = load(path)
    except FedtailorError as error:
        runs.broken[path] = str(error)
    else:
        (runs.results if result.chosen("last") else runs.begun).append(result)
