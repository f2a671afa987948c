"""Running experiments from Python: `run`, `resume`, `load`, and the result that they return."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fedtailor.data import Dataset
from fedtailor.errors import FedtailorError, unknown
from fedtailor.experiment import Experiment, make_experiment, write_toml
from fedtailor.imports import object_name
from fedtailor.local.network import Loss
from fedtailor.method import Method
from fedtailor.methods import CATALOGUE, find_method
from fedtailor.models import ModelLike
from fedtailor.server.evaluation import chosen_round
from fedtailor.server.loop import Federation
from fedtailor.server.observations import Observations
from fedtailor.server.record import Record, RunDirectory, describe, plain
from fedtailor.server.tensorboard import scalars
from fedtailor.simulation import Objects, federation, look_into, prepare, reopen
from fedtailor.store import write_atomically
from fedtailor.transport import Bench

OnRound = Callable[[Record], None]


class RunResult:
    """What a run came to. `experiment.evaluation` says what its figures mean."""

    def __init__(
        self,
        experiment: Experiment,
        rounds: list[Record],
        client_records: Callable[[], Iterable[Record]],
        names: Sequence[str],
        opened: Callable[[], Federation],
        path: Path | None,
    ) -> None:
        self.experiment = experiment
        self.rounds = rounds
        self.names = tuple(names)  # of the clients
        self.path = path
        self._client_records = client_records
        self._opened = opened

    @property
    def finished(self) -> bool:
        return len(self.rounds) >= self.experiment.rounds

    def chosen(self, choose: str | None = None) -> Record:
        """The figures of the round that counts, by the experiment's own rule or another one."""
        return chosen_round(self.rounds, choose or self.experiment.evaluation.choose) or {}

    @property
    def accuracy(self) -> float | None:
        return self.chosen().get("accuracy")

    @property
    def loss(self) -> float | None:
        return self.chosen().get("loss")

    @cached_property
    def clients(self) -> list[Record]:
        """What was recorded of each client, round by round."""
        return list(self._client_records())

    @property
    def per_client(self) -> dict[int, Record]:
        """Each client's test metrics in the round that counts."""
        number = self.chosen().get("round")
        records = (record["results"] for record in self._client_records() if record["round"] == number)
        results: Record = next(records, {})
        return {int(client): measured["test"] for client, measured in results.items()}

    @cached_property
    def partition(self) -> Record:
        """Every client's name and its samples by class and split, with a checksum of the samples."""
        if self.path is not None:
            return RunDirectory(self.path).partition()
        return cast(Record, plain(describe(self._federation.data)))

    @cached_property
    def _federation(self) -> Federation:
        return self._opened()

    def observed(self, round: int) -> dict[str, Tensor]:
        """What the method showed of its inner life in a round (PGFed's A, pFedMB's α, …), if it was recorded."""
        if self.path is not None:
            return Observations(self.path / "observed", 0).get(round)
        return self._federation.observations.get(round)

    def personal(self, client: int | str) -> dict[str, Tensor]:
        """The state dict of the model that a client (by number or name) predicts with after the last round."""
        number = self.number_of(client)
        with isolated():
            return self._federation.bench.network.state_dict(self._federation.personal(number))

    def number_of(self, client: int | str) -> int:
        """A client's number, from its name or the number itself (a name comes first)."""
        names = self.names
        if isinstance(client, str) and client not in names and not client.isdecimal():
            raise unknown("client", client, names)
        number = names.index(str(client)) if client in names else int(client)
        if number not in range(len(names)):
            raise FedtailorError(f"There is no client {client}: they are numbered from 0 to {len(names) - 1}.")
        return number

    def summary(self) -> Record:
        """The outcome in a few figures, under every rule of choosing."""
        keep = (
            "round",
            "accuracy",
            "accuracy_std",
            "accuracy_worst_decile",
            "loss",
            "balanced_accuracy",
            "auc",
        )
        choices = {rule: chosen_round(self.rounds, rule) or {} for rule in ("last", "best-validation", "best-test")}
        return {
            "method": self.experiment.method,
            "data": self.experiment.data,
            "seed": self.experiment.seed,
            "rounds": len(self.rounds),
            "finished": self.finished,
            "evaluation": self.experiment.evaluation.model_dump(),
            "accuracy": self.accuracy,
            "loss": self.loss,
            **{rule: {name: record.get(name) for name in keep} for rule, record in choices.items()},
            "bytes_up": sum(record["bytes_up"] for record in self.rounds),
            "bytes_down": sum(record["bytes_down"] for record in self.rounds),
            "seconds": round(sum(record["seconds"] for record in self.rounds), 3),
        }


