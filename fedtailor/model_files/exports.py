"""From a run to model files: the model that each client predicts with after the last round, or the global one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.client.sites import Sites
from fedtailor.client.terms import Terms
from fedtailor.data import FederatedData
from fedtailor.engines.result import RunResult
from fedtailor.engines.runs import load
from fedtailor.engines.simulation import Simulation
from fedtailor.engines.trackers import Track, Tracking
from fedtailor.messages import EvaluateShared, Measured
from fedtailor.model_files.description import Origin, Quality, file_name
from fedtailor.model_files.format import ON_THE_HUB, Description, ModelKind, check_free, files_of
from fedtailor.server.evaluation import averages
from fedtailor.server.records import Averages
from fedtailor.training.isolation import isolated

OnModel = Callable[[list[Path], Description], None]


def export(
    run: RunResult | str | Path,
    *,
    to: str | Path,
    client: int | str | None = None,
    global_model: bool = False,
    onnx: bool = False,
    hugging_face: bool = False,
    overwrite: bool = False,
    trust: bool = False,
    track: Track | None = None,
    on_model: OnModel | None = None,
) -> list[Path]:
    """Write the models of a run into a directory, and return the model files.

    They are the models of all training clients, of one `client` (by number or name), or the `global_model`. A client's
    model is the one it predicts with after the last round, or after the last checkpoint of a run that is not finished:
    fine-tuned, if the run's evaluation says so. Beside each `.safetensors` is a `.json` that describes it, and with
    `onnx` an `.onnx`. With `hugging_face` each is a folder as `huggingface_hub` uploads it: `model.safetensors`,
    `config.json` and a model card. `trust` allows a run directory to name code of its own (see `load`). `track` names
    tools, as in `run`, that get all these files: in the run that they have of this one, or a new one.
    """
    tracking = Tracking(track)
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
    if hugging_face:
        stems = {number: stem / ON_THE_HUB for number, stem in stems.items()}
    check_free([file for stem in stems.values() for file in files_of(stem, onnx)], overwrite)
    with isolated():
        source = Source.of(result)
        if source.data.elsewhere is not None and not global_model:
            raise FedtailorError(
                f"The clients of the run{source.where} are sites: each has its own model file, which never leaves it; "
                "export the global model (--global)."
            )
        graph = source.origin.onnx() if onnx else None
        written = []
        for number, stem in stems.items():
            theta, quality = source.global_model() if number is None else source.personal_model(number)
            kind: ModelKind = "global" if number is None else "personal"
            files, about = source.origin.write(stem, theta, kind, number, quality, graph)
            if on_model:
                on_model(files, about)
            written.append(files)
    _track(tracking, result, [file for files in written for file in files])
    return [model for model, *_ in written]


def _track(tracking: Tracking, result: RunResult, files: list[Path]) -> None:
    """Give model files to trackers."""
    experiment = result.experiment
    name = result.path.name if result.path else f"{experiment.method}-seed{experiment.seed}"
    finished = result.simulation.finished
    with tracking.run(name, experiment.model_dump(), result.path, finished, ids=result.tracked) as run:
        run.save("models", files)


@dataclass(frozen=True)
class Source:
    """A run whose models are taken."""

    result: RunResult
    simulation: Simulation

    @classmethod
    def of(cls, result: RunResult) -> "Source":
        """Open a run that has at least one finished round."""
        simulation = result.simulation
        source = cls(result, simulation)
        if simulation.finished == 0:
            raise FedtailorError(
                f"The run{source.where} has no finished round to take a model from: go on with it first."
            )
        return source

    @property
    def where(self) -> str:
        return f" in {self.result.path}" if self.result.path else ""

    @property
    def data(self) -> FederatedData:
        return self.simulation.data

    @property
    def terms(self) -> Terms:
        return self.simulation.terms

    @cached_property
    def origin(self) -> Origin:
        """The origin of the run's model files."""
        return Origin(self.result.experiment, self.terms, self.data, self.simulation.finished, self.result.metric)

    def personal_model(self, client: int) -> tuple[Tensor, Quality]:
        """Return the model that a client predicts with, and its quality.

        The run's own record has it if its protocol evaluated personal models, and this client in the last round.
        Otherwise the model is measured now.
        """
        self.terms.method.check_one_model("no model file can hold that; predict in Python, result.predict(client, x)")
        theta, last = self.simulation.personal_model(client), self.simulation.finished
        whose = "on the client's own test samples"
        results = next((record.results for record in self.result.clients if record.round == last), {})
        if self.result.experiment.evaluation.model == "personal" and client in results:
            metrics, how = results[client]["test"], f"as the run recorded it in round {last}"
        else:
            metrics, how = self._measure(theta, client)["test"], "measured at export"
        return theta, Quality(metrics, len(self.data.test(client)[1]), f"{whose}, {how}")

    def global_model(self) -> tuple[Tensor, Quality]:
        """Return the global model, and its mean quality over the training clients that are honest."""
        theta, experiment = self.result.global_vector(), self.result.experiment
        if theta is None:
            own = (
                "each site has its own model file"
                if self.data.elsewhere
                else "export the clients' own (--all, --client)"
            )
            raise FedtailorError(f"The method {experiment.method} has no global model: {own}.")
        if self.data.elsewhere is not None:
            return theta, self._recorded()
        left_out, honest = {*self.data.new, *self.result.hostile}, "honest " if self.result.hostile else ""
        clients = [client for client in range(self.data.n_clients) if client not in left_out]
        measured = {client: self._measure(theta, client) for client in clients}
        average = experiment.evaluation.average
        words = f"on all {honest}clients' test samples, the mean over {average}s, measured at export"
        n_samples = sum(of_client["test"].n_samples for of_client in measured.values())
        return theta, Quality(averages(measured, average, self.result.metric), n_samples, words)

    def _recorded(self) -> Quality:
        """Return the quality of the global model as the sites measured it, if the last round's evaluation was of it."""
        evaluation, last = self.result.experiment.evaluation, self.simulation.finished
        of_it = evaluation.model == "global" or (evaluation.model == "personal" and self.terms.method.shares_model)
        record = next((record for record in self.result.rounds if record.round == last and record.evaluated), None)
        if record is None or not of_it or evaluation.fine_tune:
            return Quality(Averages(), 0, "not measured at the server, which has no samples")
        results = next((each.results for each in self.result.clients if each.round == last), {})
        n_samples = sum(measured["test"].n_samples for measured in results.values() if "test" in measured)
        words = f"on the sites' test samples, the mean over {evaluation.average}s, as they told it in round {last}"
        return Quality(record, n_samples, words)

    def _measure(self, theta: Tensor, client: int) -> Measured:
        """Measure a model as it is, without fine-tuning, on a client's samples."""
        sites = Sites.at(self.data, replace(self.terms, fine_tune=0), None)
        reply = sites.handle(EvaluateShared(0, client, {"theta": theta}))
        if reply.error:
            raise FedtailorError(f"The model cannot be evaluated: {reply.error}.") from reply.cause
        return reply.measured[0]
