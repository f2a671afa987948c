"""What it brings to train clients as one computation: operators a step, and the processor's time of a round.

20 clients with random images in the shape of Fashion-MNIST, five epochs, one thread, no evaluation.

1. PyTorch's operators for each client and step, as `TorchDispatchMode` sees them: all that a round calls, at the server
   too, divided by the clients' steps; and those of them that are no views, which launch nothing on an accelerator.
   300 images a client, batches of 10.
2. How often numbers would be copied to the host for each client in a round with evaluation, if all were computed on
   another device.
3. The processor's time of a round of FedAvg, with 110 to 490 images a client; measured in turn, the best of several
   counts.
"""

import traceback
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from benchmarks.costs import Samples, next_round, started
from benchmarks.measuring import Goal, best_of, table, timed
from fedtailor.cli.device_check import Operators
from fedtailor.engines.simulation import Simulation
from fedtailor.training.descent import step_count
from fedtailor.training.isolation import isolated

READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__"}
METHODS, MODELS = ("fedavg", "pgfed", "ditto", "fedper"), ("mlp:100", "lenet")
STACKS = (1, 4, 8, 20)
TIMES = (("mlp:100", 10, 1.6), ("mlp:100", 32, 1.2), ("mlp:100", 64, None), ("lenet", 10, None), ("lenet", 64, None))


class Copies(TorchFunctionMode):
    """Counts how often the host reads numbers of tensors, as if all tensors were on a device but those that it has
    copied, and what is computed of these alone."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        there = all(getattr(tensor, "on_host", False) for tensor in tensors)
        if func == Tensor.device.__get__:
            frames = [frame.name for frame in traceback.extract_stack(limit=3)]
            return torch.device("cuda") if "fetched" in frames and not there else func(*args)
        name = getattr(func, "__name__", "")
        self.count += name in READS and not there
        found = func(*args, **(kwargs or {}))
        if there or name == "cpu":
            found = found.detach() if name == "cpu" else found
            for each in tree_leaves(found):
                if isinstance(each, Tensor):
                    each.on_host = True  # type: ignore[attr-defined]
        return found


def images(sizes: list[int], side: int) -> Samples:
    """Random images of one channel, so many for each client."""
    stream = torch.Generator().manual_seed(0)
    return [(torch.rand(n, 1, side, side, generator=stream), torch.randint(10, (n,), generator=stream)) for n in sizes]


def federation(method: str, model: str, batch: int, stack: int, tiny: bool, equal: bool = False) -> Simulation:
    """Start 20 clients with images in the shape of Fashion-MNIST: 300, or 110 to 490 each."""
    sizes = [12, 13, 14] if tiny else [300] * 20 if equal else [*range(110, 510, 20)]
    data = images(sizes, 28)
    return started(method, model, data, batch=batch, epochs=1 if tiny else 5, stack=stack)


class Launches(Operators):
    """Counts operators that are no views as well."""

    launched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launched += not (func.is_view or "view" in str(func))  # PyTorch calls some views operators of their own
        return super().__torch_dispatch__(func, types, args, kwargs)


def operators(run: Simulation) -> tuple[float, float]:
    """Count PyTorch's operators in a round, for each client and step: all, and those that are no views."""
    settings = run.terms.optimizer
    steps = sum(step_count(int(n), settings) for n in run.server.n_samples)
    next_round(run)  # the first one differs
    with Launches() as mode:
        next_round(run)
    return float(mode.count / steps), float(mode.launched / steps)


def copies(method: str, stack: int, tiny: bool) -> float:
    """Count copies to the host in a round with evaluation, for each client."""
    data = images([12, 13, 14] if tiny else [300] * 20, 28)
    held_out = {"test": 0.2, "validation": 0.1, "evaluation": {"every": 1}}
    run = started(method, "mlp:100", data, batch=10, stack=stack, **held_out)
    next_round(run)
    with Copies() as mode:
        next_round(run)
    return float(mode.count / len(data))


def run(repeat: int = 3, tiny: bool = False) -> list[Goal]:
    """Measure all three, and judge the goals."""
    rows, goals = [], []
    with isolated():
        for model in MODELS:
            for method in METHODS:
                runs = [federation(method, model, 10, stack, tiny, equal=True) for stack in (1, 20)]
                (alone, launched), (together, fewer) = map(operators, runs)
                shares = f"{together / alone:.3f}", f"{launched:.1f}", f"{fewer:.1f}", f"{fewer / launched:.3f}"
                rows.append([f"{method}, {model}", f"{alone:.1f}", f"{together:.1f}", *shares])
                goals.append(Goal(f"operators a step, 20 clients at once, {method}, {model}", together / alone, 0.1))
        header = ["one", "20 at once", "share", "but views: one", "20 at once", "share"]
        print(table(["operators for each client and step", *header], rows), flush=True)
        rows = [[of, *(f"{copies(of, stack, tiny):.1f}" for stack in (1, 20))] for of in METHODS]
        print(table(["copies to the host for each client in a round", "one", "20 at once"], rows))
        rows = []
        for model, batch, goal in TIMES:
            of_stacks = {stack: federation("fedavg", model, batch, stack, tiny) for stack in STACKS}
            found = best_of(
                {str(stack): partial(timed, partial(next_round, of)) for stack, of in of_stacks.items()},
                repeat if goal is None else 5 * repeat,
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
