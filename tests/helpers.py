"""Small federations for tests: quadratic clients with exact answers, and a few digits."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedtailor as ft
from fedtailor._common.files import seal, unseal
from fedtailor._common.toml import write_toml
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import deciding_settings, make_experiment
from fedtailor.messages import Metrics
from fedtailor.method import Uploads
from fedtailor.models import CATALOGUE
from fedtailor.server.records import ClientsRecord, RoundRecord


class Quadratic(nn.Module):
    """A model that is its parameter θ. Each sample is a quadratic (c, H); the output is ½(θ−c)ᵀH(θ−c)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        size = len(self.theta)
        away = self.theta - x[:, :size]
        return 0.5 * torch.einsum("ni,nij,nj->n", away, x[:, size:].view(-1, size, size), away)


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def quadratic_clients(clients: int, size: int, seed: int = 0) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Data for `Quadratic` with one sample a client, and the centres c_i and curvatures H_i behind it (float64)."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(clients, size, generator=generator, dtype=torch.float64)
    roots = torch.randn(clients, size, size, generator=generator, dtype=torch.float64) / size**0.5
    curvatures = roots @ roots.transpose(1, 2) + 0.5 * torch.eye(size, dtype=torch.float64)
    rows = torch.cat([centres, curvatures.flatten(1)], dim=1)
    return [(row[None], torch.zeros(1, dtype=torch.float64)) for row in rows], centres, curvatures


def run_quadratic(
    method: str | ft.Method, data: list[tuple[Tensor, Tensor]], size: int, **settings: Any
) -> ft.RunResult:
    """A run on quadratic clients in double precision, one full-batch step a round unless said otherwise."""
    defaults = {"steps": 1, "batch": "full", "lr": 0.1, "dtype": "float64", "test": 0.0, "validation": 0.0}
    defaults |= {"evaluation": {"every": 0}}  # there are no test samples
    return ft.run(
        method, data=data, model=Quadratic(size), loss=mean_output, engine="in-process", **{**defaults, **settings}
    )


class EqualFedAvg(ft.Method):
    """FedAvg with equal weights."""

    uploads: ClassVar[Uploads] = {"theta": ft.Mean("equal")}

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": client.descend(message["theta"])}


def uneven_clients(clients: int = 5, size: int = 4) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Quadratic clients with one to three samples: weights by samples would be seen."""
    data, centres, curvatures = quadratic_clients(clients, size, seed=3)
    return [(x.repeat(1 + i % 3, 1), y.repeat(1 + i % 3)) for i, (x, y) in enumerate(data)], centres, curvatures


def digits(sizes: list[int], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Clients with so many digits each; every client knows all labels that its samples have."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    x, y = torch.tensor(x[order] / 16, dtype=torch.float32), torch.tensor(y[order])
    ends = np.cumsum(sizes)
    return [(x[end - size : end], y[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def fitting_shape(name: str) -> tuple[int, ...]:
    """The shape of samples that a network of the catalogue takes: an image, or a window."""
    return (3, 32) if CATALOGUE[name].samples in ("sequences", "windows") else (3, 32, 32)


def make_simulation(method: str, **settings: Any) -> Simulation:
    """A simulation that a test drives by hand, in process, ready for round 1."""
    experiment = make_experiment({"method": method, "engine": "in-process", **settings})
    made = Simulation(prepare(experiment, Objects()))
    made.start()
    return made


def numbers(records: Iterable[RoundRecord | ClientsRecord]) -> list[dict[str, Any]]:
    """Records as JSON has them, without their times."""
    return [{name: value for name, value in record.plain().items() if name != "seconds"} for record in records]


def defined(metrics: Metrics) -> dict[str, float]:
    """The metrics that are defined."""
    return {name: value for name, value in asdict(metrics).items() if value not in (None, {})}


def rewrite(path: Path, **changes: Any) -> None:
    """Change the records of a file, and seal them as if a run had written them so. A change may be a function of the
    record."""
    content, before = b"", ""
    for line in path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]:
        record = {name: value for name, value in json.loads(line).items() if name != "checksum"}
        changed = {name: change(record) if callable(change) else change for name, change in changes.items()}
        sealed = seal({**record, **changed}, before)
        content, before = content + sealed, unseal(sealed, before)
    path.write_bytes(content)


def rewrite_settings(run: Path, **changes: Any) -> None:
    """Change settings of a run as if it had been made with them."""
    experiment = ft.load(run).experiment.model_copy(update=changes)
    (run / "experiment.toml").write_text(write_toml(experiment.model_dump()))
    rewrite(run / "about.json", experiment=deciding_settings(experiment))


def files(directory: Path) -> dict[str, bytes]:
    """The content of all files of a checkpoint or run directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def final(result: ft.RunResult) -> dict[str, Tensor]:
    """The server's and all clients' last tensors, by name."""
    tensors = {f"server/{name}": tensor for name, tensor in result.server_state.items()}
    for client in range(result.data.n_clients):
        tensors |= {f"{client}/{name}": tensor for name, tensor in result.simulation.state_of(client).items()}
    return tensors


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """The same names and the same bits."""
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def same_tensors(one: Path, other: Path) -> bool:
    """Compare two files of tensors, to the bit."""
    mine, theirs = load_file(one), load_file(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
