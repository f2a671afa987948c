"""From a run to model files: the model that each client predicts with after the last round, or the global one."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from fedtailor.data import FederatedData
from fedtailor.data.preprocessing import Preprocessing
from fedtailor.deploy.model_file import Description, check_free, files_of, write_model
from fedtailor.deploy.onnx import OnnxNetwork
from fedtailor.errors import FedtailorError
from fedtailor.experiment import Experiment, experiment_hash
from fedtailor.local.inputs import Shape, held, sample_shape
from fedtailor.local.isolation import isolated
from fedtailor.messages import EvaluateShared, Measured, Metrics
from fedtailor.models import import_lines, wants_tokens
from fedtailor.models.expression import expression
from fedtailor.models.lora import plain
from fedtailor.result import RunResult
from fedtailor.runs import load
from fedtailor.server.evaluation import averages
from fedtailor.server.records import Averages
from fedtailor.simulation import Simulation
from fedtailor.site.site import Site, Terms
from fedtailor.site.sites import Sites
from fedtailor.version import __version__

OnModel = Callable[[list[Path], Description], None]


def export(
    run: RunResult | str | Path,
    *,
    to: str | Path,
    client: int | str | None = None,
    global_model: bool = False,
    onnx: bool = False,
    overwrite: bool = False,
    trust: bool = False,
    on_model: OnModel | None = None,
) -> list[Path]:
    """Write the models of a run into a directory, and return the model files.

    They are the models of all training clients, of one `client` (by number or name), or the `global_model`. A client's
    model is the one it predicts with after the last round, or after the last checkpoint of a run that is not finished:
    fine-tuned, if the run's evaluation says so. Beside each `.safetensors` is a `.json` that describes it, and with
    `onnx` an `.onnx`. `trust` allows a run directory to name code of its own (see `load`).
    """
    if global_model and client is not None:
        raise FedtailorError("The global model is no client's: ask for one of them.")
    result = run if isinstance(run, RunResult) else load(run, trust=trust)
    training = [number for number in range(len(result.names)) if number not in result.partition["new"]]
    chosen = training if client is None else [result.number_of(client)]
    numbers: list[int | None] = [None] if global_model else [*chosen]
    stems = {
        number: Path(to) / ("global" if number is None else file_name("client", number, result.names[number]))
        for number in numbers
    }
    check_free([file for stem in stems.values() for file in files_of(stem, onnx)], overwrite)
    with isolated():
        source = Source.of(result)
        graph = source.onnx() if onnx else None
        written = []
        for number, stem in stems.items():
            theta, quality = source.global_model() if number is None else source.personal_model(number)
            tuned = 0 if number is None else result.experiment.evaluation.fine_tune
            about = source.describe(
                number, "global" if number is None else "personal", quality, stem.name, fine_tuned=tuned
            )
            files = write_model(stem, source.terms.network.state_dict(theta), about, graph)
            if on_model:
                on_model(files, about)
            written.append(files[0])
        return written


def csv_columns(experiment: Experiment) -> dict[str, str | None]:
    """Return the names of the columns of a CSV file that are no features, as far as the experiment says them."""
    return {"label_column": experiment.label_column, "client_column": experiment.client_column}


def _in_words(pixels: str, table: Preprocessing | None) -> str:
    """Say how samples become inputs."""
    if table is None:
        scaled = "divided by 255" if pixels == "unit" else "divided by 255, times 2, minus 1"
        return f"Whole-number (uint8) pixels are {scaled}; other features are taken as they are."
    return (
        "The inputs are features made of the columns of a table, as `table` says: first every number minus its mean, "
        "divided by its scale (0 if it is missing); then a 1 for every number that is missing, in the columns where "
        "`missing` is true; then, for every category, a 1 at its value, and one more place for missing cells where "
        f"`missing` is true. In this order: {', '.join(table.feature_names)}."
    )


def file_name(prefix: str, number: int, name: str) -> str:
    """Name a client's files, without the ending: by its number, and its name if that says more."""
    plain = re.sub(r"[^\w.-]+", "-", name)
    return f"{prefix}-{number}" if name == str(number) else f"{prefix}-{number}-{plain}"


@dataclass(frozen=True)
class Quality:
    """The metrics of a model, the number of test samples behind them, and in words what they were measured on."""

    metrics: Metrics | Averages
    n_samples: int
    words: str