def run(
    method: str | Method = "fedavg",
    *,
    data: str | Path | Dataset | Sequence[Any] = "digits",
    model: ModelLike = "mlp",
    loss: str | Loss = "cross-entropy",
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    on_start: Callable[[Federation], None] | None = None,
    **settings: Any,
) -> RunResult:
    """Run an experiment and return its result.

    `settings` are those of an experiment file (see `Experiment`) and the method's own parameters:
    `run("ditto", data="digits", clients=20, rounds=10, lam=0.5)`. Objects may stand for names: a `Method`, a list of
    one (x, y) per client, an `nn.Module` or what makes one, a loss function. With `out`, the run is recorded in that
    directory as it goes and can be resumed; without, nothing is written.
    """
    objects = Objects()
    names: dict[str, Any] = {}
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
    experiment = make_experiment({**names, **_with_parameters(names["method"], settings)})
    return run_experiment(experiment, objects, Path(out) if out else None, on_round, on_start)


def run_experiment(
    experiment: Experiment,
    objects: Objects | None = None,
    out: Path | None = None,
    on_round: OnRound | None = None,
    on_start: Callable[[Federation], None] | None = None,
) -> RunResult:
    """Run a complete experiment."""
    with isolated():
        return run_prepared(experiment, prepare(experiment, objects or Objects()), out, on_round, on_start)


def run_prepared(
    experiment: Experiment,
    bench: Bench,
    out: Path | None = None,
    on_round: OnRound | None = None,
    on_start: Callable[[Federation], None] | None = None,
) -> RunResult:
    """Run an experiment whose data and network are in place."""
    with isolated():
        experiment = experiment.model_copy(update={"parameters": _written(bench.method)})  # the defaults too
        directory = RunDirectory.create(out, experiment, bench.data, bench.fingerprint()) if out else None
        with closing(federation(experiment, bench, directory)) as new:
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
    on_start: Callable[[Federation], None] | None = None,
    **changes: Any,
) -> RunResult:
    """Go on with a run after its last checkpoint, to the same numbers as if it had never stopped.

    Only what does not change its numbers may be changed: `rounds` (more of them), `workers`, `engine`,
    `states`, `checkpoint_every`, `data_dir`. Objects that were passed to `run` must be passed again.
    """
    directory = RunDirectory(Path(path))
    before = directory.experiment()
    for name in changes:
        if name not in ("rounds", "workers", "engine", "states", "checkpoint_every", "data_dir"):
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

    def opened() -> Federation:
        _check_objects(experiment, Objects())
        with isolated():
            return look_into(Path(path), data_dir)

    names, clients = directory.partition()["clients"], list(directory.clients())
    return RunResult(experiment, directory.rounds(), lambda: clients, names, opened, Path(path))


def _finish(run: Federation, on_round: OnRound | None, on_start: Callable[[Federation], None] | None) -> RunResult:
    """Do the rounds that are left, and write the result down."""
    if on_start:
        on_start(run)
    with scalars(run) as write, closing(run.run()) as rounds:
        for record in rounds:
            write(record)
            if on_round:
                on_round(record)
    path = run.directory.path if run.directory else None
    result = RunResult(run.experiment, run.rounds, run.client_records, run.data.names, lambda: run, path)
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
    parameters = {**rest.get("parameters", {}), **{name: settings[name] for name in own}}
    return {**rest, "parameters": parameters} if parameters else rest


def _written(method: Method) -> dict[str, Any]:
    """A method's parameters as an experiment file holds them; refuses what would come back as something else."""
    parameters = method.model_dump(exclude_none=True)
    if type(method)(**parameters) != method or any(isinstance(value, dict) for value in parameters.values()):
        raise FedtailorError(f"The parameters of {type(method).__name__} cannot be written to an experiment file.")
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


@contextmanager
def isolated() -> Iterator[None]:
    """Compute with one thread, as every worker does: the same bits on any number of cores. The caller's number of
    threads and random state are as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)
