"""One run: `run`, `resume`, `load`, and the result that they return."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fedtailor._common.errors import FedtailorError, shown, unknown, warn
from fedtailor.data import Assignment, DataObject, FederatedData
from fedtailor.data.agreement import FILE as FEDERATION
from fedtailor.engines.joins import Additions, add, run_data
from fedtailor.engines.own_code import (
    check_objects,
    method_name,
    named_settings,
    names_and_objects,
    refuse_code,
    written_parameters,
)
from fedtailor.engines.preparation import Objects, Prepared, partition_data, prepare
from fedtailor.engines.result import RunResult
from fedtailor.engines.simulation import Simulation, create, look_into, reopen
from fedtailor.engines.trackers import Track, Tracking
from fedtailor.experiment import DATA_SETTINGS, SETTING_NAMES, Experiment, Settings, make_experiment
from fedtailor.experiment.privacy import Privacy
from fedtailor.experiment.tuned import SHIPPED, find_settings, for_run, tuned_in_words
from fedtailor.method import OWN_STEP, Method
from fedtailor.methods import check_class, make_method, method_class
from fedtailor.models import ModelLike
from fedtailor.server.loop import Loop
from fedtailor.server.records import RoundRecord
from fedtailor.server.run_directory import RunDirectory
from fedtailor.training.inputs import changes
from fedtailor.training.isolation import isolated
from fedtailor.training.network import Loss
from fedtailor.training.predictions import OwnMetric
from fedtailor.training.schedule import needs_total

CHANGEABLE = ("rounds", "workers", "engine", "address", "deadline", "states", "checkpoint_every", "data_dir", "debug")
OnRound = Callable[[RoundRecord], str | bool | None]  # what it returns may stop the run
OnStart = Callable[[Loop], None]


def run(
    method: str | Method | type[Method] | Experiment = "fedavg",
    *,
    data: str | Path | DataObject = "digits",
    model: ModelLike = "mlp",
    loss: str | Loss = "cross-entropy",
    metric: str | OwnMetric | None = None,
    method_settings: str | Path | None = None,
    out: str | Path | None = None,
    track: Track | None = None,
    on_round: OnRound | None = None,
    on_start: OnStart | None = None,
    **settings: Unpack[Settings],
) -> RunResult:
    """Run an experiment and return its result.

    `settings` are those of an experiment file (see `Experiment`). A method's own parameters may stand among them,
    `run("ditto", clients=20, rounds=10, lam=0.5)` or `run(Ditto, lam=0.5)`, or in an object, `run(Ditto(lam=0.5))`.
    Objects may stand for names: a `Method` or its class, a list of one (x, y) per client or a dictionary of them by
    name, a pandas table, a function that returns one of these, an `nn.Module` or what makes one, a loss function, a
    metric of (outputs, targets), such functions by name as `metrics`, a `partition` of (labels, clients, rng). A
    complete `Experiment` in place of the method takes no further settings. `method_settings` says where those are that
    a tuning chose for the method: `"tuned:digits"` (`fedtailor settings` lists the names), or the path of your own.
    With `out`, the run is recorded in that directory as it goes and can be resumed; without, nothing is written.
    `track` names tools that get settings, metrics and files too: `"mlflow"`, `"wandb"`, `"tensorboard"`,
    `"module:Class"`, a `Tracker` of your own, or a list of these.

    `on_round` is called with the record of each round. If it returns a text, or True, the run ends after that round,
    and the text is recorded as the reason: `on_round=lambda record: "good enough" if record.accuracy > 0.9 else None`.
    """
    tracking = None if track is None else Tracking(track)
    if isinstance(method, Experiment):
        given = [str(value) for value in (data, model, loss, metric)]
        if settings or method_settings is not None or given != ["digits", "mlp", "cross-entropy", "None"]:
            raise FedtailorError("An Experiment is complete: change its settings, and pass nothing beside it.")
        return run_experiment(method, Objects(), Path(out) if out else None, on_round, on_start, tracking)
    names, objects = names_and_objects(data, model, loss, metric)
    asked: Mapping[str, Any] = named_settings(settings, objects)
    if method_settings is not None:
        found = find_settings(method_settings)
        asked = for_run(asked, found, _name_of(method))
        if found.source.startswith(SHIPPED):
            warn(tuned_in_words(str(found.tuned)))
    if isinstance(method, str):
        own, rest = _split(method_class(method), asked)
        names |= {"method": method, "parameters": own}
    else:
        objects.method, rest = _method_object(method, asked)
        names |= {"method": method_name(type(objects.method)), "parameters": written_parameters(objects.method)}
    experiment = make_experiment({**names, "track": tracking and tracking.names, **rest})
    return run_experiment(experiment, objects, Path(out) if out else None, on_round, on_start, tracking)


def run_experiment(
    experiment: Experiment,
    objects: Objects | None = None,
    out: Path | None = None,
    on_round: OnRound | None = None,
    on_start: OnStart | None = None,
    tracking: Tracking | None = None,
) -> RunResult:
    """Run a complete experiment."""
    with isolated():
        prepared = prepare(experiment, objects or Objects())
        for note in (*prepared.data.notes, *prepared.assembled.doubts):  # the command line says them before a run
            warn(note)
        return run_prepared(experiment, prepared, out, on_round, on_start, tracking)


@dataclass
class PreparedRuns:
    """Prepares runs one after the other. Those on the same data share them."""

    objects: Objects = field(default_factory=Objects)
    _data: dict[str, FederatedData] = field(default_factory=dict)
    _changes: list[int | None] = field(default_factory=list)

    def prepare(self, experiment: Experiment) -> Prepared:
        """Load, partition and build all that a run needs before its first round."""
        with isolated():
            key = experiment.model_dump_json(include={*DATA_SETTINGS, "seed", "dtype"})
            known = self._data.get(key)
            if known is None or changes(known.x, known.y) != self._changes:  # a run that failed may have changed them
                self._data.clear()  # one data set in memory is enough: runs come ordered by their data
                known = self._data[key] = partition_data(
                    experiment, self.objects.data, partition=self.objects.partition
                )
                self._changes = changes(known.x, known.y)
            return prepare(experiment, replace(self.objects, data=known))


def run_prepared(
    experiment: Experiment,
    prepared: Prepared,
    out: Path | None = None,
    on_round: OnRound | None = None,
    on_start: OnStart | None = None,
    tracking: Tracking | None = None,
) -> RunResult:
    """Run an experiment whose data and network are in place. `tracking` takes the place of the experiment's `track`."""
    with isolated():
        written = written_parameters(prepared.terms.method)  # the defaults too
        prepared.experiment = experiment.model_copy(update={"parameters": written})
        with closing(create(out, prepared) if out else Simulation(prepared)) as new:
            new.start()
            return finish_run(new, on_round, on_start, tracking)


