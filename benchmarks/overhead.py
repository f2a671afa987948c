"""The framework's overhead: FedAvg by fedtailor and by a hand-written plain PyTorch loop, the same steps, in one run.

    python benchmarks/overhead.py [--rounds 2] [--repeat 3]

Fashion-MNIST-shaped data, MLP 200, batch 10, 20 clients of 2,600 samples, one epoch a round, no evaluation. The plain
loop is one process with one thread, `torch.optim.SGD`, tensors indexed directly. Ratios count, not seconds: the best
of several repetitions each.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import fedtailor as ft

CLIENTS, SAMPLES, BATCH, LR = 20, 2600, 10, 0.05


def make_data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(SAMPLES, 1, 28, 28, generator=generator), torch.randint(10, (SAMPLES,), generator=generator))
        for _ in range(CLIENTS)
    ]


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def plain(data: list[tuple[Tensor, Tensor]], rounds: int) -> None:
    """What a careful person writes by hand."""
    torch.set_num_threads(1)
    model = network()
    theta = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(rounds):
        total = {name: torch.zeros_like(value) for name, value in theta.items()}
        for x, y in data:
            model.load_state_dict(theta)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            order = torch.randperm(len(x))
            for start in range(0, len(x), BATCH):
                chosen = order[start : start + BATCH]
                optimizer.zero_grad()
                functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
                optimizer.step()
            for name, value in model.state_dict().items():
                total[name] += value / len(data)
        theta = total


def by_fedtailor(data: list[tuple[Tensor, Tensor]], rounds: int, workers: int) -> float:
    """The seconds of the rounds alone: setting up is not a matter of overhead per step."""
    result = ft.run(
        "fedavg",
        data=data,
        model=network,
        rounds=rounds,
        epochs=1,
        batch=BATCH,
        lr=LR,
        test=0.0,
        validation=0.0,
        workers=workers,
        engine="in-process" if workers == 1 else "processes",
    )
    return float(sum(record["seconds"] for record in result.rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    data = make_data()

    def plain_seconds() -> float:
        begin = time.perf_counter()
        plain(data, arguments.rounds)
        return time.perf_counter() - begin

    runs: dict[str, Callable[[], float]] = {
        "plain loop, one thread": plain_seconds,
        "fedtailor, one worker": lambda: by_fedtailor(data, arguments.rounds, 1),
        "fedtailor, two workers": lambda: by_fedtailor(data, arguments.rounds, 2),
    }
    seconds = {name: float("inf") for name in runs}
    for _ in range(arguments.repeat):  # in turn, so that a busy moment of the machine meets all of them
        for name, run in runs.items():
            seconds[name] = min(seconds[name], run())
    floor = seconds["plain loop, one thread"]
    samples = CLIENTS * SAMPLES * arguments.rounds
    for name, value in seconds.items():
        print(f"{name:26} {value:7.2f} s  {samples / value:9.0f} samples/s  {floor / value:5.2f}×")


if __name__ == "__main__":
    main()
