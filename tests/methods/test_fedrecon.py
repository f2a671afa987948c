"""FedRecon against its slow reference, its limit cases, and that nothing stays at a client."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.methods.fedrecon import FedRecon
from tests.helpers import digits, quadratic_clients
from tests.methods.parts import SMALL, absent, close, first, normed, personal, run_parts, server, state
from tests.methods.problems import MOMENTUM, watched
from tests.reference.batches import stream
from tests.reference.fedrecon import BlockDescent, fedrecon, reconstructed

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
    rounds, start = [record.participants for record in result.rounds], first(3, 2)
    body = fedrecon(
        truth,
        rounds,
        start,
        body=3,
        supports=[2, 4, 1, 3],
        seed=2,
        head_steps=4,
        head_lr=0.2,
        body_steps=2,
        body_lr=0.1,
        momentum=0.5,
        server_lr=server_lr,
    )
    assert {1, 2} <= set(range(4)) - set(absent(result))
    close(server(result, "body"), body)
    for client in range(4):
        everything = torch.arange(SIZES[client])
        close(personal(result, client), reconstructed(truth[client], body, start, everything, 4, 0.2, 0.5))


@pytest.mark.parametrize(("update", "server_lr"), [("sgd", 0.3), ("adam", 0.05)])
@pytest.mark.parametrize("head_start", ["network", "uniform"])
def test_as_block_coordinate_descent(update: str, server_lr: float, head_start: str) -> None:
    """Heads go on from round to round, on all samples; the body takes one step a round, at the server."""
    data, truth = several()
    result = run_parts(
        "fedrecon",
        data,
        3,
        2,
        support=1.0,
        reconstruction_epochs=4,
        server_lr=server_lr,
        body_update=update,
        keep_head=True,
        head_start=head_start,
        steps=7,  # of a body's descent, which there is none of
        rounds=6,
        participation=2,
        seed=11,
    )
    heads = [first(3, 2)[3:] for _ in SIZES]
    if head_start == "uniform":
        heads = [torch.rand(2, generator=stream(11, "head", 0, i), dtype=torch.float64) for i in range(4)]
    slow = BlockDescent(truth, first(3, 2)[:3], heads, 4, 0.1, server_lr, adam=update == "adam")
    calls = [client for record in result.rounds for client in record.participants]
    assert any(calls.count(client) > 1 for client in (0, 1, 3))
    for record in result.rounds:
        slow.round(record.participants)
    close(server(result, "body"), slow.body)
    for client in set(calls):
        close(state(result, client)["head"], slow.heads[client])
        close(personal(result, client), torch.cat([slow.body, slow.heads[client]]))


@pytest.mark.parametrize("update", ["sgd", "adam"])
def test_block_coordinate_descent_sends_a_gradient_and_measures_the_body_that_was_sent(update: str) -> None:
    """A local model is the one that the client has after its own work: no step of the body is the client's."""
    method, log = watched(FedRecon, support=1.0, body_update=update, keep_head=True, server_lr=0.05)
    how = {**SMALL, "evaluation": {"model": "local", "clients": "participants"}}
    result = ft.run(method, **how)
    assert all(record.bytes_up == 3 * 4 * (64 * 16 + 16 + 1) for record in result.rounds)
    last = result.rounds[-1]
    for client in last.participants:
        body, head = log.down[last.round, client]["body"], state(result, client)["head"]
        x, y = result.data.client(client).test
        hidden = (x.flatten(1) @ body[: 64 * 16].view(16, 64).T + body[64 * 16 :]).relu()
        scores = hidden @ head[:160].view(10, 16).T + head[160:]
        assert result.clients[-1].results[client]["test"].loss == pytest.approx(
            torch.nn.functional.cross_entropy(scores, y).item(), rel=1e-4
        )
        assert log.up[last.round, client].keys() == {"gradient", "n_query"}


def test_a_kept_head_is_reconstructed_for_a_client_that_never_took_part() -> None:
    kept, plain = (ft.run("fedrecon", **{**SMALL, "participation": 1, "rounds": 1}, keep_head=k) for k in (True, False))
    assert torch.equal(server(kept, "body"), server(plain, "body"))
    (called,) = kept.rounds[0].participants
    for client in range(5):
        assert torch.equal(personal(kept, client), personal(plain, client)) == (client != called)


@pytest.mark.parametrize("server_lr", [1.0, 0.4, 1.5])
def test_bodies_are_weighed_by_query_samples(server_lr: float) -> None:
    """g + η_s Σ (n_i / n) (g_i − g) with n_i the samples outside the support part, all of them where none is left."""
    method, log = watched(FedRecon, server_lr=server_lr)
    data, _ = several()
    run_parts(method, data, 3, 2, rounds=3, participation=3, seed=2, steps=4)
    queries, body = [2, 3, 1, 3], first(3, 2)[:3]
    assert len(log.totals) == 3
    for number, total in log.totals.items():
        ends = {i: log.up[number, i] for i in total.clients}
        for i, upload in ends.items():
            assert upload["n_query"].item() == queries[i]
        assert total.weight("body").item() == sum(queries[i] for i in ends)
        expected = {}
        for name, weights in (("queries", queries), ("samples", SIZES)):
            mean = sum(weights[i] * upload["body"] for i, upload in ends.items()) / sum(weights[i] for i in ends)
            expected[name] = body + server_lr * (mean - body)
        body = log.server[number]["body"]
        close(body, expected["queries"], 1e-12)
        assert (body - expected["samples"]).abs().max() > 1e-4  # their samples are not in the same proportion


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_nothing_stays_at_a_client(more: dict[str, Any]) -> None:
    result = ft.run("fedrecon", **{**SMALL, **more})
    assert all(state(result, client) == {} for client in range(5))


