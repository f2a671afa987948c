"""Runs that the tests of reports share: real ones, small, of every method that has figures of its own."""

from pathlib import Path

import pytest
import torch

import fedtailor as ft
from fedtailor.methods import CATALOGUE
from tests.cli.calling import call
from tests.helpers import rewrite
from tests.reporting.made_up import made_up

__all__ = ["call"]

OWN_FIGURES = ("pgfed", "pfedmb", "fedacs", "apfl", "ifca", "fedfomo", "fedamp")
SMALL = {"data": "digits", "clients": 6, "rounds": 3, "epochs": 1, "model": "mlp:8", "engine": "in-process"}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of each method below it, and a second seed of three of them."""
    folder = tmp_path_factory.mktemp("report") / "runs"
    for method in ("local", "fedavg", *OWN_FIGURES):
        for seed in (0, 1) if method in ("local", "fedavg", "pgfed") else (0,):
            ft.run(method, seed=seed, out=folder / f"{method}-{seed}", **SMALL)
    return folder


HOSPITALS = [f"{name} University Hospital & Clinics <b>" for name in ("North", "South", "East", "West", "Lake", "Hill")]
MANY = 100


@pytest.fixture(scope="session")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with two seeds on clients with long names, of every method that has figures of its own."""
    folder = tmp_path_factory.mktemp("report") / "named"
    made = torch.Generator().manual_seed(0)
    clients = {name: (torch.rand(30 + 10 * n, 4, generator=made), torch.arange(30 + 10 * n) % 3)
               for n, name in enumerate(HOSPITALS)}  # fmt: skip
    clients |= {f"{name} 2": data for name, data in clients.items()}
    small = {"rounds": 2, "epochs": 1, "model": "mlp:8", "engine": "in-process", "batch": "full"}
    for method in ("local", "fedavg", *OWN_FIGURES):
        for seed in (0, 1):
            ft.run(method, data=clients, seed=seed, out=folder / f"{method}-{seed}", **small)
    return folder


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """26 methods with two seeds, some of them with long names, on a hundred clients with long names."""
    folder = tmp_path_factory.mktemp("report") / "many"
    names = [*CATALOGUE][:22] + [f"my_lab:{'Very' * n}LongNameOfAMethod" for n in range(1, 5)]
    for place, method in enumerate(names):
        for seed in (0, 1):
            path = folder / f"{place}-{seed}"
            values = [[0.3 + 0.6 * ((place + client * (seed + 3)) % 17) / 17 for client in range(MANY)]]
            made_up(path, method, values * 3, seed)
            rewrite(path / "partition.json", clients=[f"Practice of Dr. {n} in the Middle" for n in range(MANY)])
    return folder