def resume(
    path: str | Path,
    *,
    method: Method | type[Method] | None = None,
    data: DataObject | None = None,
    model: ModelLike | None = None,
    loss: Loss | None = None,
    metric: OwnMetric | None = None,
    metrics: Mapping[str, OwnMetric] | None = None,
    partition: Assignment | None = None,
    add_clients: Additions | None = None,
    trust: bool = False,
    track: Track | Tracking | None = None,
    on_round: OnRound | None = None,
    on_start: OnStart | None = None,
    **changes: Any,
) -> RunResult:
    """Go on with a run after its last checkpoint, to the same numbers as if it had never stopped.

    `add_clients` lets new clients take part from then on: the path of their data, the name of a client that the run
    held out, a list of these, or by name the path or the pair (x, y) of each. The same call goes on later: who has
    joined is not added again.

    Only what does not change its numbers may be changed: `rounds` (more of them), `workers`, `engine`, `address`,
    `deadline`, `states`, `checkpoint_every`, `data_dir`, `debug`. Objects that were passed to `run` must be passed
    again. Where the run names code (a method, network, loss, metric or partition as `module:name`), pass the object or
    `trust` it.

    Trackers that the run names go on with it. `track` names others: a `Tracker` that was passed to `run` has to be
    passed again, and `"none"` leaves all out.
    """
    directory = RunDirectory(Path(path))
    before = directory.experiment()
    if (Path(path) / FEDERATION).exists():
        raise FedtailorError(f"The clients of the run in {path} are sites: go on with it by `fedtailor deploy run`.")
    for name in changes:
        if name not in CHANGEABLE:
            raise FedtailorError(f"{name!r} cannot be changed when a run is resumed: start a new run for it.")
    after = make_experiment({**before.model_dump(), **changes})
    if after.rounds < before.rounds:
        raise FedtailorError(f"The run in {path} has {before.rounds} rounds already: it can only get more.")
    if after.rounds > before.rounds and needs_total(before.schedule):
        raise FedtailorError(
            f"The run in {path} has the schedule {before.schedule!r} over {before.rounds} rounds: it cannot get more. "
            "Start a new run with so many."
        )
    if after.rounds > before.rounds and before.privacy and Privacy.parse(before.privacy).noise is None:
        raise FedtailorError(
            f"The run in {path} has noise that was found for {before.rounds} rounds: it cannot get more. Start a new "
            "run with so many."
        )
    if isinstance(method, type):
        method = make_method(check_class(method, method.__name__), method.__name__, before.parameters)
    objects = Objects(method, data, model, loss, metric, metrics, partition)
    check_objects(Path(path), before, objects, trust)
    tracking = None if track is None else Tracking(track)
    if tracking is not None:
        after = after.model_copy(update={"track": tracking.names})
    elif own := [f"tracker {name}" for name in (before.track or "").split(",") if ":" in name]:
        refuse_code(Path(path), own, trust)
    directory.warn_of_other_versions()
    if add_clients:
        with isolated():
            add(directory, after, objects, add_clients)
    given = add_clients if isinstance(add_clients, Mapping) else None
    with isolated(), closing(reopen(Path(path), after, _with_joined(directory, after, objects, given))) as old:
        old.restore()
        if after.rounds != before.rounds or directory.behind:
            directory.extend(after)
        return finish_run(old, on_round, on_start, tracking)


