"""Clients that join a run that has begun: their data, and how they are written down.

A client joins after the run's last checkpoint. Its data are read again, and compared, whenever the run is opened.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedtailor._common.errors import FedtailorError, listed, shown
from fedtailor.data import Assignment, DataObject, Dataset, FederatedData, Join
from fedtailor.data.frames import frame_names, is_frames
from fedtailor.data.matched_columns import with_columns, without_columns
from fedtailor.data.preprocessing import Preprocessing
from fedtailor.data.sources import columns_in, names_code
from fedtailor.engines.preparation import Objects, load_dataset, partition_data, prepare
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import NEW_DATA_SETTINGS, Experiment, make_experiment
from fedtailor.server.checkpoint import read_manifest
from fedtailor.server.run_directory import RunDirectory
from fedtailor.training.inputs import sample_shape, shape_words

Data = str | Path | DataObject
Additions = str | Path | Sequence[str | Path] | Mapping[str, Any]
KEPT = ("data_dir", "test", "validation", "stratify")  # settings that new data take from the run, unless given


# --- data of new clients ---


def new_clients(
    experiment: Experiment, known: FederatedData, data: Data, settings: Mapping[str, Any]
) -> tuple[FederatedData, Experiment]:
    """Read data of new clients as a run needs them, and return them with the experiment that says so: the clients that
    they name, or one with all samples, or as `settings` say. Refuse another input shape, and classes that the run does
    not have."""
    kept = (*KEPT, "split") if experiment.split == "hash" else KEPT
    mine = {name: v for name, v in experiment.model_dump().items() if name not in NEW_DATA_SETTINGS or name in kept}
    roles = {name: getattr(experiment, name) for name in ("label_column", "client_column", "group", "split_column")}
    named: dict[str, Any] = {}
    if isinstance(data, (str, Path)):
        directory = settings.get("data_dir", mine["data_dir"])
        named = {"data": str(data), **columns_in(str(data), directory, roles, settings)}
    elif is_frames(data):
        named = {name: column for name, column in roles.items() if column in frame_names(data)}
    asked = make_experiment({**mine, "new_clients": 0, **named, **settings})
    dataset = _matching(_dataset(data, asked, known.preprocessing), known, own=asked.labels == "own")
    if dataset.client is None and asked.clients is None and asked.partition is None:
        asked = asked.model_copy(update={"clients": 1, "partition": "iid", "min_samples": 1})
    federated = partition_data(asked, dataset, known.preprocessing).to(known.x.device)
    if len(federated.classes) > len(known.classes):
        raise FedtailorError(
            f"A client of {federated.name!r} has {len(federated.classes)} classes, but none of the run's had more than "
            f"{len(known.classes)}."
        )
    return replace(federated, classes=known.classes), asked


def _dataset(data: Data, experiment: Experiment, table: Preprocessing | None) -> Dataset:
    """Load data by name or path, objects as they are, in the columns of the run's table if that had some."""
    given = None if isinstance(data, (str, Path)) else data
    dataset = load_dataset(experiment, given, table.kinds() if table else None, gaps=True)
    if table is not None:
        return with_columns(dataset, table)
    return without_columns(dataset) if dataset.columns else dataset


def _matching(dataset: Dataset, known: FederatedData, own: bool) -> Dataset:
    """Number a data set's classes as in the run. Refuse another input shape, and classes that the run does not have.
    Where labels are each client's own, their names do not matter."""
    shape, wanted = (shape_words(sample_shape(x)) for x in (dataset.x, known.x))
    if not dataset.columns and shape != wanted:
        raise FedtailorError(f"The samples of {dataset.name!r} have the shape {shape}, but the run's have {wanted}.")
    if dataset.targets != known.targets or dataset.y.shape[1:] != known.y.shape[1:]:
        raise FedtailorError(f"The targets of {dataset.name!r} are not of the run's kind: classes, or so many numbers.")
    if own or not known.classes:
        return dataset
    strange = [name for name in dataset.classes if name not in known.classes]
    if strange:
        raise FedtailorError(
            f"The data set {dataset.name!r} has the class {strange[0]!r}, which the run does not: it knows "
            f"{', '.join(known.classes[:12])}{', …' if len(known.classes) > 12 else ''}."
        )
    number = torch.tensor([known.classes.index(name) for name in dataset.classes])
    if dataset.targets == "labels":  # as many columns as the run has
        return replace(dataset, y=dataset.y[:, number.argsort()], classes=known.classes)
    return replace(dataset, y=number[dataset.y], classes=known.classes)


# --- clients that have joined ---


def run_data(
    joined: Sequence[Join],
    experiment: Experiment,
    given: DataObject | FederatedData | None = None,
    objects: Mapping[str, Any] | None = None,
    partition: Assignment | None = None,
) -> FederatedData:
    """Load the data of a run, with those of the clients that joined it. `given` are its data, `objects` those of
    clients that joined, by name, and `partition` is its partition, where they were Python objects."""
    data = partition_data(experiment, given, partition=partition)
    for join in joined:
        if join.source is not None:
            found = _read(experiment, data, join, objects or {})
            if found.names != join.clients or found.fingerprint() != join.fingerprint:
                raise FedtailorError(
                    f"The samples of {listed(join.clients)} ({shown(join.source)}) are not those that joined the run: "
                    "bring back the data as they were."
                )
            data = data.with_new(found)
        data = data.with_joined(join)
    return data