@pytest.mark.parametrize("more", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"model": normed()}])
def test_without_a_head_and_a_split_it_is_fedavg(more: dict[str, Any]) -> None:
    settings = {**SMALL, **more}
    mine = ft.run("fedrecon", **settings, head=0, support=1.0, reconstruction_epochs=1)
    average = ft.run("fedavg", **settings)
    assert torch.equal(server(mine, "body"), server(average, "theta"))
    assert mine.clients[-1].results == average.clients[-1].results


@pytest.mark.parametrize("more", [{}, {"momentum": 0.9}, {"model": normed()}])
def test_without_reconstruction_and_a_split_it_trains_as_fedbabu(more: dict[str, Any]) -> None:
    mine = ft.run("fedrecon", **{**SMALL, **more}, support=1.0, reconstruction_epochs=0)
    other = ft.run("fedbabu", **{**SMALL, **more}, tuning_epochs=0)
    assert torch.equal(server(mine, "body"), server(other, "body"))
    for one, average in zip(mine.clients, other.clients, strict=True):
        assert one.results == average.results
        assert one.bytes_down == average.bytes_down
        assert one.bytes_up == {client: sent + 4 for client, sent in average.bytes_up.items()}  # and the weight


def test_with_everything_in_the_head_nothing_is_shared() -> None:
    result = ft.run("fedrecon", **SMALL, head=2)
    run = result.simulation
    assert result.rounds[-1].bytes_down == 0
    assert result.rounds[-1].bytes_up == 3 * 4  # the weights of nothing
    alone = run.sites.site(0).client(0, {})
    assert torch.equal(personal(result, 0), alone.descend(run.server.initial, epochs=10))


@pytest.mark.parametrize(
    ("support", "samples", "expected"), [(0.5, 40, 20), (0.01, 40, 1), (0.99, 40, 39), (0.5, 2, 1)]
)
def test_the_split_is_one_for_good(support: float, samples: int, expected: int) -> None:
    method = FedRecon(support=support)
    site = ft.run(
        method, data=digits([samples, 9]), test=0.0, validation=0.0, evaluation={"every": 0}, rounds=1
    ).simulation.sites.site(0)
    parts = [method._split(site.client(round, {})) for round in (1, 2)]
    for one, other in zip(*parts, strict=True):
        assert torch.equal(one.train_data[0], other.train_data[0])
        assert torch.equal(one.train_data[1], other.train_data[1])
    assert [part.n_samples for part in parts[0]] == [expected, samples - expected]
    both = torch.cat([part.train_data[0] for part in parts[0]])
    assert torch.equal(both.sort(0).values, site.data.train[0].sort(0).values)  # every sample once


@pytest.mark.parametrize(("support", "samples"), [(0.5, 1), (1.0, 12)])
def test_all_samples_serve_for_both(support: float, samples: int) -> None:
    method = FedRecon(support=support)
    site = ft.run(
        method, data=digits([samples, 9]), test=0.0, validation=0.0, evaluation={"every": 0}, rounds=1
    ).simulation.sites.site(0)
    for part in method._split(site.client(1, {})):
        assert torch.equal(part.train_data[0], site.data.train[0])


def test_buffers_are_averaged_whatever_the_servers_rate() -> None:
    """A rate above 1 would lead variances below zero."""
    settings = {**SMALL, "model": normed(), "rounds": 1, "participation": "all"}
    one, two = (ft.run("fedrecon", **settings, server_lr=rate) for rate in (1.0, 2.0))
    places = one.simulation.server.layout.buffers
    assert places
    for place in places:
        assert torch.equal(server(one, "body")[place], server(two, "body")[place])
    start = one.simulation.server.initial[: len(server(one, "body"))]
    close(server(two, "body")[:8] - start[:8], 2 * (server(one, "body")[:8] - start[:8]), 1e-6)


def test_the_personal_model_depends_on_the_body_alone() -> None:
    method = FedRecon()
    run = ft.run(method, data=digits([40, 40]), rounds=2, engine="in-process", **MOMENTUM).simulation
    message = method.broadcast(run.server)
    one, other = (method.personal_model(run.sites.site(0).client(round, {}), message) for round in (1, 2))
    assert torch.equal(one, other)


def test_a_new_client_has_what_all_others_have() -> None:
    """Two clients with the same samples, one of which never took part (full batches: no stream of their own)."""
    ((x, y),) = digits([40])
    result = ft.run(
        "fedrecon",
        data=[(x, y), (x, y)],
        test=0.0,
        validation=0.0,
        evaluation={"every": 0},
        batch="full",
        participation=1,
        rounds=1,
    )
    assert absent(result)
    assert torch.equal(personal(result, 0), personal(result, 1))
    assert not torch.equal(personal(result, 0), result.simulation.server.initial)
