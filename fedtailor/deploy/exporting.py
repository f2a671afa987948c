"""From a run to model files: what each client predicts with after the last round, or the one global model."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from fedtailor import __version__
from fedtailor.api import RunResult, isolated, load
from fedtailor.data import FederatedData
from fedtailor.deploy.model_file import Description, check_free, files_of, write_model
from fedtailor.deploy.onnx import OnnxNetwork
from fedtailor.errors import FedtailorError
from fedtailor.models import import_lines
from fedtailor.models.expression import expression
from fedtailor.server.evaluation import summary
from fedtailor.server.loop import Federation
from fedtailor.server.record import Record
from fedtailor.site.work import Measured
from fedtailor.studies.runner import experiment_hash
from fedtailor.transport import Task

OnModel = Callable[[list[Path], Description], None]


def export(
    run: RunResult | str | Path,
    *,
    to: str | Path,
    client: int | str | None = None,
    central: bool = False,
    onnx: bool = False,
    overwrite: bool = False,
    on_model: OnModel | None = None,
) -> list[Path]:
    """Write the model of one client (by number or name), of all that train, or the global one (`central`) into a
    directory; returns the model files.

    A client's model is the one it predicts with after the last round, or after the last checkpoint of a run that is
    not finished: fine-tuned, if the run's evaluation says so. Beside each `.safetensors` is a `.json` that describes
    it, and with `onnx` an `.onnx`.
    """
    if central and client is not None:
        raise FedtailorError("The global model is no client's: ask for one of them.")
    result = run if isinstance(run, RunResult) else load(run)
    training = [number for number in range(len(result.names)) if number not in result.partition["new"]]
    chosen = training if client is None else [result.number_of(client)]
    numbers: list[int | None] = [None] if central else [*chosen]
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
            theta, figures = source.central() if number is None else source.personal(number)
            tuned = 0 if number is None else result.experiment.evaluation.fine_tune
            about = source.describe(
                number, "global" if number is None else "personal", figures, stem.name, fine_tuned=tuned
            )
            files = write_model(stem, source.run.bench.network.state_dict(theta), about, graph)
            if on_model:
                on_model(files, about)
            written.append(files[0])
        return written


def file_name(prefix: str, number: int, name: str) -> str:
    """A client's files begin with this: its number, and its name if that says more."""
    plain = re.sub(r"[^\w.-]+", "-", name)
    return f"{prefix}-{number}" if name == str(number) else f"{prefix}-{number}-{plain}"


@dataclass(frozen=True)
class Figures:
    """What was measured of a model, on how many samples, and what that means in words."""

    metrics: Record
    samples: int
    words: str


@dataclass(frozen=True)
class Source:
    """A run whose models are taken."""

    result: RunResult
    run: Federation

    @classmethod
    def of(cls, result: RunResult) -> "Source":
        run = result._federation
        if run.finished == 0:
            where = f" in {result.path}" if result.path else ""
            raise FedtailorError(f"The run{where} has no finished round to take a model from: go on with it first.")
        return cls(result, run)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.run.data.x.shape[1:])

    def onnx(self) -> OnnxNetwork:
        return OnnxNetwork(self.run.bench.network.module, self.shape)

    def personal(self, client: int) -> tuple[Tensor, Figures]:
        """What a client predicts with, and the figures that the run recorded of it, if these are of this very model:
        a protocol may have looked at others, or not at this client in that round."""
        theta, samples, last = self.run.personal(client), self.run.evaluator.test_samples[client], self.run.finished
        whose = "on the client's own test samples"
        results: Record = next((record["results"] for record in self.result.clients if record["round"] == last), {})
        if self.run.experiment.evaluation.model == "personal" and str(client) in results:
            recorded = results[str(client)]["test"]
            return theta, Figures(recorded, samples, f"{whose}, as the run recorded it in round {last}")
        return theta, Figures(self._measure(theta, client)["test"], samples, f"{whose}, measured at export")

    def central(self) -> tuple[Tensor, Figures]:
        """The global model and its mean figures over the training clients."""
        run = self.run
        theta = run.method.central(run.server)
        if theta is None:
            raise FedtailorError(
                f"The method {run.experiment.method} has no global model: export the clients' own (--all, --client)."
            )
        clients = [client for client in range(run.data.clients) if client not in run.data.new]
        average, sizes = run.experiment.evaluation.average, run.evaluator.test_samples
        measured = {client: self._measure(theta, client) for client in clients}
        figures = summary(measured, average, sizes, run.evaluator.train_samples)
        words = f"on all clients' test samples, the mean over {average}s, measured at export"
        return theta, Figures(figures, sum(sizes[client] for client in clients), words)

    def _measure(self, theta: Tensor, client: int) -> Measured:
        """A model as it is, on a client's samples."""
        found = replace(self.run.bench, fine_tune=0).do(Task("evaluate shared", 0, (client,), {"theta": theta}))
        if found.error:
            raise FedtailorError(f"The model cannot be evaluated: {found.error}.")
        return found.measured[0]

    def describe(
        self,
        client: int | None,
        kind: Literal["personal", "global", "adapted"],
        figures: Figures,
        file: str,
        data: FederatedData | None = None,
        *,
        fine_tuned: int,
    ) -> Description:
        """All that one must know to use a model. `data` are the client's, if they are not the run's."""
        experiment, bench, data = self.result.experiment, self.run.bench, data or self.run.data
        counted = None if client is None else replace(bench, data=data).outputs_of(client)
        counted = data.outputs if counted is None else counted
        layers = expression(bench.network.module)
        importing, made = (
            ("from torch import nn", layers) if layers else import_lines(experiment.model, self.shape, data.outputs)
        )
        note = f"  # the first {counted} outputs count" if counted < data.outputs else ""
        scaled = "divided by 255" if experiment.pixels == "unit" else "divided by 255, times 2, minus 1"
        return Description(
            fedtailor=__version__,
            kind=kind,
            client=client,
            name=None if client is None else data.names[client],
            method=experiment.method,
            parameters=bench.method.model_dump(mode="json"),
            data=data.name,
            round=self.run.finished,
            rounds=experiment.rounds,
            fine_tuned=fine_tuned,
            experiment=experiment_hash(experiment, bench.method),
            accuracy=figures.metrics["accuracy"],
            loss=figures.metrics["loss"],
            test_samples=figures.samples,
            measured=figures.words,
            network=experiment.model,
            layers=layers,
            load=[
                f"{importing}; from safetensors.torch import load_file",
                f"model = {made}{'.double()' if experiment.dtype == 'float64' else ''}.eval()",
                f"model.load_state_dict(load_file({file + '.safetensors'!r})){note}",
            ],
            input_shape=self.shape,
            dtype=experiment.dtype,
            pixels=experiment.pixels,
            preprocessing=f"Whole-number (uint8) pixels are {scaled}; other features are taken as they are.",
            classes=(data.classes if client is None else data.classes_of(client))[:counted],
            outputs=data.outputs,
            counted=counted,
        )
