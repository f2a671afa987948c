"""Local, FedAvg, FedProx, FedPer and Ditto against slow versions, their closed forms and their limit cases."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import fedtailor as ft
from fedtailor.methods import find_method
from tests.helpers import assert_same, digits, final, quadratic_clients, run_quadratic
from tests.methods.parts import server, state
from tests.methods.problems import MOMENTUM, SMALL, Problem, close, on_a_network, on_both, who
from tests.reference.batches import stream
from tests.reference.ditto import SlowDitto
from tests.reference.fedavg import SlowFedAvg
from tests.reference.fedper import SlowFedPer
from tests.reference.local import SlowLocal

STEPS = [{}, {"momentum": 0.6, "weight_decay": 0.1}, {"momentum": 0.6, "weight_decay": 0.1, "keep_momentum": True}]


def after_the_run(slow: SlowLocal, result: ft.RunResult) -> None:
    """Do the same rounds."""
    for number, participants in enumerate(who(result), 1):
        slow.round(number, participants)
    assert len({client for participants in who(result) for client in participants}) < 6  # somebody was never called


def steps(result: ft.RunResult) -> tuple[dict[str, Any], bool]:
    """The settings of a client's steps, and whether it keeps its momentum."""
    experiment = result.experiment
    return {name: getattr(experiment, name) for name in ("lr", "momentum", "weight_decay")}, experiment.keep_momentum


@on_both
@pytest.mark.parametrize("settings", STEPS)
def test_a_slow_local_comes_to_the_same_vectors(
    run_on: Callable[..., tuple[ft.RunResult, Problem]], settings: dict[str, Any]
) -> None:
    result, problem = run_on(find_method("local"), **settings)
    slow = SlowLocal(problem, *steps(result))
    after_the_run(slow, result)
    for client in range(6):
        close(result.personal_vector(client), slow.own.get(client, problem.initial))


@on_both
@pytest.mark.parametrize("settings", STEPS)
@pytest.mark.parametrize(("method", "parameters"), [("fedavg", {}), ("fedprox", {"mu": 0.7})])
def test_a_slow_fedavg_comes_to_the_same_vectors(
    run_on: Callable[..., tuple[ft.RunResult, Problem]],
    method: str,
    parameters: dict[str, float],
    settings: dict[str, Any],
) -> None:
    result, problem = run_on(find_method(method, parameters), **settings)
    slow = SlowFedAvg(problem, *steps(result), **parameters)
    after_the_run(slow, result)
    close(server(result), slow.glob)
    for client in range(6):
        close(result.personal_vector(client), slow.glob)


@on_both
@pytest.mark.parametrize("settings", STEPS)
def test_a_slow_ditto_comes_to_the_same_vectors(
    run_on: Callable[..., tuple[ft.RunResult, Problem]], settings: dict[str, Any]
) -> None:
    result, problem = run_on(find_method("ditto", {"lam": 0.7}), **settings)
    slow = SlowDitto(problem, *steps(result), lam=0.7)
    after_the_run(slow, result)
    close(server(result), slow.glob)
    for client in range(6):
        close(result.personal_vector(client), slow.own.get(client, slow.glob))


@pytest.mark.parametrize(("settings", "head_start"), [*((each, "network") for each in STEPS), ({}, "uniform")])
def test_a_slow_fedper_comes_to_the_same_vectors(settings: dict[str, Any], head_start: str) -> None:
    """A uniform head is drawn once for each client, biases too."""
    result, problem = on_a_network(find_method("fedper", {"head_start": head_start}), **settings)
    heads = {i: torch.rand(10 * 6 + 10, generator=stream(29, "head", 0, i), dtype=torch.float64) for i in range(6)}
    own = {"own": heads} if head_start == "uniform" else {}
    slow = SlowFedPer(problem, *steps(result), body=6 * 64 + 6, **own)
    after_the_run(slow, result)
    close(server(result, "body"), slow.shared)
    for client in range(6):  # those who never took part, too
        close(result.personal_vector(client), slow.personal(client))


