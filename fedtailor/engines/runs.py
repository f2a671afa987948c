"""One run: `run`, `resume`, `load`, and the result that they return."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from pydantic import ValidationError

from fedtailor._common.errors import FedtailorError, shown, unknown, warn
from fedtailor._common.imports import object_name
from fedtailor._common.toml import written_again
from fedtailor.data import Clients, Dataset, FederatedData
from fedtailor.data.agreement import FILE as FEDERATION
from fedtailor.engines.joins import Additions, add, run_data
from fedtailor.engines.preparation import Objects, Prepared, partition_data, prepare
from fedtailor.engines.result import RunResult
from fedtailor.engines.simulation import Simulation, create, look_into, reopen
from fedtailor.experiment import DATA_SETTINGS, SETTING_NAMES, Experiment, Settings, make_experiment
from fedtailor.experiment.privacy import Privacy
from fedtailor.experiment.tuned import SHIPPED, find_settings, for_run, tuned_in_words
from fedtailor.method import Method
from fedtailor.methods import CATALOGUE, check_class, make_method, method_class
from fedtailor.models import CATALOGUE as NETWORKS
from fedtailor.models import ModelLike
from fedtailor.server.loop import Loop
from fedtailor.server.records import RoundRecord
from fedtailor.server.run_directory import RunDirectory
from fedtailor.server.tensorboard import scalars
from fedtailor.training.inputs import changes
from fedtailor.training.isolation import isolated
from fedtailor.training.network import Loss
from fedtailor.training.predictions import OwnMetric
from fedtailor.training.schedule import needs_total

CHANGEABLE = ("rounds", "workers", "engine", "address", "deadline", "states", "checkpoint_every", "data_dir", "debug")
OnRound = Callable[[RoundRecord], None]
OnStart = Callable[[Loop], None]


def run(
    method: str | Method | type[Method] | Experiment = "fedavg",
    *,
    data: str | Path | Dataset | Clients = "digits",
    model: ModelLike = "mlp",
    loss: str | Loss = "cross-entropy",
    metric: str | OwnMetric | None = None,
    method_settings: str | Path | None = None,
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    on_start: OnStart | None = None,
    **settings: Unpack[Settings],
) -> RunResult:
    """Run an experiment and return its result.

    `settings` are those of an experiment file (see `Experiment`). A method's own parameters may stand among them,
    `run("ditto", clients=20, rounds=10, lam=0.5)` or `run(Ditto, lam=0.5)`, or in an object, `run(Ditto(lam=0.5))`.
    Objects may stand for names: a `Method` or its class, a list of one (x, y) per client or a dictionary of them by
    name, a pandas table, an `nn.Module` or what makes one, a loss function, a metric of (outputs, targets). A complete
    `Experiment` in place of the method takes no further settings. `method_settings` says where those are that a tuning
    chose for the method: `"tuned:digits"` (`fedtailor settings` lists the names), or the path of your own. With `out`,
    the run is recorded in that directory as it goes and can be resumed; without, nothing is written.
    """
    if isinstance(method, Experiment):
        given = [str(value) for value in (data, model, loss, metric)]
        if settings or method_settings is not None or given != ["digits", "mlp", "cross-entropy", "None"]:
            raise FedtailorError("An Experiment is complete: change its settings, and pass nothing beside it.")
        return run_experiment(method, Objects(), Path(out) if out else None, on_round, on_start)
    names, objects = names_and_objects(data, model, loss, metric)
    asked: Mapping[str, Any] = settings
    if method_settings is not None:
        found = find_settings(method_settings)
        asked = for_run(settings, found, _name_of(method))
        if found.source.startswith(SHIPPED):
            warn(tuned_in_words(str(found.tuned)))
    if isinstance(method, str):
        own, rest = _split(method_class(method), asked)
        names |= {"method": method, "parameters": own}
    else:
        objects.method, rest = _method_object(method, asked)
        names |= {"method": method_name(type(objects.method)), "parameters": written_parameters(objects.method)}
    experiment = make_experiment({**names, **rest})
    return run_experiment(experiment, objects, Path(out) if out else None, on_round, on_start)


def names_and_objects(data: Any, model: Any, loss: Any, metric: Any = None) -> tuple[dict[str, Any], Objects]:
    """Return the names of data, model, loss and metric for an experiment, and those of them that are objects."""
    names: dict[str, Any] = {}
    objects = Objects()
    given = {"data": str(data) if isinstance(data, Path) else data, "model": model, "loss": loss}
    for name, value in (given if metric is None else {**given, "metric": metric}).items():
        if value is None or isinstance(value, (int, float)):
            raise FedtailorError(
                f"{name}={value!r} is not understood: give a name or an object (see help(fedtailor.run))."
            )
        if not isinstance(value, str):
            setattr(objects, name, value)
        names[name] = value if isinstance(value, str) else object_name(value)
    return names, objects


def run_experiment(
    experiment: Experiment,
    objects: Objects | None = None,
    out: Path | None = None,
    on_round: OnRound | None = None,
    on_start: OnStart | None = None,
) -> RunResult:
    """Run a complete experiment."""
    with isolated():
        prepared = prepare(experiment, objects or Objects())
        for note in (*prepared.data.notes, *prepared.assembled.doubts):  # the command line says them before a run
            warn(note)
        return run_prepared(experiment, prepared, out, on_round, on_start)


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
                known = self._data[key] = partition_data(experiment, self.objects.data)
                self._changes = changes(known.x, known.y)
            return prepare(experiment, replace(self.objects, data=known))


def run_prepared(
    experiment: Experiment,
    prepared: Prepared,
    out: Path | None = None,
    on_round: OnRound | None = None,
    on_start: OnStart | None = None,
) -> RunResult:
    """Run an experiment whose data and network are in place."""
    with isolated():
        written = written_parameters(prepared.terms.method)  # the defaults too
        prepared.experiment = experiment.model_copy(update={"parameters": written})
        with closing(create(out, prepared) if out else Simulation(prepared)) as new:
            new.start()
            return finish_run(new, on_round, on_start)


def resume(
    path: str | Path,
    *,
    method: Method | type[Method] | None = None,
    data: Dataset | Clients | None = None,
    model: ModelLike | None = None,
    loss: Loss | None = None,
    metric: OwnMetric | None = None,
    add_clients: Additions | None = None,
    trust: bool = False,
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
    again. Where the run names code, a method, network, loss or metric as `module:name`, pass the object or `trust` it.
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
    objects = Objects(method, data, model, loss, metric)
    _check_objects(Path(path), before, objects, trust)
    directory.warn_of_other_versions()
    if add_clients:
        with isolated():
            add(directory, after, objects, add_clients)
    given = add_clients if isinstance(add_clients, Mapping) else None
    with isolated(), closing(reopen(Path(path), after, _with_joined(directory, after, objects, given))) as old:
        old.restore()
        if after.rounds != before.rounds or directory.behind:
            directory.extend(after)
        return finish_run(old, on_round, on_start)


def load(
    path: str | Path,
    data_dir: str | None = None,
    *,
    method: Method | None = None,
    data: Dataset | Clients | None = None,
    model: ModelLike | None = None,
    loss: Loss | None = None,
    metric: OwnMetric | None = None,
    joined: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> RunResult:
    """The result of a run directory, finished or not. `data_dir` says where its data lie now, if they were moved.

    Reading it runs nothing that the run names. Models and states of a run that names code of its own need the objects,
    as in `resume`, or `trust`. `joined` has the data of clients that joined the run as objects, by name.
    """
    directory = RunDirectory(Path(path))
    experiment, objects = directory.experiment(), Objects(method, data, model, loss, metric)

    def opened() -> Simulation:
        _check_objects(Path(path), experiment, objects, trust)
        with isolated():
            here = experiment.model_copy(update={"data_dir": data_dir or experiment.data_dir})
            return look_into(Path(path), _with_joined(directory, here, objects, joined), data_dir)

    partition, rounds, clients = directory.records()
    names, hostile, decides = partition.clients, partition.hostile, directory.metric()
    return RunResult(experiment, rounds, lambda: clients, names, opened, Path(path), decides, hostile)


def _with_joined(
    directory: RunDirectory, experiment: Experiment, objects: Objects, joined: Mapping[str, Any] | None
) -> Objects:
    """Add the data of the clients that joined the run, if there are any."""
    before = directory.partition().joined
    return replace(objects, data=run_data(before, experiment, objects.data, joined)) if before else objects


def finish_run(run: Simulation, on_round: OnRound | None, on_start: OnStart | None) -> RunResult:
    """Do the rounds that are left, and write the result down."""
    loop = run.loop
    if on_start:
        on_start(loop)
    with ExitStack() as opened:
        told = [opened.enter_context(scalars(loop))] if run.experiment.tensorboard else []
        told += [on_round] if on_round else []
        for record in opened.enter_context(closing(loop.run(run.transport))):
            for tell in told:
                tell(record)
    path = run.directory.path if run.directory else None
    result = RunResult(
        run.experiment, loop.rounds, loop.client_records, run.data.names, lambda: run, path, loop.metric, run.hostile
    )
    if run.directory:
        run.directory.finish(result.summary())
    return result


def method_name(kind: type[Method]) -> str:
    """The name under which the class of a method is found again."""
    return kind.name if CATALOGUE.get(kind.name) is kind else object_name(kind)


def _name_of(method: str | Method | type[Method]) -> str:
    if isinstance(method, str):
        return method
    return method_name(type(method) if isinstance(method, Method) else check_class(method, repr(method)))


def importable_name(method: Any) -> Any:
    """The name of a method that many runs can find again."""
    if isinstance(method, Method):
        kind = type(method).__name__
        raise FedtailorError(f"Give the class {kind}, not an object of it, and its parameters in method_parameters=.")
    if not isinstance(method, type):
        return method
    name = method_name(check_class(method, method.__name__))
    if name.startswith("object:"):
        raise FedtailorError(
            f"The class {method.__name__} is inside a function: move it out, where it can be imported."
        )
    return name


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
    own = {name: value for name, value in settings.items() if name in kind.model_fields}
    rest = {name: value for name, value in settings.items() if name not in own and name != "parameters"}
    given = settings.get("parameters", {})
    if not isinstance(given, Mapping):
        raise FedtailorError(f"The setting 'parameters' is {shown(given)}, but it must be a table of names and values.")
    return {**given, **own}, rest


def written_parameters(method: Method) -> dict[str, Any]:
    """A method's parameters as an experiment file holds them; refuses what would come back as something else."""
    parameters = method.model_dump(exclude_none=True)
    again = written_again({"parameters": parameters})
    try:
        same = again is not None and type(method)(**again.get("parameters", {})) == method
    except ValidationError:
        same = False
    if not same or any(isinstance(value, dict) for value in parameters.values()):
        raise FedtailorError(
            f"The parameters of {type(method).__name__} cannot be written to an experiment file: give numbers, texts, "
            "and lists of these."
        )
    return parameters


