"""Every method with its clients as sites of their own, and letters between: the same bits as in process."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from fedtailor.methods import CATALOGUE
from tests.sites.parts import close_metrics, same_server, samples


def same_sites(one: ft.RunResult, other: ft.RunResult) -> bool:
    """Compare what the clients of two runs keep, and what they predict with, to the bit."""
    a, b = one.simulation, other.simulation
    for client in range(len(one.names)):
        mine, theirs = a.state_of(client), b.state_of(client)
        if mine.keys() != theirs.keys() or not all(torch.equal(mine[name], theirs[name]) for name in mine):
            return False
        if not torch.equal(a.personal_model(client), b.personal_model(client)):
            return False
    return True


@pytest.mark.parametrize("features", [5, 13])
@pytest.mark.parametrize("method", CATALOGUE)
def test_every_method_has_the_bits_of_in_process(method: str, features: int) -> None:
    settings: dict[str, Any] = {
        "data": samples(features), "rounds": 3, "epochs": 2, "batch": 7, "lr": 0.05, "participation": 3, "seed": 1,
    }  # fmt: skip
    here = ft.run(method, engine="in-process", **settings)
    apart = ft.run(method, engine="sites-in-memory", **settings)
    assert same_server(here.simulation, apart.simulation)
    assert same_sites(here, apart)
    assert close_metrics(here, apart)
    assert [record.bytes_up for record in here.rounds] == [record.bytes_up for record in apart.rounds]


@pytest.mark.parametrize("method", ["pgfed", "pflego", "fedavg", "fedrep"])
@pytest.mark.parametrize("features", [5, 13])
def test_full_batches_have_the_bits_of_in_process(method: str, features: int) -> None:
    settings: dict[str, Any] = {"data": samples(features, 7), "rounds": 3, "epochs": 3, "batch": "full", "lr": 0.1}
    here, apart = (ft.run(method, engine=engine, **settings) for engine in ("in-process", "sites-in-memory"))
    assert same_server(here.simulation, apart.simulation)
    assert same_sites(here, apart)


@pytest.mark.parametrize("settings", [
    {"model": "mlp:8", "participation": "independent:0.5"},
    {"model": "mlp", "lora": 2},
    {"evaluate_model": "local"},
    {"evaluate_model": "global"},
    {"optimizer": "adam", "keep_momentum": True, "fine_tune": 1},
    {"new_clients": 1, "evaluate_clients": "new"},
    {"class_weights": "balanced", "dtype": "float64"},
])  # fmt: skip
def test_every_kind_of_run(settings: dict[str, Any]) -> None:
    common: dict[str, Any] = {"data": samples(13, 5), "rounds": 3, "lr": 0.05, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        here, apart = (ft.run("fedavg", engine=engine, **common) for engine in ("in-process", "sites-in-memory"))
    assert same_server(here.simulation, apart.simulation)
    assert close_metrics(here, apart)


def test_a_stopped_run_goes_on_by_any_engine(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data": samples(13), "rounds": 6, "lr": 0.05, "checkpoint_every": 2}
    whole = ft.run("pgfed", engine="in-process", **settings)

    def stop(record: Any) -> None:
        if record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.run("pgfed", engine="sites-in-memory", out=tmp_path / "run", on_round=stop, **settings)
    ft.resume(tmp_path / "run", data=samples(13), on_round=lambda record: None, rounds=6)
    again = ft.load(tmp_path / "run", data=samples(13))
    assert same_server(whole.simulation, again.simulation)
    assert same_sites(whole, again)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoint" / "sites").iterdir())
    assert len(kept) <= 3 * 4
