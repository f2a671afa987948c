"""FedRep against its slow reference, its limit cases and its rule for new clients."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.methods import CATALOGUE
from tests.helpers import digits
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
from tests.methods.problems import OWN, own_label_clients
from tests.reference.fedrep import fedrep


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_follows_its_formula(released: bool, keep: bool) -> None:
    """Three steps of the head on the received body, then two of the body under the new head; the body is averaged."""
    data, centres, curvatures, samples = unequal_clients(4, 5)
    result = run_parts(
        "fedrep",
        data,
        3,
        2,
        head_epochs=3,
        steps=2,  # of the body; the head counts in epochs
        rounds=6,
        participation=2,
        seed=3,
        momentum=0.5,
        keep_momentum=keep,
        released_weights=released,
    )

    def slope(i: int, theta: Tensor) -> Tensor:
        return curvatures[i] @ (theta - centres[i])

    rounds, weights = [record.participants for record in result.rounds], samples if released else [1.0] * 4
    sgd = {"lr": 0.1, "momentum": 0.5, "keep_momentum": keep}
    body, heads = fedrep(slope, rounds, weights, first(3, 2), body=3, head_steps=3, body_steps=2, **sgd)
    participated = [client for client in range(4) if client not in absent(result)]
    assert 1 in participated
    close(server(result, "body"), body)
    for client in participated:
        close(state(result, client)["head"], heads[client])
        close(personal(result, client), torch.cat([body, heads[client]]))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_without_a_head_it_is_fedavg(more: dict[str, Any]) -> None:
    headless = ft.run("fedrep", **{**SMALL, **more}, head=0, head_epochs=1, released_weights=True)
    average = ft.run("fedavg", **{**SMALL, **more})
    assert torch.equal(server(headless, "body"), server(average, "theta"))
    assert headless.rounds[-1].bytes_up == average.rounds[-1].bytes_up


@pytest.mark.parametrize("more", [{"head": 2}, {"head": 2, **MOMENTUM}, {"head": 3, "model": normed()}])
def test_with_everything_in_the_head_it_is_local(more: dict[str, Any]) -> None:
    whole, local = ft.run("fedrep", **{**SMALL, **more}, head_epochs=2), ft.run("local", **{**SMALL, **more})
    assert any(state(local, client) for client in range(5))
    for client in range(5):
        nothing = torch.empty(0)
        assert torch.equal(state(whole, client).get("head", nothing), state(local, client).get("theta", nothing))
    assert whole.rounds[-1].bytes_up == 0


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_without_head_epochs_the_body_is_fedbabus(more: dict[str, Any]) -> None:
    still = ft.run("fedrep", **{**SMALL, **more}, head_epochs=0, released_weights=True)
    assert torch.equal(server(still, "body"), server(ft.run("fedbabu", **{**SMALL, **more}), "body"))


def test_the_head_never_leaves() -> None:
    result = ft.run("fedrep", **SMALL)
    body = 64 * 16 + 16
    assert all(record.bytes_up == record.bytes_down == 3 * 4 * body for record in result.rounds)
    assert set(result.server_state) == {"body"}


def test_a_new_client_fits_a_head_to_the_present_body() -> None:
    """By hand: the features of the broadcast's body, and plain gradient descent of a head on them."""
    result = ft.run("fedrep", **{**SMALL, "participation": 1, "rounds": 2, "dtype": "float64"}, batch="full")
    (new, *_) = absent(result)
    run = result.simulation
    x, y = run.data.client(new).train
    body, head = server(result, "body"), run.server.initial[run.server.head].clone().requires_grad_()
    hidden = (x.flatten(1) @ body[: 64 * 16].view(16, 64).T + body[64 * 16 :]).relu()
    for _ in range(10):
        scores = hidden @ head[:160].view(10, 16).T + head[160:]
        loss = -(scores - scores.logsumexp(1, keepdim=True))[range(len(y)), y].mean()
        (gradient,) = torch.autograd.grad(loss, head)
        head = (head - 0.1 * gradient).detach().requires_grad_()
    close(personal(result, new), torch.cat([body, head.detach()]))
    assert state(result, new) == {}


def test_a_new_clients_model_is_the_same_in_all_rounds() -> None:
    method = CATALOGUE["fedrep"]()
    run = ft.run(method, data=digits([40, 40]), rounds=1, engine="in-process", **MOMENTUM).simulation
    initial, site = run.server.initial, run.sites.site(0)
    message = {"body": initial[run.server.body]}
    one, other = (method.personal_model(site.client(round, {}), message) for round in (1, 7))
    assert torch.equal(one, other)
    assert not torch.equal(one, initial)


def test_outputs_that_a_client_does_not_have_take_no_part() -> None:
    """Labels of each client's own: rows of the head beyond its classes stay where they began."""
    result = ft.run("fedrep", data=own_label_clients(), **OWN)
    place = result.simulation.server.head
    start = result.simulation.server.initial[place]
    for client, own in ((0, 2), (2, 5)):
        changed = (personal(result, client)[place] != start)[:40].view(5, 8).any(1)
        assert changed.tolist() == [row < own for row in range(5)]
