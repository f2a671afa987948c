"""Learning curves of new clients that fine-tune a finished run's model (PGFed's Figure 4)."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedtailor._common.files import read_sealed, seal, write_atomically
from fedtailor.client.sites import Site
from fedtailor.engines.result import RunResult
from fedtailor.server.evaluation import averages
from fedtailor.server.records import Record
from fedtailor.training.isolation import isolated


@dataclass(kw_only=True)
class FineTuning(Record):
    """The new clients' mean test accuracy before (entry 0) and after each epoch."""

    accuracy: Annotated[list[float], Field(min_length=1)]


def fine_tuning_curve(kept: Path, result: RunResult) -> list[float]:
    """Compute the curve that a run's evaluation on new clients ends with, once, and keep it in a file."""
    if not kept.is_file():
        with isolated():
            found = _curve(result)
        write_atomically(kept, seal({"accuracy": found}))
    return read_sealed(kept, FineTuning.from_json).accuracy


def _curve(result: RunResult) -> list[float]:
    simulation, protocol = result.simulation, result.experiment.evaluation
    method, server, data = simulation.loop.method, simulation.server, simulation.data
    terms = replace(simulation.prepared.terms, fine_tune=protocol.fine_tune, on_train=False)
    message, shared = method.broadcast(server), method.global_model(server) if protocol.model == "global" else None
    measured = {}
    for number in sorted(data.new):
        site = Site(number, data.client(number), terms)
        start = method.personal_model(site.client(simulation.finished, {}), message) if shared is None else shared
        measured[number] = [site.measure(theta) for theta in site.fine_tuning_path(start)]
    epochs = range(protocol.fine_tune + 1)
    means = [averages({c: of[k] for c, of in measured.items()}, protocol.average, result.metric) for k in epochs]
    return [mean.accuracy for mean in means if mean.accuracy is not None]