def _check_objects(path: Path, experiment: Experiment, objects: Objects, trust: bool) -> None:
    """A run that was given objects needs them again, and the same ones as far as that can be seen. Code that it names
    is run if the caller passes it or trusts it: a run directory may be anybody's."""
    for name in ("method", "data", "model", "loss", "metric"):
        recorded, given = _recorded(experiment, name), getattr(objects, name)
        if isinstance(given, Method):
            if method_name(type(given)) != recorded or written_parameters(given) != experiment.parameters:
                raise FedtailorError(f"This is not the run's method: that is {recorded} with {experiment.parameters}.")
        elif given is not None and name in ("model", "loss", "metric") and object_name(given) != recorded:
            raise FedtailorError(f"This is not the run's {name}: that is {recorded}.")
        elif given is not None and name == "data" and not recorded.startswith("object:"):
            raise FedtailorError(f"The run's data have a name ({recorded}): leave data= out.")
        if recorded.startswith(("object:", "__main__:")) and given is None:
            raise FedtailorError(f"This run got its {name} as a Python object ({recorded}): pass {name}= to resume it.")
    strange = [f"{kind} {name}" for kind, name in named_code(experiment).items() if getattr(objects, kind) is None]
    if strange and not trust:
        raise FedtailorError(
            f"The run in {path} names code of its own ({', '.join(strange)}): if you trust it, say --trust (trust=True "
            "in Python), or pass the object."
        )


def _recorded(experiment: Experiment, kind: str) -> str:
    """The name of what may be an object."""
    return str(getattr(experiment.evaluation if kind == "metric" else experiment, kind))


def named_code(experiment: Experiment) -> dict[str, str]:
    """The code that an experiment names: `module:name` in place of a name of the catalogue."""
    kinds = ("method", "model", "loss", "metric")
    names = {kind: name for kind in kinds if ":" in (name := _recorded(experiment, kind))}
    return {kind: name for kind, name in names.items() if kind != "model" or name.partition(":")[0] not in NETWORKS}
