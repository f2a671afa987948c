"""What it brings to train clients as one computation: operators a step, and the processor's time of a round.

20 clients with random images in the shape of Fashion-MNIST, five epochs, one thread, no evaluation.

1. PyTorch's operators for each client and step, as `TorchDispatchMode` sees them, views among them: all that a round
   calls, at the server too, divided by the clients' steps. 300 images a client, batches of 10.
2. The processor's time of a round of FedAvg, with 110 to 490 images a client; measured in turn, the best of several
   counts.
"""

from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.costs import Samples, next_round, started
from benchmarks.measuring import Goal, best_of, table, timed
from fedtailor.engines.simulation import Simulation
from fedtailor.training.descent import step_count
from fedtailor.training.isolation import isolated

METHODS, MODELS = ("fedavg", "pgfed", "ditto", "fedper"), ("mlp:100", "lenet")
STACKS = (1, 4, 8, 20)
TIMES = (("mlp:100", 10, 1.6), ("mlp:100", 32, 1.2), ("mlp:100", 64, None), ("lenet", 10, None), ("lenet", 64, None))


class Operators(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def images(sizes: list[int], side: int) -> Samples:
    """Random images of one channel, so many for each client."""
    stream = torch.Generator().manual_seed(0)
    return [(torch.rand(n, 1, side, side, generator=stream), torch.randint(10, (n,), generator=stream)) for n in sizes]


def federation(method: str, model: str, batch: int, stack: int, tiny: bool, equal: bool = False) -> Simulation:
    """Start 20 clients with images in the shape of Fashion-MNIST: 300, or 110 to 490 each."""
    sizes = [12, 13, 14] if tiny else [300] * 20 if equal else [*range(110, 510, 20)]
    data = images(sizes, 28)
    return started(method, model, data, batch=batch, epochs=1 if tiny else 5, stack=stack)


def operators(run: Simulation) -> float:
    """Count PyTorch's operators in a round, for each client and step."""
    settings = run.terms.optimizer
    steps = sum(step_count(int(n), settings) for n in run.server.n_samples)
    next_round(run)  # the first one differs
    with Operators() as mode:
        next_round(run)
    return float(mode.count / steps)


def run(repeat: int = 3, tiny: bool = False) -> list[Goal]:
    """Measure both, and judge the goals."""
    rows, goals = [], []
    with isolated():
        for model in MODELS:
            for method in METHODS:
                runs = [federation(method, model, 10, stack, tiny, equal=True) for stack in (1, 20)]
                alone, together = map(operators, runs)
                rows.append([f"{method}, {model}", f"{alone:.1f}", f"{together:.1f}", f"{together / alone:.2f}"])
                goals.append(Goal(f"operators a step, 20 clients at once, {method}, {model}", together / alone, 0.1))
        print(table(["operators for each client and step", "one", "20 at once", "share"], rows))
        rows = []
        for model, batch, goal in TIMES:
            of_stacks = {stack: federation("fedavg", model, batch, stack, tiny) for stack in STACKS}
            found = best_of(
                {str(stack): partial(timed, partial(next_round, of)) for stack, of in of_stacks.items()}, repeat
            )
            times = [found[str(stack)].cpu for stack in STACKS]
            rows.append(
                [f"{model}, batch {batch}", f"{1e3 * times[0]:.0f}", *(f"{times[0] / t:.2f} ×" for t in times[1:])]
            )
            if goal is not None:
                what = f"a round by the processor, {model}, batch {batch}, {STACKS[-1]} at once: faster"
                goals.append(Goal(what, times[0] / times[-1], goal, at_least=True))
    print(
        table(["a round of FedAvg, by the processor", "one, ms", *(f"{stack} at once" for stack in STACKS[1:])], rows)
    )
    return goals
