"""Runs that the tests of reports share: real ones, small, of every method that has figures of its own."""

from pathlib import Path

import pytest

import fedtailor as ft
from tests.cli.calling import call

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
