"""PGFed's Figure 2: what explicit knowledge of the others' risks is worth, if communication cost nothing.

Each client personalizes a trained global model by a few steps, once on its own risk f_i alone, and once on
f_i + μ/(N−1) Σ_j f_j with every other client's true risk: O(N²) messages a step. It serves this figure alone.
"""

import multiprocessing
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from fedtailor.local.descent import mean_gradient
from fedtailor.local.streams import torch_stream
from fedtailor.transport import Bench

STEPS, RATE, MU = 6, 0.05, 1.0
SAMPLES = 50  # of every other client, drawn anew for each step


def gains(bench: Bench, theta: Tensor, explicit: bool, workers: int) -> Iterator[float]:
    """Each client's gain in accuracy by its steps from `theta`."""
    work = partial(_gain, bench, theta, explicit)
    with multiprocessing.get_context("fork").Pool(workers, torch.set_num_threads, (1,)) as pool:
        yield from pool.imap(work, range(bench.data.clients))


def _gain(bench: Bench, theta: Tensor, explicit: bool, client: int) -> float:
    after = personalize(bench, theta, explicit, client)
    accuracies = [next(bench._measure(vector, (client,)))["test"]["accuracy"] for vector in (theta, after)]
    return 0.0 if None in accuracies else accuracies[1] - accuracies[0]  # type: ignore[operator]


def personalize(bench: Bench, theta: Tensor, explicit: bool, client: int) -> Tensor:
    """A client's model after its steps (Eq. 4, or plain descent)."""
    stream = torch_stream(bench.seed, "explicit", client)
    for _ in range(STEPS):
        gradient = mean_gradient(bench.network, theta, *bench.data.train(client), bench.loss)[1]
        if explicit and bench.data.clients > 1:
            gradient += MU * mean_gradient(bench.network, theta, *_others(bench, client, stream), bench.loss)[1]
        theta = theta - RATE * gradient
    return theta


def _others(bench: Bench, client: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Equally many samples of every other client, so that their mean loss is the mean of the clients' risks."""
    chosen = []
    for other, (start, end, *_) in enumerate(bench.data.bounds.tolist()):
        if other != client:
            chosen.append(torch.randint(start, end, (SAMPLES,), generator=stream, device="cpu"))
    samples = torch.cat(chosen).to(bench.data.x.device)
    return bench.data.x[samples], bench.data.y[samples]
