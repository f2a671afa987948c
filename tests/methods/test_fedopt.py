"""FedAvgM, FedAdagrad, FedYogi and FedAdam: against slow versions, and as FedAvg under a setting."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

import fedtailor as ft
from fedtailor.methods import CATALOGUE, find_method
from fedtailor.training.optimizer import SERVER_LR, ServerOptimizer, server_change, server_moments
from tests.helpers import assert_same, final
from tests.methods.parts import server
from tests.methods.problems import MOMENTUM, SMALL, Problem, close, on_both, who
from tests.reference.fedopt import SlowFedOpt

NAMED = {"fedavgm": "momentum", "fedadagrad": "adagrad", "fedyogi": "yogi", "fedadam": "adam"}


@on_both
@pytest.mark.parametrize("rate", [None, 0.2])
@pytest.mark.parametrize("kind", get_args(ServerOptimizer))
def test_a_slow_server_comes_to_the_same_vectors(
    run_on: Callable[..., tuple[ft.RunResult, Problem]], kind: Any, rate: float | None
) -> None:
    result, problem = run_on(find_method("fedavg"), server_optimizer=kind, server_lr=rate)
    steps = {"lr": result.experiment.lr}
    slow = SlowFedOpt(problem, steps, kind=kind, rate=SERVER_LR[kind] if rate is None else rate)
    for number, participants in enumerate(who(result), 1):
        slow.round(number, participants)
    assert (slow.glob - problem.initial).abs().max() > 0.01
    close(server(result), slow.glob)


@pytest.mark.parametrize("more", [{}, {**MOMENTUM, "server_lr": 0.1}])
@pytest.mark.parametrize("name", NAMED)
def test_a_name_is_fedavg_under_a_setting(name: str, more: dict[str, Any]) -> None:
    named, set_so = ft.run(name, **SMALL, **more), ft.run("fedavg", **SMALL, **more, server_optimizer=NAMED[name])
    assert named.clients == set_so.clients
    assert_same(final(named), final(set_so))
    assert not torch.equal(server(named), server(ft.run("fedavg", **SMALL)))


def test_every_optimiser_of_the_papers_has_a_name() -> None:
    kinds = {name: kind.default_server_optimizer for name, kind in CATALOGUE.items()}
    assert {name: kind for name, kind in kinds.items() if kind != "sgd"} == NAMED


def test_the_first_round_of_fedavgm_is_fedavgs() -> None:
    one, average = (server(ft.run(method, **{**SMALL, "rounds": 1})) for method in ("fedavgm", "fedavg"))
    torch.testing.assert_close(one, average, rtol=0, atol=1e-7)


def test_a_large_mean_change_moves_every_number_by_the_rate_at_first() -> None:
    """m/√v is (1−β₁)/√(1−β₂) = 1 in round 1, and (1−β₁²)/√(1−β₂²) in round 2 of the same change. With a correction of
    the bias, as PyTorch has it, both are 1."""
    change = torch.tensor([1e6, -1e6], dtype=torch.float64)
    moments, moved = server_moments(change, "adam"), []
    for _ in range(2):
        step, moments = server_change(change, moments, "adam", 0.1)
        moved.append(step)
    torch.testing.assert_close(moved[0], 0.1 * change.sign(), rtol=1e-6, atol=0)
    torch.testing.assert_close(moved[1], 0.1 * change.sign() * (1 - 0.81) / (1 - 0.99**2) ** 0.5, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMED)
def test_a_second_optimiser_is_refused(name: str) -> None:
    with pytest.raises(ft.FedtailorError, match=r"cannot train with server_optimizer .*: it has one by its name"):
        ft.run(name, **SMALL, server_optimizer="yogi" if name != "fedyogi" else "adam")
