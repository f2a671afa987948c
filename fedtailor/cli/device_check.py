"""A round on a device beside the same round on the CPU, for `fedtailor doctor --device`."""

import time
from contextlib import closing
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedtailor.cli.diagnosis import BATCH, CLIENTS, Facts, federation
from fedtailor.engines.devices import find_devices
from fedtailor.training.isolation import isolated

NETWORKS = ("mlp", "lenet", "resnet")  # dense layers, convolutions, and BatchNorm by `torch.func`
CLOSE = 1e-4  # how far the model may be from the CPU's after one round
# Few small steps: by more of them, BatchNorm makes of differences in rounding what is no longer small.
STEPS, LR = 5, 0.01


class Operators(TorchDispatchMode):
    """Counts PyTorch's operators that are called, views among them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def check_device(name: str, seconds: float = 1.0) -> list[Facts]:
    """Compare each network on the device, one client after the other and all as one computation, with one after the
    other on the CPU."""
    (device,) = find_devices(name)[:1]
    found = []
    for model in NETWORKS:
        model_on_cpu, _, _ = _measured(torch.device("cpu"), model, 1, 0.0)
        for stack in (1, CLIENTS):
            theta, operators, speed = _measured(device, model, stack, seconds)
            difference = float((theta - model_on_cpu).abs().max())
            row = {"device": str(device), "model": model, "stack": stack, "difference": difference}
            found.append({**row, "operators_per_step": operators, "samples_per_second": speed})
    return found


def _measured(device: torch.device, model: str, stack: int, seconds: float) -> tuple[torch.Tensor, float, int]:
    """Train for a round, count the operators of the second one, and then train for so many seconds. Return the model
    after the first round, the operators for each client and step, and the samples a second."""
    settings = {"device": str(device), "model": model, "stack": stack, "steps": STEPS, "lr": LR}
    with isolated(), closing(federation("in-process", **settings)) as run:
        run.round(1)
        theta = run.server.state["theta"].cpu().clone()
        with Operators() as mode:
            run.round(2)
        begin, rounds = time.perf_counter(), 0
        while (spent := time.perf_counter() - begin) < seconds or not rounds:
            rounds += 1
            run.round(2 + rounds)
    return theta, round(mode.count / (STEPS * CLIENTS), 1), round(rounds * STEPS * CLIENTS * BATCH / spent)
