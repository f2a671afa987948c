"""The result of a run."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
from html import escape
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import Tensor

from fedtailor._common.errors import FedtailorError, listed, unknown
from fedtailor._common.extras import import_pandas
from fedtailor.data import FederatedData
from fedtailor.data.agreement import FILE as FEDERATION
from fedtailor.data.own_data import data_in_words
from fedtailor.engines.client_predictions import body_outputs, predictions
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import Experiment
from fedtailor.experiment.attack import Attack
from fedtailor.experiment.privacy import Privacy
from fedtailor.messages import Measured, Metrics
from fedtailor.methods import method_title
from fedtailor.server.evaluation import LAST, averages, chosen_round
from fedtailor.server.observations import Observations
from fedtailor.server.records import ClientsRecord, Failures, Plain, RoundRecord, failures, stop_in_words
from fedtailor.server.run_directory import RunDirectory, describe, plain
from fedtailor.server.setup import Setup
from fedtailor.training.isolation import isolated
from fedtailor.training.metrics import ACCURACY, Metric
from fedtailor.training.predictions import Predictions

if TYPE_CHECKING:
    import pandas


class RunResult:
    """The outcome of a run. `experiment.evaluation` says what its metrics mean.

    `rounds` has the record of every round, `names` the names of the clients, `path` the run directory, if there is one.
    `metric` is the metric that decides, with its name and its direction; `value` is the result by it. `hostile` has the
    numbers of the hostile clients of a study: all averages are of the others.
    """

    def __init__(
        self,
        experiment: Experiment,
        rounds: list[RoundRecord],
        client_records: Callable[[], Iterable[ClientsRecord]],
        names: Sequence[str],
        opened: Callable[[], Simulation],
        path: Path | None,
        metric: Metric = ACCURACY,
        hostile: Sequence[int] = (),
    ) -> None:
        self.experiment = experiment
        self.rounds = rounds
        self.names = tuple(names)
        self.path = path
        self.metric = metric
        self.hostile = list(hostile)
        self.tracked: dict[str, str] = {}  # its ids in tools like MLflow, of a run without a directory too
        self._client_records = client_records
        self._opened = opened

    def __repr__(self) -> str:
        experiment, evaluation = self.experiment, self.experiment.evaluation
        rounds = f"{len(self.rounds)} of {experiment.rounds} rounds"
        quality = "not evaluated" if self.loss is None else f"loss {self.loss:.4g}"
        if self.value is not None:
            of_clients = f" {record.of_clients}" if (record := self.chosen()) and record.missing else ""
            which = f"({evaluation.model} models, {evaluation.choose} round)"
            quality = f"{self.metric.shown(self.value)}{of_clients} {which}"
        where = f", in {self.path}" if self.path else ""
        return f"<RunResult {self.method} on {self.clients_title}, {rounds}: {quality}{where}>"

    def _repr_html_(self) -> str:
        """The rounds as a table, for notebooks; at most about twenty of them."""
        value, counts = self.metric.field, ["participants", "failed", "bytes_up", "bytes_down"]
        if any(record.missing for record in self.rounds):
            counts.insert(2, "missing")
        columns = {"round": "round", value: self.metric.title, "std": f"{self.metric.title} std", "loss": "loss"}
        columns |= {name: name.replace("_", " ") for name in counts}
        head = "".join(f"<th>{escape(title)}</th>" for title in columns.values())
        step = max(1, -(-len(self.rounds) // 20))
        rows = "".join(
            "<tr>" + "".join(f"<td>{_cell(record.get(name))}</td>" for name in columns) + "</tr>"
            for record in (record.flat() for record in self.rounds[::-1][::step][::-1])
        )
        caption = escape(f"{self!r:.200}"[1:-1]) + ". " + escape(self.experiment.evaluation.in_words(self.metric))
        return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    @cached_property
    def _own_title(self) -> str:
        """The title of the method, if it is a class of the user's own, as the run recorded it; "" for others."""
        if ":" not in self.experiment.method:
            return ""
        if self.path is None:
            return self.simulation.terms.method.title
        return setup.title if (setup := self.setup) else ""

    @property
    def method(self) -> str:
        """The method's name as commands have it; of a class of the user's own, its title."""
        return self._own_title or self.experiment.method

    @property
    def method_title(self) -> str:
        """The method's name as its paper writes it; of a class of the user's own, its title."""
        return self._own_title or method_title(self.experiment.method)

    @property
    def data_title(self) -> str:
        """The name of the data, or "24 clients of your own data" where they were objects."""
        name, count = data_in_words(self.experiment.data), len(self.names)
        return name if name == self.experiment.data else f"{count} client{'' if count == 1 else 's'} of {name}"

    @property
    def clients_title(self) -> str:
        """The data and the number of clients, as a table's title begins."""
        named = self.data_title == self.experiment.data
        return f"{self.data_title}, {len(self.names)} clients" if named else self.data_title

    def to_pandas(self, what: Literal["rounds", "clients"] = "rounds") -> "pandas.DataFrame":
        """The records as a table of pandas: a row a round, or a row for each round, client and split."""
        pandas = import_pandas()
        if what == "rounds":
            return pandas.DataFrame([record.flat() for record in self.rounds]).set_index("round")
        if what != "clients":
            raise unknown("table", what, ("rounds", "clients"))
        rows = [
            {"round": record.round, "client": self.names[client], "hostile": client in self.hostile, "split": split}
            | {name: value for name, value in asdict(metrics).items() if name != "more"}
            | metrics.more
            for record in self.clients
            for client, measured in record.results.items()
            for split, metrics in measured.items()
        ]
        return pandas.DataFrame(rows)

    @property
    def finished(self) -> bool:
        """True if all rounds are done, or the run stopped by its own rule."""
        return len(self.rounds) >= self.experiment.rounds or self.stopped is not None

    @property
    def stopped(self) -> str | None:
        """Why the run ended before its last round (see `patience`, `epsilon` and `on_round`); None if it did not."""
        return stop_in_words(self.rounds, self.experiment.rounds)

    def chosen(self, choose: str | None = None) -> RoundRecord | None:
        """The round that counts, by the experiment's own rule or another one; None if none was evaluated."""
        return chosen_round(self.rounds, choose or self.experiment.evaluation.choose, self.metric)

    @property
    def value(self) -> float | None:
        """The mean test value of the metric that decides, in the round that counts."""
        return self.metric.of(record) if (record := self.chosen()) else None

    @property
    def validation(self) -> float | None:
        """The mean validation value of the same metric in the same round."""
        return self.metric.validation(record) if (record := self.chosen()) else None

    @property
    def higher_is_better(self) -> bool:
        """The direction of the metric that decides."""
        return self.metric.higher_is_better

    @property
    def accuracy(self) -> float | None:
        """The mean test accuracy in the round that counts; None if nothing was evaluated."""
        return record.accuracy if (record := self.chosen()) else None

    @property
    def loss(self) -> float | None:
        """The mean test loss in the round that counts; None if nothing was evaluated."""
        return record.loss if (record := self.chosen()) else None

    @property
    def epsilon(self) -> float | None:
        """The privacy that the run has spent, ε at its δ; None without privacy."""
        return self.rounds[-1].epsilon if self.rounds else None

    @property
    def privacy_in_words(self) -> str:
        """Say what ε means here, to stand below a table; "" without privacy."""
        if self.epsilon is None or self.experiment.privacy is None:
            return ""
        privacy = Privacy.parse(self.experiment.privacy)
        real = self.path is not None and (self.path / FEDERATION).is_file()
        return privacy.in_words(simulated=not real, secure=self.experiment.secure)

    @property
    def failures(self) -> Failures:
        """The clients that failed: in how many rounds, of how many that they were called in."""
        return failures(self.rounds)

    @property
    def never_called(self) -> list[int]:
        """The honest training clients that took part in no round."""
        called = {client for record in self.rounds for client in record.participants}
        left_out = called | set(self.partition["new"]) | set(self.hostile)
        return [client for client in range(len(self.names)) if client not in left_out]

    @property
    def warnings(self) -> list[str]:
        """All warnings of the run, in the order of its rounds."""
        return [text for record in self.rounds for text in record.warnings.values()]

    @cached_property
    def clients(self) -> list[ClientsRecord]:
        """The clients' records, round by round."""
        return list(self._client_records())

    @property
    def per_client(self) -> dict[int, Metrics]:
        """Each client's test metrics in the round that counts, of hostile ones too."""
        record = self.chosen()
        results = (r.results for r in self._client_records() if record is not None and r.round == record.round)
        return {client: measured["test"] for client, measured in next(results, {}).items()}

    @property
    def known_for(self) -> str:
        """Say for how many clients the metric is defined (an AUC needs samples of two classes), if not for all."""
        found = self.per_client.items()
        measured = [metrics for client, metrics in found if metrics.n_samples and client not in self.hostile]
        known = sum(self.metric.of(metrics) is not None for metrics in measured)
        if known in (0, len(measured)):
            return ""
        return f"The {self.metric.title} is defined for {known} of {len(measured)} clients with test samples."

    @property
    def counted(self) -> list[dict[int, Measured]]:
        """Every client's metrics in the round that counts, or in each of the last five or ten if these do."""
        if (chosen := self.chosen()) is None:
            return []
        if last := LAST.get(self.experiment.evaluation.choose):
            return [record.results for record in self._client_records() if record.results][-last:]
        return [record.results for record in self._client_records() if record.round == chosen.round]

    @property
    def hostile_value(self) -> float | None:
        """The same as `value`, but of the hostile clients, if there are any."""
        average, found = self.experiment.evaluation.average, list[float]()
        for results in self.counted:
            measured = {client: of for client, of in results.items() if client in self.hostile}
            value = self.metric.of(averages(measured, average, self.metric))
            found += [] if value is None else [value]
        return fmean(found) if found else None

    @cached_property
    def backdoor(self) -> float | None:
        """The success of a backdoor: the share of the honest clients' test samples with its trigger, not of the target
        class, that their client's personal model takes for the target. None without this attack."""
        if self.experiment.attack is None or not self.experiment.attack.startswith("backdoor"):
            return None
        recorded = self.recorded_backdoor
        with isolated():
            return self.simulation.backdoor() if recorded is None else recorded

    @property
    def recorded_backdoor(self) -> float | None:
        """The same as the run recorded it at its end; None if it is not recorded."""
        outcome = RunDirectory(self.path).outcome() if self.path else None
        return outcome.backdoor if outcome else None

    @property
    def averages_of(self) -> str:
        """Say of whom the averages are, and who is hostile; "" if nobody is."""
        if not self.hostile:
            return ""
        honest = len(self.names) - len(self.partition["new"]) - len(self.hostile)
        new = self.experiment.evaluation.clients == "new"
        whom = f"{honest} training clients are honest" if new else f"Averages are of the {honest} honest clients"
        who = listed([self.names[client] for client in self.hostile])
        return f"{whom}; {len(self.hostile)} hostile ({Attack.parse(self.experiment.attack).kind}): {who}."

    @property
    def hostile_outcome(self) -> str:
        """Say how the hostile clients did; "" if there are none, or nothing is known of them."""
        said = [] if self.hostile_value is None else [f"hostile clients: {self.metric.shown(self.hostile_value)}"]
        if (share := self.backdoor if self.path is None else self.recorded_backdoor) is not None:
            said.append(f"the trigger misleads {100 * share:.1f} % of the honest clients' test samples")
        return "; ".join(said)

    @property
    def missing(self) -> list[str]:
        """The clients that were not measured in the round that counts, by name: its averages are of the others."""
        return [self.names[client] for client in record.missing] if (record := self.chosen()) else []

    @property
    def measured_for(self) -> str:
        """Say of which clients the averages are, if some were not measured: in the round that counts, and in others."""
        incomplete, record = [record.round for record in self.rounds if record.missing], self.chosen()
        if record is None or not incomplete:
            return "No client was measured in any round." if incomplete else ""
        said, last = [], self.rounds[-1]
        if record.missing:
            choose = self.experiment.evaluation.choose
            when = "in all rounds that count" if choose in LAST else f"in round {record.round}"
            s, were = ("s", "were") if len(record.missing) > 1 else ("", "was")
            who = f"client{s} {listed(self.missing)} {were}"
            said.append(f"The metrics are {record.of_clients}: {who} not measured {when}.")
        if last.missing and not last.evaluated:
            said.append(f"No client was measured in the last round, {last.round}.")
        if incomplete != [record.round]:
            said.append(f"In {len(incomplete)} of {len(self.rounds)} rounds not all clients were measured.")
        return " ".join(said)

    @cached_property
    def partition(self) -> Plain:
        """Every client's name and its samples by class and split, with a checksum of the samples."""
        if self.path is not None:
            return vars(RunDirectory(self.path).partition())
        return cast(Plain, plain(describe(self.data, self.hostile)))

    @property
    def setup(self) -> Setup | None:
        """The layers of the network, and what a client uploads; None for a directory of an older version."""
        return RunDirectory(self.path).setup() if self.path else self.simulation.prepared.setup

    @property
    def observations(self) -> Observations:
        """The method's diagnostics by round (PGFed's A, pFedMB's α, …)."""
        return Observations(self.path / "observed", 0) if self.path else self.simulation.loop.observations

    def observed(self, round: int) -> dict[str, Tensor]:
        """The method's diagnostics in one round, if they were recorded."""
        return self.observations.get(round)

    # --- models and states after the last round, or after the last checkpoint of a run that is not finished ---

    @cached_property
    def simulation(self) -> Simulation:
        """The server and all sites as the run left them."""
        return self._opened()

    @property
    def data(self) -> FederatedData:
        """The data of all clients."""
        return self.simulation.data

    @property
    def server_state(self) -> dict[str, Tensor]:
        """The server's tensors."""
        return self.simulation.server.state

    def client_state(self, client: int | str) -> dict[str, Tensor]:
        """A client's private tensors."""
        return self.simulation.state_of(self.number_of(client))

    def personal_vector(self, client: int | str) -> Tensor:
        """The model that a client (by number or name) predicts with, as a vector."""
        with isolated():
            return self.simulation.personal_model(self.number_of(client))

    def personal(self, client: int | str) -> dict[str, Tensor]:
        """The model that a client (by number or name) predicts with, as a state dict of the network."""
        with isolated():
            return self.simulation.terms.network.state_dict(self.personal_vector(client))

    def predict(self, client: int | str, x: Any = None) -> Predictions:
        """What a client (by number or name) predicts for samples that are given as the run's data were (a tensor, an
        array, a table, a data set); for None, for its test samples in the order of `data.test(client)`."""
        with isolated():
            return predictions(self.simulation, self.number_of(client), x)

    def features(self, client: int | str, x: Any = None) -> Tensor:
        """What enters the head of a client's personal model, a row a sample. `x` is as in `predict`."""
        with isolated():
            return body_outputs(self.simulation, self.number_of(client), x)

    def global_vector(self) -> Tensor | None:
        """The global model as a vector, if the method has one."""
        with isolated():
            return self.simulation.loop.method.global_model(self.simulation.server)

    def number_of(self, client: int | str) -> int:
        """A client's number, from its name or the number itself (a name comes first)."""
        names = self.names
        if isinstance(client, str) and client not in names and not client.isdecimal():
            raise unknown("client", client, names)
        number = names.index(str(client)) if client in names else int(client)
        if number not in range(len(names)):
            raise FedtailorError(f"There is no client {client}: they are numbered from 0 to {len(names) - 1}.")
        return number

    def summary(self) -> Plain:
        """The outcome in a few numbers, under every rule of choosing."""
        keep = ["round", "accuracy", "accuracy_std", "accuracy_worst_decile", "loss", "balanced_accuracy", "auc"]
        own = self.experiment.evaluation.metrics or {}
        keep += [name for name in dict.fromkeys([self.metric.field, *own, "std", "worst_decile"]) if name not in keep]
        choices = {rule: self.chosen(rule) for rule in ("last", "best-validation", "best-test")}
        return {
            "method": self.experiment.method,
            "data": self.experiment.data,
            "seed": self.experiment.seed,
            "rounds": len(self.rounds),
            "finished": self.finished,
            "stopped": self.stopped,
            "evaluation": self.experiment.evaluation.model_dump(),
            "metric": self.metric.name,
            "higher_is_better": self.higher_is_better,
            "value": self.value,
            "validation": self.validation,
            "accuracy": self.accuracy,
            "loss": self.loss,
            **{
                rule: {name: (record.flat() if record else {}).get(name) for name in keep}
                for rule, record in choices.items()
            },
            "epsilon": self.epsilon,
            "epsilon_rdp": self.rounds[-1].epsilon_rdp if self.rounds else None,
            "bytes_up": sum(record.bytes_up for record in self.rounds),
            "bytes_down": sum(record.bytes_down for record in self.rounds),
            "seconds": round(sum(record.seconds for record in self.rounds), 3),
            "joined": [{"after": join.after, "clients": list(join.clients)} for join in self.partition["joined"]],
            "missing": self.missing,
            "hostile": [self.names[client] for client in self.hostile],
            "hostile_value": self.hostile_value,
            "backdoor": self.backdoor,
            "failed": {self.names[client]: {"failed": f, "called": n} for client, (f, n) in self.failures.items()},
            "warnings": self.warnings,
        }


def _cell(value: Any) -> str:
    """A value in a cell of a notebook's table."""
    if isinstance(value, list):
        return str(len(value))
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
