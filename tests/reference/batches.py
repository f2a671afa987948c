"""How batches are drawn, written a second time from its specification.

A random stream is named by the experiment's seed and a key of words and numbers: NumPy's SeedSequence with the seed as
entropy and the key as spawn key, a word standing for its CRC-32; its first 64 bits without the last one seed a PyTorch
generator on the CPU. The batches of client i in round t have the key (purpose, t, i), where the purpose is "batches"
unless a method says otherwise. Every epoch is a new permutation of all samples, cut into pieces.
"""

from zlib import crc32

import torch
from numpy.random import SeedSequence
from torch import Tensor


def stream(seed: int, *key: str | int) -> torch.Generator:
    """The random stream of a seed and a key."""
    spawn_key = tuple(crc32(word.encode()) if isinstance(word, str) else word for word in key)
    low, high = SeedSequence(seed, spawn_key=spawn_key).generate_state(2).tolist()
    return torch.Generator().manual_seed((high * 2**32 + low) // 2)


def drawn(
    n_samples: int,
    generator: torch.Generator,
    *,
    batch: int | None = 32,
    epochs: int = 1,
    steps: int | None = None,
    drop_last: bool = False,
) -> list[Tensor | None]:
    """The samples of each step of a descent; None stands for all of them, in their own order.

    `steps`, if given, counts instead of `epochs`. `drop_last` leaves out an epoch's incomplete batch.
    """
    if batch is None or batch >= n_samples:
        return [None] * (epochs if steps is None else steps)
    taken: list[Tensor | None] = []
    epoch = 0
    while epoch < epochs if steps is None else len(taken) < steps:
        permutation = torch.randperm(n_samples, generator=generator)
        for start in range(0, n_samples, batch):
            if start + batch <= n_samples or not drop_last:
                taken.append(permutation[start : start + batch])
        epoch += 1
    return taken[:steps]


def batches(
    n_samples: int,
    seed: int,
    number: int,
    client: int,
    *,
    purpose: str = "batches",
    batch: int | None = 32,
    epochs: int = 1,
    steps: int | None = None,
    drop_last: bool = False,
) -> list[Tensor | None]:
    """The samples of each step that a client takes in round `number` (see `drawn`)."""
    generator = stream(seed, purpose, number, client)
    return drawn(n_samples, generator, batch=batch, epochs=epochs, steps=steps, drop_last=drop_last)
