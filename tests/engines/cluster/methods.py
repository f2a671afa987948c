"""Methods for the tests of the engine ray. It is a module of its own, as actors import what is not in a script."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import fedtailor as ft


class Plain(ft.Method):
    """FedAvg, with something else before."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        self.before(client)
        return {"theta": client.descend(message["theta"])}

    def before(self, client: ft.Client) -> None: ...


class Waiting(Plain):
    """All clients of round 2 wait until the file `go` is there; `begun` then has a file for each that has begun."""

    begun: str = ""
    go: str = ""

    def before(self, client: ft.Client) -> None:
        if client.round == 2:
            (Path(self.begun) / f"{client.id}-{os.getpid()}").touch()
            deadline = time.monotonic() + 60
            while not Path(self.go).exists() and time.monotonic() < deadline:
                time.sleep(0.02)


class Deadly(Plain):
    """Client 3 kills its worker in round 2: once, or always."""

    marker: str = ""

    def before(self, client: ft.Client) -> None:
        if client.id == 3 and client.round == 2 and not (self.marker and Path(self.marker).exists()):
            if self.marker:
                Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Stuck(Plain):
    """Client 3 does nothing for a minute in round 2; nor does a process that it forks. `note` has their numbers."""

    note: str = ""

    def before(self, client: ft.Client) -> None:
        if client.id == 3 and client.round == 2:
            os.fork()
            with Path(self.note).open("a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(60)
            os._exit(0)


class Scribbling(Plain):
    """Client 3 changes its samples in place in round 2."""

    def before(self, client: ft.Client) -> None:
        if client.id == 3 and client.round == 2:
            client.train_data[0].zero_()


class Looking(Plain):
    """Notes the process, the threads, and what its samples' memory is: see `memory_of`. It takes its time, for all
    workers to take part."""

    note: str = ""

    def before(self, client: ft.Client) -> None:
        time.sleep(1)
        x = client.train_data[0]
        assert isinstance(x, Tensor)
        found = memory_of(x.data_ptr())
        with Path(self.note).open("a") as file:
            numbers = [os.getpid(), torch.get_num_threads(), x.data_ptr() % 64, found["Size"], found["Private_Dirty"]]
            file.write(" ".join(map(str, numbers)) + "\n")


def memory_of(address: int) -> dict[str, int]:
    """Numbers of kB of the mapping that has this address in it."""
    found: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, end = (int(number, 16) for number in first.split("-"))
            inside = start <= address < end
        elif inside and line.endswith("kB"):
            found[first[:-1]] = int(line.split()[1])
    return found


class Net(nn.Sequential):
    """A network of the user's own, with buffers, and hooks that pickle knows nothing of."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(13, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))
        self.scale = lambda outputs: 0.5 * outputs

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.scale(super().forward(x))
        return outputs
