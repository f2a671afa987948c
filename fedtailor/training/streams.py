"""Random streams: every purpose has its own, so that no draw depends on what was drawn elsewhere.

A stream is named by the experiment's seed and a key such as ("batches", round, client). Equal keys give equal
streams, in whatever process, order or number of workers they are asked for.
"""

from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    import numpy as np
    import torch

# NumPy and PyTorch are imported where they are used: reading an experiment or printing help does not wait for them.


def _sequence(seed: int, key: tuple[str | int, ...]) -> "np.random.SeedSequence":
    import numpy as np

    words = [crc32(part.encode()) if isinstance(part, str) else part for part in key]
    return np.random.SeedSequence(entropy=seed, spawn_key=words)


def numpy_stream(seed: int, *key: str | int) -> "np.random.Generator":
    """Make the stream of this seed and key, as a NumPy generator."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(_sequence(seed, key)))


def torch_seed(seed: int, *key: str | int) -> int:
    """Make the stream of this seed and key, as a seed for PyTorch."""
    import numpy as np

    return int(_sequence(seed, key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def torch_stream(seed: int, *key: str | int) -> "torch.Generator":
    """Make the stream of this seed and key, as a PyTorch generator (on the CPU: the same draws for every device)."""
    import torch

    return torch.Generator().manual_seed(torch_seed(seed, *key))


def seed_network(seed: int, device: "torch.device") -> None:
    """Seed the network's own draws (dropout) on this device.

    `torch.manual_seed` would seed every kind of device and keep a traceback for each that is not there, which costs
    more than a step of a small network.
    """
    import torch

    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