def load(
    path: str | Path,
    data_dir: str | None = None,
    *,
    method: Method | None = None,
    data: DataObject | None = None,
    model: ModelLike | None = None,
    loss: Loss | None = None,
    metric: OwnMetric | None = None,
    metrics: Mapping[str, OwnMetric] | None = None,
    partition: Assignment | None = None,
    joined: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> RunResult:
    """The result of a run directory, finished or not. `data_dir` says where its data lie now, if they were moved.

    Reading it runs nothing that the run names. Models and states of a run that names code of its own need the objects,
    as in `resume`, or `trust`. `joined` has the data of clients that joined the run as objects, by name.
    """
    directory = RunDirectory(Path(path))
    experiment, objects = directory.experiment(), Objects(method, data, model, loss, metric, metrics, partition)

    def opened() -> Simulation:
        check_objects(Path(path), experiment, objects, trust)
        with isolated():
            here = experiment.model_copy(update={"data_dir": data_dir or experiment.data_dir})
            return look_into(Path(path), _with_joined(directory, here, objects, joined), data_dir)

    found, rounds, clients = directory.records()
    names, hostile, decides = found.clients, found.hostile, directory.metric()
    return RunResult(experiment, rounds, lambda: clients, names, opened, Path(path), decides, hostile)


def _with_joined(
    directory: RunDirectory, experiment: Experiment, objects: Objects, joined: Mapping[str, Any] | None
) -> Objects:
    """Add the data of the clients that joined the run, if there are any."""
    before = directory.partition().joined
    return (
        replace(objects, data=run_data(before, experiment, objects.data, joined, objects.partition))
        if before
        else objects
    )


def finish_run(
    run: Simulation, on_round: OnRound | None, on_start: OnStart | None, tracking: Tracking | None = None
) -> RunResult:
    """Do the rounds that are left, and write the result down."""
    loop, experiment = run.loop, run.experiment
    path = run.directory.path if run.directory else None
    if on_start:
        on_start(loop)
    tracking = Tracking(experiment.track) if tracking is None else tracking
    name = path.name if path else f"{experiment.method}-seed{experiment.seed}"
    with ExitStack() as opened:
        tracked = opened.enter_context(tracking.run(name, experiment.model_dump(), path, loop.finished))
        for record in opened.enter_context(closing(loop.run(run.transport))):
            tracked.record(record)
            if on_round and (why := reason_to_stop(on_round(record))):
                loop.stop(why)
        result = result_of(run)
        outcome = result.summary() if run.directory or tracked.of else {}  # it reads the data once more
        if run.directory:
            run.directory.finish(outcome)
        tracked.save_record(experiment, outcome)
        result.tracked = tracked.ids
    return result


def result_of(run: Simulation) -> RunResult:
    """Return the result of a simulation as it stands."""
    loop, path = run.loop, run.directory.path if run.directory else None
    return RunResult(
        run.experiment, loop.rounds, loop.client_records, run.data.names, lambda: run, path, loop.metric, run.hostile
    )


def reason_to_stop(said: object) -> str:
    """Read the reason to stop in what `on_round` returned: a text, or True; "" if the run goes on."""
    if isinstance(said, str):
        return " ".join(said.split())
    return "on_round said so" if isinstance(said, bool | np.bool_) and said else ""


def _name_of(method: str | Method | type[Method]) -> str:
    if isinstance(method, str):
        return method
    return method_name(type(method) if isinstance(method, Method) else check_class(method, repr(method)))


def _method_object(method: Any, settings: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    """A method object, made with its own parameters if a class is given, and the settings without these."""
    given = isinstance(method, Method)
    kind = type(method) if given else method
    own, rest = _split(check_class(kind, getattr(kind, "__name__", repr(kind))), settings)
    if given and own:
        name = next(iter(own))
        raise FedtailorError(
            f"The method is an object already, so {name!r} cannot be set beside it: write {kind.__name__}({name}=…)."
        )
    return method if given else make_method(kind, kind.__name__, own), rest


def _split(kind: type[Method], settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split settings into the method's own parameters, which may stand among them, and the rest."""
    for name in settings:
        if name not in SETTING_NAMES and name not in kind.model_fields:
            raise unknown("setting or parameter", name, [*SETTING_NAMES, *kind.model_fields])
    theirs = kind.model_fields.keys() - (set(SETTING_NAMES) - OWN_STEP.keys())
    own = {name: value for name, value in settings.items() if name in theirs}
    rest = {name: value for name, value in settings.items() if name not in own and name != "parameters"}
    given = settings.get("parameters", {})
    if not isinstance(given, Mapping):
        raise FedtailorError(f"The setting 'parameters' is {shown(given)}, but it must be a table of names and values.")
    return {**given, **own}, rest
