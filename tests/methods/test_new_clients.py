"""The model of a client that never took part: what `personal_model` makes of the broadcast alone. The methods that are
not here have such a test in their own files."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.engines.simulation import Simulation
from tests.helpers import make_simulation

SMALL: dict[str, Any] = {"data": "digits", "clients": 5, "new_clients": 1, "model": "mlp:16", "max_train": 30}
NEW = 4


def after_two_rounds(method: str, **settings: Any) -> Simulation:
    run = make_simulation(method, **SMALL, **settings)
    run.round(1)
    run.round(2)
    assert NEW in run.data.new
    return run


GLOBAL = (
    *("fedavg", "fedavgm", "fedadam", "fednova", "fedprox", "ditto", "pgfed", "pgfedmo", "pgfed-ce", "feddyn"),
    *("fedrod", "scaffold", "moon", "apfl", "fedala", "fedlc", "fedntd", "feddbe"),
)


@pytest.mark.parametrize("method", GLOBAL)
def test_the_global_model(method: str) -> None:
    run = after_two_rounds(method)
    assert run.server.n_clients == 4  # new clients are not counted in N
    assert torch.equal(run.personal_model(NEW), run.server.state["theta"])


@pytest.mark.parametrize("method", ["local", "fedacs"])
def test_the_first_vector(method: str) -> None:
    run = after_two_rounds(method)
    assert torch.equal(run.personal_model(NEW), run.server.initial)


@pytest.mark.parametrize("method", ["fedper", "pflego", "fedas", "fedpac"])
def test_the_shared_body_under_a_first_head(method: str) -> None:
    run = after_two_rounds(method)
    body, initial = run.server.state["body"], run.server.initial
    assert not torch.equal(body, initial[run.server.body])
    assert torch.equal(run.personal_model(NEW), torch.cat([body, initial[run.server.head]]))


def test_pflegos_uniform_head_is_the_clients_own() -> None:
    run = after_two_rounds("pflego", parameters={"head_start": "uniform"})
    head: Tensor = run.personal_model(NEW)[run.server.head]
    assert 0 <= head.min() < head.max() < 1
    assert torch.equal(run.personal_model(NEW)[run.server.head], head)


def test_the_equal_mix_of_all_branches() -> None:
    run = after_two_rounds("pfedmb", parameters={"branches": 3})
    assert torch.allclose(run.personal_model(NEW), run.server.state["W"].mean(0), atol=1e-7)


def test_a_new_client_is_evaluated_with_it() -> None:
    run = ft.run("fedavg", **SMALL, rounds=2, evaluation={"clients": "new"}, engine="in-process")
    x, y = run.data.client(NEW).test
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    module.load_state_dict(run.personal(NEW))
    assert run.accuracy == pytest.approx((module(x).argmax(1) == y).double().mean().item())