def _read(experiment: Experiment, known: FederatedData, join: Join, objects: Mapping[str, Any]) -> FederatedData:
    """Read the data of clients that join, under the name that one of them was given."""
    assert join.source is not None
    source: Any = join.source
    if source.startswith("object:"):
        if join.name not in objects:
            raise FedtailorError(
                f"The client {shown(join.name)} joined the run as a Python object: pass it again, resume(…, "
                f"add_clients={{{join.name!r}: …}}) or load(…, joined={{{join.name!r}: …}})."
            )
        source = objects[str(join.name)]
        source = [source] if isinstance(source, (tuple, Mapping)) else source
    elif names_code(source, experiment.data_dir):
        raise FedtailorError(
            f"The new client {shown(source)} would be code, which is not run to join: pass what it returns, by a name."
        )
    found, asked = new_clients(experiment, known, source, {"max_train": experiment.max_train})
    if join.name is None:
        unnamed = asked.partition is not None  # the data name no clients, so they are those of one
        return replace(found, names=(Path(join.source).stem,)) if unnamed else found
    if found.n_clients > 1:
        raise FedtailorError(
            f"The data of {shown(join.name)} name {found.n_clients} clients ({listed(found.names)}): give no name, and "
            "all of them join under their own."
        )
    return replace(found, names=(join.name,))


def add(
    directory: RunDirectory,
    experiment: Experiment,
    objects: Objects,
    asked: Additions,
) -> None:
    """Take new clients into a run after its last checkpoint, and write them down.

    All is checked first, the method's own rule too. Whoever has joined already, from the same source, is left out: so
    the same call goes on after an interrupt.
    """
    directory.lock()
    try:
        before = directory.partition().joined
        additions = [(name, source) for name, source in _additions(asked) if not _known(before, name, source)]
        if not additions:
            return
        if experiment.privacy is not None and experiment.epsilon != "inf":
            raise FedtailorError(
                f"The noise of the run in {directory.path} is made for its first clients, so nobody can join it: start "
                "a new run with all of them, or serve them with `fedtailor adapt`."
            )
        after = _check_progress(directory, experiment)
        again = asked if isinstance(asked, Mapping) else None
        known = data = run_data(before, experiment, objects.data, again, objects.partition)
        for name, source in additions:
            data = _joined(data, experiment, name, source, after)
        here = experiment.model_copy(update={"engine": "in-process", "deadline": None, "track": None})
        prepared = prepare(here, replace(objects, data=data))
        directory.check(known, prepared.terms.fingerprint, prepared.hostile)
        simulation = Simulation(prepared, directory)
        simulation.loop.look(simulation.transport)  # the method may refuse
        directory.join(data)
    finally:
        directory.unlock()


def _additions(asked: Additions) -> list[tuple[str | None, Any]]:
    """List the names that clients are given, where they are, and the sources of their data."""
    if isinstance(asked, Mapping):
        return [(str(name), str(source) if isinstance(source, Path) else source) for name, source in asked.items()]
    words = [asked] if isinstance(asked, (str, Path)) else asked
    found: list[tuple[str | None, Any]] = []
    for word in map(str, words):
        name, equals, path = word.partition("=")
        found.append((name, path) if equals and not Path(word).exists() else (None, word))
    return found


def _known(joined: Sequence[Join], name: str | None, source: Any) -> bool:
    """Find out whether this was asked for before."""
    if isinstance(source, str):
        return any((join.source or join.clients[0], join.name) == (source, name) for join in joined)
    return any((join.source or "").startswith("object:") and join.name == name for join in joined)


def _check_progress(directory: RunDirectory, experiment: Experiment) -> int:
    """Refuse a run that has not begun or has no rounds left, and one that counts on its new clients. Return the round
    after which clients join."""
    manifest, path = read_manifest(directory.path / "checkpoint"), directory.path
    if manifest is None or manifest.round == 0:
        raise FedtailorError(f"The run in {path} has no finished round yet: start it with all clients, or resume it.")
    if manifest.round >= experiment.rounds:
        raise FedtailorError(
            f"The run in {path} has done all its {experiment.rounds} rounds: give new clients some to take part in, "
            f"with --rounds {2 * experiment.rounds}, say (rounds= in Python), or serve them with `fedtailor adapt`."
        )
    if experiment.evaluation.clients == "new":
        raise FedtailorError(
            f"The run in {path} measures the clients that it held out, so none can join it: serve new ones with "
            "`fedtailor adapt`."
        )
    return manifest.round


def _joined(data: FederatedData, experiment: Experiment, name: str | None, source: Any, after: int) -> FederatedData:
    """Add clients to the data: one that the run held out, by its name, or those of other data."""
    held_out = [data.names[client] for client in sorted(data.new)]
    if name is None and source in held_out:
        return data.with_joined(Join(after, (source,), None, None, ""))
    _refuse_twice(data, [source if name is None else name] if name or source in data.names else [])
    kind = source if isinstance(source, str) else f"object:{type(source).__name__}"
    join = Join(after, (), kind, name, "")
    try:
        found = _read(experiment, data, join, {} if name is None else {name: source})
    except FedtailorError as error:
        if name is None and held_out and not Path(source).suffix and "/" not in source:
            raise FedtailorError(
                f"There is no client or file {shown(source)}: name a file, or one of the clients that the run held out "
                f"({listed(held_out)})."
            ) from error
        raise
    _refuse_twice(data, found.names)
    return data.with_new(found).with_joined(replace(join, clients=found.names, fingerprint=found.fingerprint()))


def _refuse_twice(data: FederatedData, names: Sequence[str]) -> None:
    if twice := [name for name in names if name in data.names]:
        raise FedtailorError(f"The run has a client {shown(twice[0])} already: give this one another name, NAME=PATH.")
