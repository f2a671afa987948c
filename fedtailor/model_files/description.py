"""Descriptions of models for their files: from an experiment, its terms and its data, wherever these are.

A simulation has the data of all clients, a site its own alone, a server none: the same code serves them.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor, nn

from fedtailor._common.version import __version__
from fedtailor.client.sites import Site
from fedtailor.client.terms import Terms
from fedtailor.data import FederatedData
from fedtailor.data.preprocessing import Preprocessing
from fedtailor.experiment import Experiment, experiment_hash
from fedtailor.messages import Measured, Metrics
from fedtailor.model_files.format import Description, ModelKind, write_model
from fedtailor.model_files.onnx import OnnxNetwork
from fedtailor.models import import_lines, wants_tokens
from fedtailor.models.expression import expression
from fedtailor.models.lora import plain
from fedtailor.server.records import Averages
from fedtailor.training.inputs import Shape, held, sample_shape
from fedtailor.training.metrics import Metric

Columns = Mapping[str, str | None]  # that are no features: `label_column` and `client_column`


@dataclass(frozen=True)
class Quality:
    """The metrics of a model, the number of test samples behind them, and in words what they were measured on."""

    metrics: Metrics | Averages
    n_samples: int
    words: str


@dataclass(frozen=True)
class Origin:
    """The origin of models: an experiment, its terms and data, its last round and the metric that decides."""

    experiment: Experiment
    terms: Terms
    data: FederatedData
    round: int
    metric: Metric

    @property
    def shape(self) -> Shape:
        """The shape of one sample."""
        return sample_shape(self.data.x)

    @property
    def tokens(self) -> int | None:
        """The number of token values that the network was built for."""
        return self.data.vocabulary if wants_tokens(self.experiment.model) else None

    @property
    def experiment_hash(self) -> str:
        joined = {f"joined {n}": asdict(join) for n, join in enumerate(self.data.joined)}
        return experiment_hash(self.experiment, {**self.terms.method.model_dump(), **joined})

    def onnx(self) -> OnnxNetwork:
        """Make the ONNX graph of the network."""
        return OnnxNetwork(self.module, held(self.data.x[:1]), self.data.preprocessing)

    @cached_property
    def module(self) -> nn.Module:
        """The network in plain PyTorch, without adapters."""
        return plain(self.terms.network.module)

    @cached_property
    def _lines(self) -> tuple[str | None, tuple[str, str]]:
        """The network in one line of plain PyTorch, if it is that simple; what to import, and what makes it."""
        if layers := expression(self.module):
            return layers, ("from torch import nn", layers)
        return None, import_lines(self.experiment.model, self.shape, self.data.n_outputs, self.tokens)

    def write(
        self,
        stem: Path,
        theta: Tensor,
        kind: ModelKind,
        client: int | None,
        quality: Quality,
        graph: OnnxNetwork | None = None,
        columns: Columns | None = None,
    ) -> tuple[list[Path], Description]:
        """Write a model of these data into files. A client's own is fine-tuned as the evaluation says."""
        tuned = 0 if kind == "global" else self.experiment.evaluation.fine_tune
        about = self.describe(client, kind, quality, stem.name, columns=columns, fine_tuned=tuned)
        return write_model(stem, self.terms.network.state_dict(theta), about, graph), about

    def describe(
        self,
        client: int | None,
        kind: ModelKind,
        quality: Quality,
        file: str,
        data: FederatedData | None = None,
        columns: Columns | None = None,
        *,
        fine_tuned: int,
    ) -> Description:
        """Describe a model so that others can use it. `data` and `columns` are the client's, if they are not those of
        the experiment."""
        experiment, terms, data = self.experiment, self.terms, data or self.data
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
            round=self.round,
            rounds=experiment.rounds,
            fine_tuned=fine_tuned,
            experiment=self.experiment_hash,
            metric=self.metric,
            value=self.metric.of(quality.metrics),
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


def write_site_model(
    stem: Path,
    experiment: Experiment,
    terms: Terms,
    data: FederatedData,
    number: int,
    theta: Tensor,
    measured: Measured,
    round: int,
    columns: Columns | None = None,
) -> list[Path]:
    """Write the model that a site predicts with, as `export` would, and return its files.

    `data` has the names of all clients, and the samples of this one. `columns` are those of the site's own table, if
    its experiment does not name them.
    """
    quality = Quality(measured["test"], measured["test"].n_samples, "on the site's own test samples, measured there")
    origin = Origin(experiment, terms, data, round, terms.metric)
    return origin.write(stem, theta, "personal", number, quality, columns=columns)[0]


def csv_columns(experiment: Experiment) -> Columns:
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
