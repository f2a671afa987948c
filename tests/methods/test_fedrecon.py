"""FedRecon against the formula by hand, its limit cases, and that nothing stays at a client."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.local.streams import torch_stream
from fedtailor.methods import CATALOGUE
from tests.helpers import digits, quadratic_clients
from tests.methods.parts import MOMENTUM, SMALL, absent, close, first, normed, personal, run_parts, server, state
from tests.methods.test_own_labels import SMALL as OWN
from tests.methods.test_own_labels import clients

SIZES = [4, 7, 1, 6]


def several() -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Clients with several quadratics each, one of them with a single one; the data, and each client's c and H."""
    rows, centres, curvatures = quadratic_clients(sum(SIZES), 5, seed=1)
    data, truth, start = [], [], 0
    for size in SIZES:
        of_client = slice(start, start + size)
        data.append((torch.cat([x for x, _ in rows[of_client]]), torch.zeros(size, dtype=torch.float64)))
        truth.append((centres[of_client], curvatures[of_client]))
        start += size
    return data, truth


def descend(theta: Tensor, truth: tuple[Tensor, Tensor], chosen: Tensor, part: slice, count: int, lr: float) -> Tensor:
    """Gradient steps with momentum 0.5 on the mean of the chosen quadratics, on the entries `part` alone."""
    centres, curvatures = truth[0][chosen], truth[1][chosen]
    theta, velocity = theta.clone(), torch.zeros_like(theta)
    for _ in range(count):
        gradient = torch.stack([H @ (theta - c) for c, H in zip(centres, curvatures, strict=True)]).mean(0)
        velocity[part] = 0.5 * velocity[part] + gradient[part]
        theta[part] = theta[part] - lr * velocity[part]
    return theta


@pytest.mark.parametrize("server_lr", [1.0, 0.4, 1.5])
def test_follows_its_formula(server_lr: float) -> None:
    """Head from its start on the support part, body under that head on the query part, step at the server."""
    data, truth = several()
    result = run_parts(
        "fedrecon",
        data,
        3,
        2,
        reconstruction_epochs=4,
        reconstruction_lr=0.2,
        server_lr=server_lr,
        steps=2,  # of the body; the head counts in epochs
        rounds=5,
        participation=3,
        seed=2,
        momentum=0.5,
        keep_momentum=True,  # which a client without a state cannot
    )
    start, body = first(3, 2), first(3, 2)[:3]
    for record in result.rounds:
        change, total = torch.zeros(3, dtype=torch.float64), 0
        for client in record["participants"]:
            n = SIZES[client]
            order = torch.randperm(n, generator=torch_stream(2, "split", 0, client))
            half = {4: 2, 7: 4, 1: 1, 6: 3}[n]
            support, query = (order[:half], order[half:]) if n > 1 else (order, order)
            theta = torch.cat([body, start[3:]])
            theta = descend(theta, truth[client], support, slice(3, 5), 4, 0.2)
            theta = descend(theta, truth[client], query, slice(0, 3), 2, 0.1)
            change, total = change + len(query) * (theta[:3] - body), total + len(query)
        body = body + server_lr * change / total
    assert {1, 2} <= set(range(4)) - set(absent(result))
    close(server(result, "body"), body)
    for client in range(4):
        everything = torch.arange(SIZES[client])
        theta = torch.cat([body, start[3:]])
        close(personal(result, client), descend(theta, truth[client], everything, slice(3, 5), 4, 0.2))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_nothing_stays_at_a_client(more: dict[str, Any]) -> None:
    result = ft.run("fedrecon", **{**SMALL, **more})
    assert all(state(result, client) == {} for client in range(5))


def test_only_the_body_is_sent() -> None:
    result = ft.run("fedrecon", **SMALL)
    assert all(record["bytes_up"] == record["bytes_down"] == 3 * 4 * (64 * 16 + 16) for record in result.rounds)


@pytest.mark.parametrize("more", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"model": normed()}])
def test_without_a_head_and_a_split_it_is_fedavg(more: dict[str, Any]) -> None:
    settings = {**SMALL, **more}
    mine = ft.run("fedrecon", **settings, head=0, support=1.0, reconstruction_epochs=1)
    average = ft.run("fedavg", **settings)
    assert torch.equal(server(mine, "body"), server(average, "theta"))
    assert mine.clients[-1]["results"] == average.clients[-1]["results"]