def test_identical_clients_with_one_full_step_are_central_gradient_descent() -> None:
    """Two identical clients, one full-batch step a round: FedAvg is gradient descent on their common data."""
    ((x, y),) = digits([60])
    result = ft.run(
        "fedavg",
        data=[(x, y), (x, y)],
        model="mlp:16",
        rounds=5,
        epochs=1,
        lr=0.5,
        batch="full",
        test=0.0,
        evaluation={"every": 0},
        validation=0.0,
    )
    initial = result.simulation.server.initial
    module = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    torch.nn.utils.vector_to_parameters(initial.clone(), module.parameters())
    for _ in range(5):
        gradients = torch.autograd.grad(functional.cross_entropy(module(x), y), list(module.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    central = torch.nn.utils.parameters_to_vector(module.parameters())
    assert (central - initial).abs().max() > 0.01
    torch.testing.assert_close(server(result), central, rtol=0, atol=1e-6)


def test_fedavg_with_one_participant_is_local_for_that_round() -> None:
    one = ft.run("fedavg", **{**SMALL, "participation": 1, "rounds": 1})
    alone = ft.run("local", **{**SMALL, "participation": 1, "rounds": 1})
    (client,) = one.rounds[0].participants
    assert torch.equal(server(one), state(alone, client)["theta"])


def test_fine_tuning_is_an_option_of_the_evaluation() -> None:
    plain = ft.run("fedavg", **SMALL)
    none = ft.run("fedavg", **SMALL, evaluation={"fine_tune": 0})
    tuned = ft.run("fedavg", **SMALL, evaluation={"fine_tune": 3})
    of_global = ft.run("fedavg", **SMALL, evaluation={"fine_tune": 3, "model": "global"})
    assert plain.clients == none.clients
    assert_same(final(plain), final(tuned))  # evaluation never trains
    assert tuned.accuracy is not None
    assert plain.accuracy is not None
    assert tuned.accuracy > plain.accuracy
    assert tuned.clients == of_global.clients


@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_fedprox_without_its_term_is_fedavg(more: dict[str, Any]) -> None:
    assert_same(final(ft.run("fedprox", mu=0.0, **SMALL, **more)), final(ft.run("fedavg", **SMALL, **more)))


def test_fedprox_on_quadratics_reaches_the_prox_point() -> None:
    """With many steps a participant ends at argmin f(θ) + μ/2‖θ−w‖² = (H + μI)⁻¹(Hc + μw)."""
    data, centres, curvatures = quadratic_clients(1, 3)
    result = run_quadratic("fedprox", data, 3, steps=2000, lr=0.1, rounds=2, mu=2.0)
    w = torch.zeros(3, dtype=torch.float64)
    eye = torch.eye(3, dtype=torch.float64)
    for _ in range(2):
        w = torch.linalg.solve(curvatures[0] + 2.0 * eye, curvatures[0] @ centres[0] + 2.0 * w)
    torch.testing.assert_close(server(result), w, rtol=0, atol=1e-10)


@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_fedper_without_a_head_is_fedavg(more: dict[str, Any]) -> None:
    headless, average = ft.run("fedper", **SMALL, **more, head=0), ft.run("fedavg", **SMALL, **more)
    assert torch.equal(server(headless, "body"), server(average))
    assert headless.rounds[-1].bytes_up == average.rounds[-1].bytes_up


@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_fedper_with_everything_in_the_head_is_local(more: dict[str, Any]) -> None:
    whole, local = ft.run("fedper", **SMALL, **more, head=2), ft.run("local", **SMALL, **more)
    for client in range(6):
        assert torch.equal(
            state(whole, client).get("head", torch.empty(0)), state(local, client).get("theta", torch.empty(0))
        )
    assert whole.rounds[-1].bytes_up == 0


def test_fedper_shares_the_body_and_nothing_else() -> None:
    result = ft.run("fedper", **{**SMALL, "participation": "all", "rounds": 1})
    local = ft.run("local", **{**SMALL, "participation": "all", "rounds": 1})
    run = result.simulation
    bodies = torch.stack([state(local, client)["theta"][run.server.body] for client in range(6)]).double()
    weights = run.server.n_samples.double() / run.server.n_samples.sum()
    torch.testing.assert_close(server(result, "body").double(), weights @ bodies, rtol=0, atol=1e-6)
    for client in range(6):
        assert torch.equal(state(result, client)["head"], state(local, client)["theta"][run.server.head])


@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_ditto_without_its_pull_is_local_beside_fedavg(more: dict[str, Any]) -> None:
    ditto, local = ft.run("ditto", lam=0.0, **SMALL, **more), ft.run("local", **SMALL, **more)
    for client in range(6):
        assert torch.equal(
            state(ditto, client).get("personal", torch.empty(0)), state(local, client).get("theta", torch.empty(0))
        )


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_dittos_global_model_is_fedavgs_whatever_the_pull(lam: float) -> None:
    assert torch.equal(server(ft.run("ditto", lam=lam, **SMALL)), server(ft.run("fedavg", **SMALL)))
