"""PGFed's Figure 2: what explicit knowledge of the others' risks is worth, if communication cost nothing.

Each client personalizes a trained global model by a few steps, once on its own risk f_i alone, and once on
f_i + μ/(N−1) Σ_j f_j with every other client's true risk: O(N²) messages a step. It serves this figure alone.
"""

import multiprocessing
from collections.abc import Iterator

import torch
from torch import Tensor

from fedtailor.data import FederatedData
from fedtailor.local.descent import mean_gradient
from fedtailor.local.inputs import Inputs
from fedtailor.local.streams import torch_stream
from fedtailor.preparing import Prepared
from fedtailor.site.site import Site

STEPS, RATE, MU = 6, 0.05, 1.0
SAMPLES = 50  # of every other client, drawn anew for each step

_work: tuple[Prepared, Tensor, bool]  # of a worker process


def gains(prepared: Prepared, theta: Tensor, explicit: bool, workers: int) -> Iterator[float]:
    """Yield each client's gain in test accuracy by its steps from `theta`."""
    # Forked workers have what they are started with in memory. As an argument of each task it would be pickled.
    with multiprocessing.get_context("fork").Pool(workers, _begin, (prepared, theta, explicit)) as pool:
        yield from pool.imap(_gain, range(prepared.data.n_clients))


def _begin(prepared: Prepared, theta: Tensor, explicit: bool) -> None:
    global _work
    _work = (prepared, theta, explicit)
    torch.set_num_threads(1)


def _gain(client: int) -> float:
    prepared, theta, explicit = _work
    site = Site(client, prepared.data.client(client), prepared.terms)
    after = personalize(prepared, theta, explicit, client)
    first, last = (site.measure(vector)["test"].accuracy for vector in (theta, after))
    return 0.0 if first is None or last is None else last - first


def personalize(prepared: Prepared, theta: Tensor, explicit: bool, client: int) -> Tensor:
    """Return a client's model after its steps (Eq. 4, or plain descent)."""
    network, loss, data = prepared.network, prepared.terms.loss, prepared.data
    stream = torch_stream(prepared.terms.seed, "explicit", client)
    for _ in range(STEPS):
        gradient = mean_gradient(network, theta, *data.train(client), loss)[1]
        if explicit and data.n_clients > 1:
            gradient += MU * mean_gradient(network, theta, *_others(data, client, stream), loss)[1]
        theta = theta - RATE * gradient
    return theta


def _others(data: FederatedData, client: int, stream: torch.Generator) -> tuple[Inputs, Tensor]:
    """Draw equally many samples of every other client, so that their mean loss is the mean of the clients' risks."""
    chosen = []
    for other, (start, end, *_) in enumerate(data.places):
        if other != client:
            chosen.append(torch.randint(start, end, (SAMPLES,), generator=stream, device="cpu"))
    indices = torch.cat(chosen).to(data.x.device)
    return data.x[indices], data.y[indices]
