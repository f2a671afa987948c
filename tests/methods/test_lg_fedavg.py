"""LG-FedAvg against its slow reference, and its limit cases."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from tests.methods.parts import SMALL, absent, close, first, normed, personal, run_parts, server, state, unequal_clients
from tests.methods.problems import MOMENTUM
from tests.reference.lg_fedavg import lg_fedavg


@pytest.mark.parametrize("warm", [0, 1, 2, 5, 6, 9])
def test_follows_its_formula(warm: int) -> None:
    """Rounds of FedAvg; then everything is trained together, the head is averaged by samples, and the body stays."""
    data, centres, curvatures, samples = unequal_clients(4, 5)
    how = {"epochs": 3, "rounds": 6, "participation": 2, "seed": 3, "momentum": 0.5}
    result = run_parts("lg-fedavg", data, 3, 2, warm_rounds=warm, **how)

    def slope(i: int, theta: Tensor) -> Tensor:
        return curvatures[i] @ (theta - centres[i])

    rounds = [record.participants for record in result.rounds]
    head, bodies = lg_fedavg(slope, rounds, samples, first(3, 2), body=3, steps=3, lr=0.1, momentum=0.5, warm=warm)
    assert 1 not in absent(result)
    close(server(result, "theta")[3:], head)
    for client in range(4):
        close(personal(result, client), torch.cat([bodies[client], head]))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_without_a_head_it_is_local(more: dict[str, Any]) -> None:
    headless = ft.run("lg-fedavg", **{**SMALL, **more}, head=0, warm_rounds=0)
    local = ft.run("local", **{**SMALL, **more})
    assert any(state(local, client) for client in range(5))
    for client in range(5):
        nothing = torch.empty(0)
        assert torch.equal(state(headless, client).get("body", nothing), state(local, client).get("theta", nothing))
    assert headless.rounds[-1].bytes_up == headless.rounds[-1].bytes_down == 0
    assert headless.clients[-1].results == local.clients[-1].results


@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("more", [{"head": 2}, {"head": 2, **MOMENTUM}, {"head": 3, "model": normed()}])
def test_with_everything_in_the_head_it_is_fedavg(more: dict[str, Any], warm: int) -> None:
    whole, average = ft.run("lg-fedavg", **{**SMALL, **more}, warm_rounds=warm), ft.run("fedavg", **{**SMALL, **more})
    assert torch.equal(server(whole, "theta"), server(average, "theta"))
    assert whole.rounds[-1].bytes_up == average.rounds[-1].bytes_up
    assert whole.clients[-1].results == average.clients[-1].results


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_warm_rounds_are_fedavgs(more: dict[str, Any]) -> None:
    """By default too, in a run that is no longer: models, metrics and bytes."""
    warm, average = ft.run("lg-fedavg", **{**SMALL, **more}), ft.run("fedavg", **{**SMALL, **more})
    assert torch.equal(server(warm, "theta"), server(average, "theta"))
    assert warm.clients == average.clients


@pytest.mark.parametrize("more", [{}, {"model": normed()}])
def test_without_a_head_it_is_local_from_the_warm_model_on(more: dict[str, Any]) -> None:
    settings = {**SMALL, **more, "participation": "all", "head": 0}
    mine = ft.run("lg-fedavg", **{**settings, "rounds": 2}, warm_rounds=1)
    theta, run = server(ft.run("fedavg", **{**settings, "rounds": 1}), "theta"), mine.simulation
    for client in range(5):
        assert torch.equal(personal(mine, client), run.sites.site(client).client(2, {}).descend(theta))
    assert mine.rounds[-1].bytes_up == 0


def test_every_clients_body_begins_with_the_warm_model_whenever_it_is_called() -> None:
    """The model is sent to whoever has no body of its own yet, later the head alone."""
    settings = {**SMALL, "participation": 2, "rounds": 6, "seed": 3}
    result, average = ft.run("lg-fedavg", warm_rounds=2, **settings), ft.run("fedavg", **{**settings, "rounds": 2})
    run, met = result.simulation, set()
    size, head = len(run.server.initial), len(run.server.initial[run.server.head])
    late = 0
    for record, clients in zip(result.rounds, result.clients, strict=True):
        for client in record.participants:
            first_time = record.round > 2 and client not in met
            late += int(first_time and all(client not in r.participants for r in result.rounds[:2]))
            assert clients.bytes_down[client] == 4 * (size if record.round <= 2 or first_time else head)
            assert clients.bytes_up[client] == 4 * (size if record.round <= 2 else head)
        met |= set(record.participants) if record.round > 2 else set()
    assert late > 0
    assert torch.equal(server(result, "theta")[run.server.body], server(average, "theta")[run.server.body])
    trained = run.state_of(result.rounds[-1].participants[0])["body"]
    assert not torch.equal(trained, server(average, "theta")[run.server.body])


def test_it_is_the_complement_of_fedper() -> None:
    """After one round both have trained the same models; what one shares the other keeps."""
    settings = {**SMALL, "participation": "all", "rounds": 1}
    mine, other = ft.run("lg-fedavg", **settings, warm_rounds=0), ft.run("fedper", **settings)
    run = mine.simulation
    weights = run.server.n_samples.double() / run.server.n_samples.sum()
    heads = torch.stack([state(other, client)["head"] for client in range(5)]).double()
    bodies = torch.stack([state(mine, client)["body"] for client in range(5)]).double()
    close(server(mine, "theta")[run.server.head].double(), weights @ heads, 1e-6)
    close(server(other, "body").double(), weights @ bodies, 1e-6)


def test_from_scratch_the_body_never_leaves() -> None:
    result = ft.run("lg-fedavg", **SMALL, warm_rounds=0)
    run, head = result.simulation, 16 * 10 + 10
    assert all(record.bytes_up == record.bytes_down == 3 * 4 * head for record in result.rounds)
    assert torch.equal(server(result, "theta")[run.server.body], run.server.initial[run.server.body])


@pytest.mark.parametrize("warm", [0, 1])
def test_a_new_client_has_the_first_or_the_warm_body_and_the_shared_head(warm: int) -> None:
    settings = {**SMALL, "participation": 1, "rounds": warm + 1}
    result = ft.run("lg-fedavg", **settings, warm_rounds=warm)
    run, (new, *_) = result.simulation, absent(result)
    before = ft.run("fedavg", **{**settings, "rounds": 1}).server_state["theta"] if warm else run.server.initial
    theta = personal(result, new)
    assert torch.equal(theta[run.server.body], before[run.server.body])
    assert not torch.equal(theta[run.server.head], before[run.server.head])
    (trained,) = result.rounds[-1].participants
    assert torch.equal(theta[run.server.head], personal(result, trained)[run.server.head])