@pytest.mark.parametrize("more", [{}, {"momentum": 0.9}, {"model": normed()}])
def test_without_reconstruction_and_a_split_it_trains_as_fedbabu(more: dict[str, Any]) -> None:
    mine = ft.run("fedrecon", **{**SMALL, **more}, support=1.0, reconstruction_epochs=0)
    other = ft.run("fedbabu", **{**SMALL, **more}, tuning_epochs=0)
    assert torch.equal(server(mine, "body"), server(other, "body"))
    assert mine.clients == other.clients


def test_with_everything_in_the_head_nothing_is_shared() -> None:
    result = ft.run("fedrecon", **SMALL, head=2)
    run = result._federation
    assert result.rounds[-1]["bytes_up"] == result.rounds[-1]["bytes_down"] == 0
    assert torch.equal(personal(result, 0), run.bench.client(0, 0, {}).descend(run.server.initial, epochs=10))


@pytest.mark.parametrize(
    ("support", "samples", "expected"), [(0.5, 40, 20), (0.01, 40, 1), (0.99, 40, 39), (0.5, 2, 1)]
)
def test_the_split_is_one_for_good(support: float, samples: int, expected: int) -> None:
    method = CATALOGUE["fedrecon"](support=support)
    bench = ft.run(method, data=digits([samples, 9]), test=0.0, validation=0.0, rounds=1)._federation.bench
    parts = [method._split(bench.client(0, round, {})) for round in (1, 2)]
    for one, other in zip(*parts, strict=True):
        assert torch.equal(one.train[0], other.train[0])
        assert torch.equal(one.train[1], other.train[1])
    assert [part.samples for part in parts[0]] == [expected, samples - expected]
    both = torch.cat([part.train[0] for part in parts[0]])
    assert torch.equal(both.sort(0).values, bench.data.train(0)[0].sort(0).values)  # every sample once


@pytest.mark.parametrize(("support", "samples"), [(0.5, 1), (1.0, 12)])
def test_all_samples_serve_for_both(support: float, samples: int) -> None:
    method = CATALOGUE["fedrecon"](support=support)
    bench = ft.run(method, data=digits([samples, 9]), test=0.0, validation=0.0, rounds=1)._federation.bench
    for part in method._split(bench.client(0, 1, {})):
        assert torch.equal(part.train[0], bench.data.train(0)[0])


def test_statistics_are_averaged_whatever_the_servers_rate() -> None:
    """A rate above 1 would lead variances below zero."""
    settings = {**SMALL, "model": normed(), "rounds": 1, "participation": "all"}
    one, two = (ft.run("fedrecon", **settings, server_lr=rate) for rate in (1.0, 2.0))
    places = one._federation.server.statistics
    assert places
    for place in places:
        assert torch.equal(server(one, "body")[place], server(two, "body")[place])
    start = one._federation.server.initial[: len(server(one, "body"))]
    close(server(two, "body")[:8] - start[:8], 2 * (server(one, "body")[:8] - start[:8]), 1e-6)


def test_the_personal_model_depends_on_the_body_alone() -> None:
    method = CATALOGUE["fedrecon"]()
    run = ft.run(method, data=digits([40, 40]), rounds=2, engine="in-process", **MOMENTUM)._federation
    message = method.broadcast(run.server)
    one, other = (method.personal(run.bench.client(0, round, {}), message) for round in (1, 2))
    assert torch.equal(one, other)


def test_a_new_client_has_what_all_others_have() -> None:
    """Two clients with the same samples, one of which never took part (full batches: no stream of their own)."""
    ((x, y),) = digits([40])
    result = ft.run(
        "fedrecon", data=[(x, y), (x, y)], test=0.0, validation=0.0, batch="full", participation=1, rounds=1
    )
    assert absent(result)
    assert torch.equal(personal(result, 0), personal(result, 1))
    assert not torch.equal(personal(result, 0), result._federation.server.initial)


def test_outputs_that_a_client_does_not_have_take_no_part() -> None:
    """Labels of each client's own: rows of the head beyond its classes stay where they began."""
    result = ft.run("fedrecon", data=clients(), **OWN)
    place = result._federation.server.head
    start = result._federation.server.initial[place]
    for client, own in ((0, 2), (2, 5)):
        changed = (personal(result, client)[place] != start)[:40].view(5, 8).any(1)
        assert changed.tolist() == [row < own for row in range(5)]
