"""Many runs as one piece of work: each in a directory of its own, so that what is finished is not run again and what
broke off goes on."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedtailor.api import OnRound, RunResult, isolated, load, resume, run_prepared
from fedtailor.experiment import DATA_SETTINGS, Experiment
from fedtailor.method import Method
from fedtailor.methods import find_method
from fedtailor.server.loop import Federation
from fedtailor.server.record import Record
from fedtailor.simulation import Objects, deal_data, prepare
from fedtailor.transport import Bench

# What does not change a run's numbers: two experiments that differ in nothing else are the same run.
NO_MATTER = {
    *("engine", "workers", "states", "checkpoint_every", "data_dir", "on_failure", "observe_limit", "tensorboard"),
}


class Enough(Exception):
    """A run has shown what it was for before its last round."""


def experiment_hash(experiment: Experiment, method: Method | None = None) -> str:
    """A checksum of all that decides a run's numbers: equal experiments have equal ones."""
    parameters = (method or find_method(experiment.method, experiment.parameters)).model_dump()
    settings = {**experiment.model_dump(exclude=NO_MATTER), "parameters": parameters}
    return sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def run_name(experiment: Experiment) -> str:
    """A directory name that says which run this is: equal experiments have equal names."""
    return f"{experiment.method.replace(':', '.')}-seed{experiment.seed}-{experiment_hash(experiment)[:8]}"


class Benches:
    """What runs need before their first round. Runs on the same data share them."""

    def __init__(self) -> None:
        self._dealt: dict[str, Any] = {}

    def prepare(self, experiment: Experiment) -> Bench:
        with isolated():
            key = experiment.model_dump_json(include={*DATA_SETTINGS, "seed", "dtype"})
            if key not in self._dealt:
                self._dealt.clear()  # one data set in memory is enough: runs come ordered by their data
                self._dealt[key] = deal_data(experiment)
            return prepare(experiment, Objects(data=self._dealt[key]))


def done(path: Path, enough: Callable[[Record], bool] | None = None) -> RunResult | None:
    """The result of a run that needs no more rounds, if it is one."""
    if not (path / "experiment.toml").is_file():
        return None
    result = load(path)
    return result if result.finished or (enough and any(map(enough, result.rounds))) else None


def perform(
    experiment: Experiment,
    path: Path,
    bench: Callable[[Experiment], Bench],
    on_round: OnRound | None = None,
    on_start: Callable[[Federation], None] | None = None,
    enough: Callable[[Record], bool] | None = None,
) -> RunResult:
    """Run an experiment in its directory, go on with it there, or take the result that is there already. `enough`
    looks at each round, and says when no more of them are needed."""
    if (before := done(path, enough)) is not None:
        return before

    def each(record: Record) -> None:
        if on_round:
            on_round(record)
        if enough and enough(record):
            raise Enough

    with suppress(Enough):
        if (path / "experiment.toml").is_file():
            where = ("workers", "engine", "data_dir")
            changes: dict[str, Any] = {name: getattr(experiment, name) for name in where}
            return resume(path, on_round=each, on_start=on_start, **changes)
        if path.is_dir():  # ended in its first moment, before there was anything to go on with
            shutil.rmtree(path)
        return run_prepared(experiment, bench(experiment), path, each, on_start)
    return load(path)
