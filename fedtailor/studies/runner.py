"""Many runs as one piece of work.

Each run has a directory of its own: a finished one is not run again, and one that was interrupted goes on.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedtailor._common.errors import FedtailorError
from fedtailor.engines.own_code import named_code
from fedtailor.engines.preparation import Prepared
from fedtailor.engines.result import RunResult
from fedtailor.engines.runs import OnRound, OnStart, load, resume, run_prepared
from fedtailor.engines.trackers import Tracking
from fedtailor.experiment import Experiment, experiment_hash
from fedtailor.methods import find_method
from fedtailor.server.checkpoint import read_manifest
from fedtailor.server.records import RoundRecord
from fedtailor.server.run_directory import RunDirectory

OnRoundOf = Callable[[str, RoundRecord], str | bool | None]  # as `OnRound`, of the run with this title
Enough = Callable[[RoundRecord], bool]  # says of a round that no more of them are needed


class _Stop(Exception):
    """Ends a run that needs no more rounds."""


def run_name(experiment: Experiment) -> str:
    """Name the directory of a run: equal experiments have equal names."""
    parameters = find_method(experiment.method, experiment.parameters).model_dump()
    checksum = experiment_hash(experiment, parameters)
    return f"{experiment.method.replace(':', '.')}-seed{experiment.seed}-{checksum[:8]}"


def told(on_round: OnRoundOf | None, title: str) -> OnRound | None:
    """Tell a function of many runs which run a round is of."""
    return on_round and partial(on_round, title)


def done(path: Path, enough: Enough | None = None) -> RunResult | None:
    """Load the result of a run that needs no more work; None if it needs some, or there is no run.

    A run may have recorded its last round and still lack the checkpoint of it, which comes before its `result.json`.
    """
    if not (path / "experiment.toml").is_file():
        return None
    outcome = RunDirectory(path).outcome()
    try:
        result = load(path)
    except FedtailorError:
        if outcome is not None:
            raise
        return None  # a power cut may have left parts of records: going on makes them again, or says what is damaged
    if outcome is not None and (outcome.rounds == result.experiment.rounds or outcome.stopped):
        return result
    saved = read_manifest(path / "checkpoint")
    reached = enough is not None and any(map(enough, result.rounds))
    return result if reached and saved is not None and saved.round == len(result.rounds) else None


def perform(
    experiment: Experiment,
    path: Path,
    prepare: Callable[[Experiment], Prepared],
    on_round: OnRound | None = None,
    on_start: OnStart | None = None,
    enough: Enough | None = None,
    tracking: Tracking | None = None,
) -> RunResult:
    """Run an experiment in its directory, go on with it there, or load the result that is there already.

    `enough` is asked after each round whether the run may end with it.
    """
    for place in (path, path.parent):
        if place.is_symlink():
            raise FedtailorError(f"{place} is a link, and runs are made nowhere but in their directory: remove it.")
    if (before := done(path, enough)) is not None:
        return before

    def each(record: RoundRecord) -> str | bool | None:
        said = on_round(record) if on_round else None
        if enough and enough(record):
            raise _Stop
        return said

    with suppress(_Stop):
        if (path / "experiment.toml").is_file():
            where = ("workers", "engine", "address", "deadline", "data_dir")
            changes: dict[str, Any] = {name: getattr(experiment, name) for name in where}
            asked = named_code(experiment) == named_code(RunDirectory(path).experiment())  # no other code than that
            track = Tracking(experiment.track) if tracking is None else tracking  # and not what the run names
            return resume(path, trust=asked, track=track, on_round=each, on_start=on_start, **changes)
        return run_prepared(experiment, prepare(experiment), path, each, on_start, tracking)
    return load(path)
