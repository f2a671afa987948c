"""One run: `run`, `resume`, `load`, and the result that they return."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from pydantic import ValidationError

from fedtailor.data import Dataset
from fedtailor.errors import FedtailorError
from fedtailor.experiment import Experiment, Settings, make_experiment, write_toml, written_again
from fedtailor.files import write_atomically
from fedtailor.imports import object_name
from fedtailor.local.isolation import isolated
from fedtailor.local.network import Loss
from fedtailor.method import Method
from fedtailor.methods import CATALOGUE, find_method
from fedtailor.models import ModelLike
from fedtailor.result import RunResult
from fedtailor.server.loop import Loop
from fedtailor.server.record import RunDirectory
from fedtailor.server.records import RoundRecord
from fedtailor.server.tensorboard import scalars
from fedtailor.simulation import Objects, Prepared, Simulation, look_into, prepare, reopen

OnRound = Callable[[RoundRecord], None]
OnStart = Callable[[Loop], None]


def run(
    method: str | Method | Experiment = "fedavg",
    *,
    data: str | Path | Dataset | Sequence[Any] = "digits",
    model: ModelLike = "mlp",
    loss: str | Loss = "cross-entropy",
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    on_start: OnStart | None = None,
    **settings: Unpack[Settings],
) -> RunResult:
    """Run an experiment and return its result.

    `settings` are those of an experiment file (see `Experiment`). A method's own parameters may stand among them,
    `run("ditto", clients=20, rounds=10, lam=0.5)`, or in an object, `run(Ditto(lam=0.5))`. Objects may stand for names:
    a `Method`, a list of one (x, y) per client, an `nn.Module` or what makes one, a loss function. A complete
    `Experiment` in place of the method takes no further settings. With `out`, the run is recorded in that directory as
    it goes and can be resumed; without, nothing is written.
    """
    objects = Objects()
    names: dict[str, Any] = {}
    if isinstance(method, Experiment):
        if settings or (data, model, loss) != ("digits", "mlp", "cross-entropy"):
            raise FedtailorError("An Experiment is complete: change its settings, and pass nothing beside it.")
        return run_experiment(method, objects, Path(out) if out else None, on_round, on_start)
    if isinstance(method, Method):
        objects.method = method
        names |= {"method": _method_name(method), "parameters": _written(method)}
    else:
        names["method"] = method
    data = str(data) if isinstance(data, Path) else data
    for name, value in (("data", data), ("model", model), ("loss", loss)):
        if value is None or isinstance(value, (int, float)):
            raise FedtailorError(
                f"{name}={value!r} is not understood: give a name or an object (see help(fedtailor.run))."
            )
        if not isinstance(value, str):
            setattr(objects, name, value)
        names[name] = value if isinstance(value, str) else object_name(value)
    experiment = make_experiment({**names, **_with_parameters(names["method"], dict(settings))})
    return run_experiment(experiment, objects, Path(out) if out else None, on_round, on_start)


def run_experiment(
    experiment: Experiment,
    objects: Objects | None = None,
    out: Path | None = None,
    on_round: OnRound | None = None,
    on_start: OnStart | None = None,
) -> RunResult:
    """Run a complete experiment."""
    with isolated():
        return run_prepared(experiment, prepare(experiment, objects or Objects()), out, on_round, on_start)


def run_prepared(
    experiment: Experiment,
    prepared: Prepared,
    out: Path | None = None,
    on_round: OnRound | None = None,
    on_start: OnStart | None = None,
) -> RunResult:
    """Run an experiment whose data and network are in place."""
    with isolated():
        experiment = experiment.model_copy(update={"parameters": _written(prepared.method)})  # the defaults too
        prepared = replace(prepared, experiment=experiment)
        directory = RunDirectory.create(out, experiment, prepared.data, prepared.terms.fingerprint) if out else None
        with closing(Simulation(prepared, directory)) as new:
            new.start()
            return _finish(new, on_round, on_start)


def resume(
    path: str | Path,
    *,
    method: Method | None = None,
    data: Dataset | Sequence[Any] | None = None,
    model: ModelLike | None = None,
    loss: Loss | None = None,
    on_round: OnRound | None = None,
    on_start: OnStart | None = None,
    **changes: Any,
) -> RunResult:
    """Go on with a run after its last checkpoint, to the same numbers as if it had never stopped.

    Only what does not change its numbers may be changed: `rounds` (more of them), `workers`, `engine`,
    `states`, `checkpoint_every`, `data_dir`, `debug`. Objects that were passed to `run` must be passed again.
    """
    directory = RunDirectory(Path(path))
    before = directory.experiment()
    for name in changes:
        if name not in ("rounds", "workers", "engine", "states", "checkpoint_every", "data_dir", "debug"):
            raise FedtailorError(f"{name!r} cannot be changed when a run is resumed: start a new run for it.")
    after = make_experiment({**before.model_dump(), **changes})
    if after.rounds < before.rounds:
        raise FedtailorError(f"The run in {path} has {before.rounds} rounds already: it can only get more.")
    objects = Objects(method, data, model, loss)
    _check_objects(before, objects)
    with isolated(), closing(reopen(Path(path), after, objects)) as old:
        old.restore()
        if after.rounds != before.rounds:
            write_atomically(Path(path) / "experiment.toml", write_toml(after.model_dump()))
        return _finish(old, on_round, on_start)


def load(path: str | Path, data_dir: str | None = None) -> RunResult:
    """The result of a run directory, finished or not. `data_dir` says where its data lie now, if they were moved."""
    directory = RunDirectory(Path(path))
    experiment = directory.experiment()

    def opened() -> Simulation:
        _check_objects(experiment, Objects())
        with isolated():
            return look_into(Path(path), data_dir)

    names, clients = directory.partition()["clients"], list(directory.clients())
    return RunResult(experiment, directory.rounds(), lambda: clients, names, opened, Path(path))


def _finish(run: Simulation, on_round: OnRound | None, on_start: OnStart | None) -> RunResult:
    """Do the rounds that are left, and write the result down."""
    loop = run.loop
    if on_start:
        on_start(loop)
    with scalars(loop) as write, closing(run.run()) as rounds:
        for record in rounds:
            write(record)
            if on_round:
                on_round(record)
    path = run.directory.path if run.directory else None
    result = RunResult(run.experiment, loop.rounds, loop.client_records, run.data.names, lambda: run, path)
    if run.directory:
        run.directory.finish(result.summary())
    return result


def _method_name(method: Method) -> str:
    """The name under which a method object is found again."""
    return method.name if CATALOGUE.get(method.name) is type(method) else object_name(type(method))


def _with_parameters(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the method's own parameters, which may stand among them, in their section."""
    own = {
        name
        for name in settings
        if name not in Experiment.model_fields and name in type(find_method(method)).model_fields
    }
    rest = {name: value for name, value in settings.items() if name not in own}
    given = rest.get("parameters", {})
    if not isinstance(given, dict):
        return rest  # refused with the other settings
    parameters = {**given, **{name: settings[name] for name in own}}
    return {**rest, "parameters": parameters} if parameters else rest


def _written(method: Method) -> dict[str, Any]:
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


def _check_objects(experiment: Experiment, objects: Objects) -> None:
    """A run that was given objects needs them again, and the same ones as far as that can be seen."""
    for name in ("method", "data", "model", "loss"):
        recorded, given = str(getattr(experiment, name)), getattr(objects, name)
        if isinstance(given, Method):
            if _method_name(given) != recorded or _written(given) != experiment.parameters:
                raise FedtailorError(f"This is not the run's method: that is {recorded} with {experiment.parameters}.")
        elif given is not None and name in ("model", "loss") and object_name(given) != recorded:
            raise FedtailorError(f"This is not the run's {name}: that is {recorded}.")
        elif given is not None and name == "data" and not recorded.startswith("object:"):
            raise FedtailorError(f"The run's data have a name ({recorded}): leave data= out.")
        if recorded.startswith(("object:", "__main__:")) and given is None:
            raise FedtailorError(f"This run got its {name} as a Python object ({recorded}): pass {name}= to resume it.")