@dataclass(frozen=True)
class Source:
    """A run whose models are taken."""

    result: RunResult
    simulation: Simulation

    @classmethod
    def of(cls, result: RunResult) -> "Source":
        """Open a run that has at least one finished round."""
        simulation = result.simulation
        if simulation.finished == 0:
            where = f" in {result.path}" if result.path else ""
            raise FedtailorError(f"The run{where} has no finished round to take a model from: go on with it first.")
        return cls(result, simulation)

    @property
    def data(self) -> FederatedData:
        return self.simulation.data

    @property
    def terms(self) -> Terms:
        return self.simulation.terms

    @property
    def shape(self) -> Shape:
        """The shape of one sample."""
        return sample_shape(self.data.x)

    @property
    def tokens(self) -> int | None:
        """The number of token values that the network was built for."""
        return self.data.vocabulary if wants_tokens(self.result.experiment.model) else None

    @property
    def experiment_hash(self) -> str:
        joined = {f"joined {n}": asdict(join) for n, join in enumerate(self.data.joined)}
        return experiment_hash(self.result.experiment, {**self.terms.method.model_dump(), **joined})

    def onnx(self) -> OnnxNetwork:
        """Make the ONNX graph of the run's network."""
        return OnnxNetwork(self.module, held(self.data.x[:1]), self.data.preprocessing)

    @cached_property
    def module(self) -> nn.Module:
        """The run's network in plain PyTorch, without adapters."""
        return plain(self.terms.network.module)

    @cached_property
    def _lines(self) -> tuple[str | None, tuple[str, str]]:
        """The network in one line of plain PyTorch, if it is that simple; what to import, and what makes it."""
        if layers := expression(self.module):
            return layers, ("from torch import nn", layers)
        return None, import_lines(self.result.experiment.model, self.shape, self.data.n_outputs, self.tokens)

    def personal_model(self, client: int) -> tuple[Tensor, Quality]:
        """Return the model that a client predicts with, and its quality.

        The run's own record has it if its protocol evaluated personal models, and this client in the last round.
        Otherwise the model is measured now.
        """
        theta, last = self.simulation.personal_model(client), self.simulation.finished
        whose = "on the client's own test samples"
        results = next((record.results for record in self.result.clients if record.round == last), {})
        if self.result.experiment.evaluation.model == "personal" and client in results:
            metrics, how = results[client]["test"], f"as the run recorded it in round {last}"
        else:
            metrics, how = self._measure(theta, client)["test"], "measured at export"
        return theta, Quality(metrics, len(self.data.test(client)[1]), f"{whose}, {how}")

    def global_model(self) -> tuple[Tensor, Quality]:
        """Return the global model, and its mean quality over the training clients."""
        theta, experiment = self.result.global_vector(), self.result.experiment
        if theta is None:
            raise FedtailorError(
                f"The method {experiment.method} has no global model: export the clients' own (--all, --client)."
            )
        clients = [client for client in range(self.data.n_clients) if client not in self.data.new]
        measured = {client: self._measure(theta, client) for client in clients}
        average = experiment.evaluation.average
        words = f"on all clients' test samples, the mean over {average}s, measured at export"
        n_samples = sum(of_client["test"].n_samples for of_client in measured.values())
        return theta, Quality(averages(measured, average, self.result.metric), n_samples, words)

    def _measure(self, theta: Tensor, client: int) -> Measured:
        """Measure a model as it is, without fine-tuning, on a client's samples."""
        sites = Sites.at(self.data, replace(self.terms, fine_tune=0), None)
        reply = sites.handle(EvaluateShared(0, client, {"theta": theta}))
        if reply.error:
            raise FedtailorError(f"The model cannot be evaluated: {reply.error}.") from reply.cause
        return reply.measured[0]

    def describe(
        self,
        client: int | None,
        kind: Literal["personal", "global", "adapted"],
        quality: Quality,
        file: str,
        data: FederatedData | None = None,
        columns: Mapping[str, str | None] | None = None,
        *,
        fine_tuned: int,
    ) -> Description:
        """Describe a model so that others can use it. `data` and `columns` are the client's, if they are not the
        run's."""
        experiment, terms, data = self.result.experiment, self.terms, data or self.data
        counted = None if client is None else Site(client, data.client(client), terms).n_outputs
        counted = data.n_outputs if counted is None else counted
        layers, (importing, made) = self._lines
        table = data.preprocessing_of(client)
        notes = ["  # its inputs are the features that `table` describes"] if table else []
        notes += [f"  # the first {counted} outputs count"] if counted < data.n_outputs else []
        return Description(
            fedtailor=__version__,
            kind=kind,
            client=client,
            name=None if client is None else data.names[client],
            method=experiment.method,
            parameters=terms.method.model_dump(mode="json"),
            data=data.name,
            round=self.simulation.finished,
            rounds=experiment.rounds,
            fine_tuned=fine_tuned,
            experiment=self.experiment_hash,
            metric=self.result.metric,
            value=self.result.metric.of(quality.metrics),
            accuracy=quality.metrics.accuracy,
            loss=quality.metrics.loss,
            test_samples=quality.n_samples,
            measured=quality.words,
            network=experiment.model,
            layers=layers,
            load=[
                f"{importing}; from safetensors.torch import load_file",
                f"model = {made}{'.double()' if experiment.dtype == 'float64' else ''}.eval()",
                f"model.load_state_dict(load_file({file + '.safetensors'!r})){''.join(notes)}",
            ],
            input_shape=self.shape,
            tokens=self.tokens,
            dtype=experiment.dtype,
            pixels=experiment.pixels,
            preprocessing=_in_words(experiment.pixels, table),
            classes=(data.classes if client is None else data.classes_of(client))[:counted],
            multi_label=data.targets == "labels",
            outputs=data.n_outputs,
            counted=counted,
            table=table,
            **(csv_columns(experiment) if columns is None else columns),
        )
