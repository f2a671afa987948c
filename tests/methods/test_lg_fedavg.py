"""LG-FedAvg against its slow reference, and its limit cases."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from tests.methods.parts import (
    MOMENTUM,
    SMALL,
    absent,
    close,
    first,
    normed,
    personal,
    run_parts,
    server,
    state,
    unequal_clients,
)
from tests.reference.lg_fedavg import lg_fedavg


def test_follows_its_formula() -> None:
    """Everything is trained together; the head is averaged by samples, the body stays."""
    data, centres, curvatures, samples = unequal_clients(4, 5)
    result = run_parts("lg-fedavg", data, 3, 2, epochs=3, rounds=6, participation=2, seed=3, momentum=0.5)

    def slope(i: int, theta: Tensor) -> Tensor:
        return curvatures[i] @ (theta - centres[i])

    rounds = [record.participants for record in result.rounds]
    head, bodies = lg_fedavg(slope, rounds, samples, first(3, 2), body=3, steps=3, lr=0.1, momentum=0.5)
    assert 1 not in absent(result)
    close(server(result, "head"), head)
    for client in range(4):
        close(personal(result, client), torch.cat([bodies[client], head]))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_without_a_head_it_is_local(more: dict[str, Any]) -> None:
    headless, local = ft.run("lg-fedavg", **{**SMALL, **more}, head=0), ft.run("local", **{**SMALL, **more})
    assert any(state(local, client) for client in range(5))
    for client in range(5):
        nothing = torch.empty(0)
        assert torch.equal(state(headless, client).get("body", nothing), state(local, client).get("theta", nothing))
    assert headless.rounds[-1].bytes_up == headless.rounds[-1].bytes_down == 0
    assert headless.clients[-1].results == local.clients[-1].results


@pytest.mark.parametrize("more", [{"head": 2}, {"head": 2, **MOMENTUM}, {"head": 3, "model": normed()}])
def test_with_everything_in_the_head_it_is_fedavg(more: dict[str, Any]) -> None:
    whole, average = ft.run("lg-fedavg", **{**SMALL, **more}), ft.run("fedavg", **{**SMALL, **more})
    assert torch.equal(server(whole, "head"), server(average, "theta"))
    assert whole.rounds[-1].bytes_up == average.rounds[-1].bytes_up


def test_it_is_the_complement_of_fedper() -> None:
    """After one round both have trained the same models; what one shares the other keeps."""
    settings = {**SMALL, "participation": "all", "rounds": 1}
    mine, other = ft.run("lg-fedavg", **settings), ft.run("fedper", **settings)
    run = mine.simulation
    weights = run.server.n_samples.double() / run.server.n_samples.sum()
    heads = torch.stack([state(other, client)["head"] for client in range(5)]).double()
    bodies = torch.stack([state(mine, client)["body"] for client in range(5)]).double()
    close(server(mine, "head").double(), weights @ heads, 1e-6)
    close(server(other, "body").double(), weights @ bodies, 1e-6)


def test_the_body_never_leaves() -> None:
    result = ft.run("lg-fedavg", **SMALL)
    head = 16 * 10 + 10
    assert all(record.bytes_up == record.bytes_down == 3 * 4 * head for record in result.rounds)
    assert set(result.server_state) == {"head"}


def test_a_new_client_has_the_first_body_and_the_shared_head() -> None:
    result = ft.run("lg-fedavg", **{**SMALL, "participation": 1, "rounds": 1})
    run, (new, *_) = result.simulation, absent(result)
    assert torch.equal(personal(result, new), torch.cat([run.server.initial[run.server.body], server(result, "head")]))
    assert not torch.equal(server(result, "head"), run.server.initial[run.server.head])
