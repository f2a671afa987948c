"""The runs of a report: found below directories, read, and left out if they are broken."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedtailor.errors import FedtailorError, brief
from fedtailor.experiment import read_experiment
from fedtailor.methods import CATALOGUE
from fedtailor.result import RunResult
from fedtailor.runs import load

COMPARISON = "comparison.toml"
TRACES = ("experiment.toml", "partition.json", "rounds.jsonl", "clients.jsonl")  # one of them makes a run directory


@dataclass
class Runs:
    """Runs to show, runs that have nothing to show yet, and broken ones with the reason."""

    results: list[RunResult] = field(default_factory=list)
    begun: list[RunResult] = field(default_factory=list)
    broken: dict[Path, str] = field(default_factory=dict)
    methods: list[str] = field(default_factory=lambda: [*CATALOGUE])  # in the order in which they are shown
    target: float | None = None  # the accuracy that a comparison asked for

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
            asked = read_experiment(directory / COMPARISON)
            runs.methods, runs.target = asked["methods"], asked.get("target")
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
        _check(result)
    except FedtailorError as error:
        runs.broken[path] = str(error)
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
    ) as error:  # not readable, or not the partition of these records
        runs.broken[path] = f"{path} is damaged: its records cannot be read ({brief(error)})."
    else:
        (runs.results if result.chosen("last") else runs.begun).append(result)


def _check(result: RunResult) -> None:
    """Refuse records that do not fit together; each of them was checked when it was read."""
    result.summary()
    partition, known = result.partition, set(range(len(result.names)))
    if [len(row) for row in partition["train"]] != [max(len(partition["classes"]), 1)] * len(known):
        raise ValueError("partition.json does not fit its clients")
    if [record.round for record in result.clients][: len(result.rounds)] != [r.round for r in result.rounds]:
        raise ValueError("clients.jsonl does not have the rounds of rounds.jsonl")
    named = {
        "partition.json": set(partition["new"]),
        "rounds.jsonl": {client for record in result.rounds for client in record.participants},
        "clients.jsonl": {client for record in result.clients for client in record.results},
    }
    for file, clients in named.items():
        if not clients <= known:
            raise ValueError(f"{file} names clients that do not exist")
