"""Many runs as one piece of work.

Each run has a directory of its own: a finished one is not run again, and one that was interrupted goes on. Data that
were given as objects are kept beside the runs, which name them by their checksum.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import make_directory
from fedtailor._common.imports import GIVEN
from fedtailor._common.toml import write_toml
from fedtailor.data import Dataset, FederatedData
from fedtailor.data.own_data import can_be_kept, is_own, kept, write_own
from fedtailor.engines.own_code import named_code, only_in_python
from fedtailor.engines.preparation import Objects, Prepared, load_dataset
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


def with_named_data(experiment: Experiment, objects: Objects, out: Path) -> tuple[dict[str, str], Objects]:
    """Name data that no import finds by their checksum, as they will be kept in `out`. Returns the settings that say
    so, and the objects with one data set. Data that are read lazily, or partitioned already, stay objects."""
    if objects.data is None or isinstance(objects.data, FederatedData) or not experiment.data.startswith(GIVEN):
        return {}, objects
    with torch.device("cpu"):
        dataset = load_dataset(experiment, objects.data)
    if not can_be_kept(dataset.x):
        return {}, objects
    name, dataset = kept(dataset)
    return {"data": name, "data_dir": str(out)}, replace(objects, data=dataset)


def keep_data(settings: Mapping[str, Any], objects: Objects) -> None:
    """Write data that were objects where the settings name them, if they are not there yet."""
    if isinstance(objects.data, Dataset) and is_own(settings["data"]):
        place = Path(settings["data_dir"])
        if not (place / settings["data"]).is_file():
            make_directory(place)
            write_own(objects.data, place)


def noted_toml(question: Mapping[str, Any], runs: Iterable[Experiment]) -> str:
    """Write a question of many runs down, below a comment on what cannot be repeated from the file."""
    note = only_in_python(runs)
    return (f"# {note}\n" if note else "") + write_toml(question)


def is_begun(out: Path, names: Collection[str]) -> bool:
    """Find out whether there is no such directory, or nothing in it but data of the user's own and these names."""
    if not out.exists():
        return True
    return out.is_dir() and all(path.name in names or is_own(path.name.removesuffix(".tmp")) for path in out.iterdir())


def again(experiment: Experiment, objects: Objects) -> dict[str, Any]:
    """The objects in place of names in an experiment, and where its data lie now, as `resume` and `load` take them."""
    own = find_method(experiment.method, experiment.parameters) if ":" in experiment.method else None
    data = None if is_own(experiment.data) else objects.data
    return {**vars(objects), "method": own, "data": data, "data_dir": experiment.data_dir}


def told(on_round: OnRoundOf | None, title: str) -> OnRound | None:
    """Tell a function of many runs which run a round is of."""
    return on_round and partial(on_round, title)


def done(path: Path, enough: Enough | None = None, given: Mapping[str, Any] | None = None) -> RunResult | None:
    """Load the result of a run that needs no more work; None if it needs some, or there is no run. `given` are objects
    in place of names in it.

    A run may have recorded its last round and still lack the checkpoint of it, which comes before its `result.json`.
    """
    if not (path / "experiment.toml").is_file():
        return None
    outcome = RunDirectory(path).outcome()
    try:
        result = load(path, **(given or {}))
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
    objects: Objects | None = None,
) -> RunResult:
    """Run an experiment in its directory, go on with it there, or load the result that is there already.

    `enough` is asked after each round whether the run may end with it. `objects` are in place of names in it.
    """
    given = again(experiment, objects or Objects())
    for place in (path, path.parent):
        if place.is_symlink():
            raise FedtailorError(f"{place} is a link, and runs are made nowhere but in their directory: remove it.")
    if (before := done(path, enough, given)) is not None:
        return before

    def each(record: RoundRecord) -> str | bool | None:
        said = on_round(record) if on_round else None
        if enough and enough(record):
            raise _Stop
        return said

    with suppress(_Stop):
        if (path / "experiment.toml").is_file():
            where = ("workers", "engine", "address", "deadline")
            changes: dict[str, Any] = {**given, **{name: getattr(experiment, name) for name in where}}
            asked = named_code(experiment) == named_code(RunDirectory(path).experiment())  # no other code than that
            track = Tracking(experiment.track) if tracking is None else tracking  # and not what the run names
            return resume(path, trust=asked, track=track, on_round=each, on_start=on_start, **changes)
        return run_prepared(experiment, prepare(experiment), path, each, on_start, tracking)
    return load(path, **given)
