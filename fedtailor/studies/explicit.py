"""PGFed's Figure 2: what explicit knowledge of the others' risks is worth, if communication cost nothing.

Each client personalizes a trained global model by a few steps, once on its own risk f_i alone, and once on
f_i + μ/(N−1) Σ_j f_j with every other client's true risk: O(N²) messages a step. It serves this figure alone.
"""

import multiprocessing
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedtailor._common.files import read_sealed, seal, write_atomically
from fedtailor.client.sites import Site
from fedtailor.data import FederatedData
from fedtailor.engines.preparation import Prepared
from fedtailor.server.records import Record
from fedtailor.training.descent import mean_gradient
from fedtailor.training.inputs import Inputs
from fedtailor.training.streams import torch_stream

STEPS, MU = 6, 1.0
RATE = 0.001  # with it plain steps gain about what the paper's do
SAMPLES = 50  # of every other client, drawn anew for each step

_work: tuple[Prepared, Tensor, bool]  # of a worker process


@dataclass(kw_only=True)
class Steps(Record):
    """The numbers of one line of Figure 2."""

    gains: Annotated[list[float], Field(min_length=1)]  # of each client: test accuracy after the last step − before
    accuracy: list[float] = field(default_factory=list)  # before and after each step, mean over clients


def kept_steps(file: Path) -> Steps | None:
    """Read the numbers from a file; None if it is not there, or an older version kept the gains alone."""
    found = read_sealed(file, Steps.from_json) if file.is_file() else None
    return found if found and found.accuracy else None


def keep_steps(file: Path, prepared: Prepared, theta: Tensor, explicit: bool, workers: int) -> Steps:
    """Compute the numbers, and keep them in a file."""
    paths = [path for path in accuracies(prepared, theta, explicit, workers) if path]
    means = [fmean(path[step] for path in paths) for step in range(STEPS + 1)]
    write_atomically(file, seal({"gains": [path[-1] - path[0] for path in paths], "accuracy": means}))
    return read_sealed(file, Steps.from_json)


def accuracies(prepared: Prepared, theta: Tensor, explicit: bool, workers: int) -> Iterator[list[float]]:
    """Yield each client's test accuracy before and after each of its steps from `theta`; [] without test samples."""
    # Forked workers have what they are started with in memory. As an argument of each task it would be pickled.
    with multiprocessing.get_context("fork").Pool(workers, _begin, (prepared, theta, explicit)) as pool:
        yield from pool.imap(_accuracies, range(prepared.data.n_clients))


def _begin(prepared: Prepared, theta: Tensor, explicit: bool) -> None:
    global _work
    _work = (prepared, theta, explicit)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the pool ends its workers so; a command's handler would complain
    torch.set_num_threads(1)


def _accuracies(client: int) -> list[float]:
    prepared, theta, explicit = _work
    site = Site(client, prepared.data.client(client), prepared.terms)
    path = personalize(prepared, theta, explicit, client)
    found = [site.measure(site.network_at(vector))["test"].accuracy for vector in path]
    return [accuracy for accuracy in found if accuracy is not None]


def personalize(prepared: Prepared, theta: Tensor, explicit: bool, client: int) -> Iterator[Tensor]:
    """Yield a client's model before and after each of its steps (Eq. 4, or plain descent)."""
    network, loss, data = prepared.terms.network, prepared.terms.loss, prepared.data
    stream = torch_stream(prepared.terms.seed, "explicit", client)
    yield theta
    for _ in range(STEPS):
        gradient = mean_gradient(network, theta, *data.train(client), loss)[1]
        if explicit and data.n_clients > 1:
            gradient += MU * mean_gradient(network, theta, *_others(data, client, stream), loss)[1]
        theta = theta - RATE * gradient
        yield theta


def _others(data: FederatedData, client: int, stream: torch.Generator) -> tuple[Inputs, Tensor]:
    """Draw equally many samples of every other client, so that their mean loss is the mean of the clients' risks."""
    chosen = []
    for other, (start, end, *_) in enumerate(data.places.tolist()):
        if other != client:
            chosen.append(torch.randint(start, end, (SAMPLES,), generator=stream, device="cpu"))
    indices = torch.cat(chosen).to(data.x.device)
    return data.x[indices], data.y[indices]
