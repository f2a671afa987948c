"""Computation that depends on nothing but its inputs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def isolated() -> Iterator[None]:
    """Compute with one thread, as every worker does: the same bits on any number of cores.

    Afterwards, the number of threads and the random state are as they were before.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)
