"""FedAS against its slow reference, its limit cases, its errors, and its weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.methods.fedas import FedAS, squared_gradients
from fedtailor.server.aggregation import Aggregator
from tests.helpers import digits
from tests.methods.parts import SMALL, normed, personal, server, state
from tests.methods.problems import MOMENTUM, close, on_a_network, watched, who
from tests.reference.batches import batches
from tests.reference.fedas import SlowFedAS

BODY = 6 * 64 + 6


@pytest.mark.parametrize("weighting", ["fisher", "batches"])
def test_follows_its_formulas(weighting: Any) -> None:
    method, log = watched(FedAS, align_lr=0.7, align_epochs=2, weighting=weighting)
    result, problem = on_a_network(method, rounds=6)
    samples = [result.data.client(client).train for client in range(6)]

    def features(client: int, theta: Tensor) -> Tensor:
        return (samples[client][0] @ theta[: BODY - 6].view(6, 64).T + theta[BODY - 6 : BODY]).relu()

    def drawn(purpose: str, epochs: int) -> Any:
        how = {"purpose": purpose, "epochs": epochs, "batch": 5, "drop_last": True}
        return lambda number, client: batches(len(samples[client][1]), 29, number, client, **how)

    labels, fisher = [y for _, y in samples], drawn("fisher", 1) if weighting == "batches" else None
    slow = SlowFedAS(problem, BODY, features, labels, drawn("alignment", 2), 0.7, 0.2, fisher)
    close(server(result, "body"), slow.run(who(result)))
    assert len(slow.own) > 3
    assert len(slow.traces) > len(slow.own)  # somebody came again, and aligned
    for client, theta in slow.own.items():
        close(personal(result, client), theta)
    for at, trace in slow.traces.items():
        close(log.up[at]["fisher"], torch.tensor(trace, dtype=torch.float64))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_without_alignment_and_fisher_it_trains_as_fedper(more: dict[str, Any]) -> None:
    mine = ft.run("fedas", **{**SMALL, **more}, align_epochs=0, weighting="samples")
    fedper = ft.run("fedper", **{**SMALL, **more})
    assert torch.equal(server(mine, "body"), server(fedper, "body"))
    head = mine.simulation.server.head
    for client in range(5):
        assert ("theta" in state(mine, client)) == ("head" in state(fedper, client))
        if "theta" in state(mine, client):
            assert torch.equal(state(mine, client)["theta"][head], state(fedper, client)["head"])


def test_a_clients_first_round_is_fedpers() -> None:
    """It has no model yet to align with."""
    for rounds, same in ((1, True), (2, False)):
        how = {**SMALL, "rounds": rounds, "participation": "all"}
        mine, fedper = ft.run("fedas", **how, weighting="samples"), ft.run("fedper", **how)
        assert torch.equal(server(mine, "body"), server(fedper, "body")) == same


def convolved() -> nn.Module:
    torch.manual_seed(0)
    pieces = [nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 64, 10)]
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *pieces)


@pytest.mark.parametrize("model", ["mlp:8", convolved(), pytest.param(normed(), marks=pytest.mark.slow)])
def test_the_trace_is_that_of_single_samples_whatever_the_batches(model: Any) -> None:
    """Of the model as it predicts: by autograd, one sample after the other."""
    data, found = digits([40, 20]), []
    for size in (7, 32, "full"):
        result = ft.run("fedavg", data=data, model=model, rounds=1, batch=size, engine="in-process", dtype="float64")
        client = result.simulation.sites.site(0).client(2, {})
        theta, network = result.simulation.server.initial, client.network
        network.module.train()
        found.append(FedAS().fisher_trace(client, theta))
    network.vector.copy_(theta)
    network.module.eval()
    traces, (x, y) = [], client.train_data
    for k in range(len(y)):
        gradients = torch.autograd.grad(
            nn.functional.cross_entropy(network(x[k : k + 1]), y[k : k + 1]), [*network.module.parameters()]
        )
        traces.append(sum(float(gradient.square().sum()) for gradient in gradients))
    network.module.train()
    close(squared_gradients(client, theta), torch.tensor(traces, dtype=torch.float64))
    for trace in found:
        close(trace, torch.tensor(sum(traces) / len(traces), dtype=torch.float64))


def test_the_weights_as_released_depend_on_the_batches() -> None:
    """For one model, eight batches in place of one count more than four times as much."""
    result = ft.run("fedavg", data=digits([80, 20]), model="mlp:8", rounds=3, epochs=10, engine="in-process", batch=8)
    theta, client = server(result), result.simulation.sites.site(0).client(2, {})
    few = ft.run("fedavg", data=digits([80, 20]), model="mlp:8", rounds=1, engine="in-process", batch="full")
    whole = few.simulation.sites.site(0).client(2, {})
    released = FedAS(weighting="batches")
    assert released.fisher_trace(client, theta) > 4 * released.fisher_trace(whole, theta)
    close(FedAS().fisher_trace(client, theta).double(), FedAS().fisher_trace(whole, theta).double())


@pytest.mark.parametrize(("traces", "expected"), [([3.0, 1.0], 0.75), ([0.0, 2.0], 0.0), ([0.0, 0.0], None)])
def test_a_body_counts_by_its_trace_and_nothing_changes_if_all_are_zero(
    traces: list[float], expected: float | None
) -> None:
    simulation = ft.run("fedas", **SMALL).simulation
    side, method = simulation.server, simulation.terms.method
    before, bodies = side.state["body"], torch.rand(2, len(side.state["body"]))
    uploads = Aggregator(method.uploads, [1, 3], side.n_samples, side.layout)
    for client, body, trace in zip([1, 3], bodies, traces, strict=True):
        uploads.put(client, {"body": body, "fisher": torch.tensor(trace)})
    method.receive(side, uploads.total())
    mean = before if expected is None else expected * bodies[0] + (1 - expected) * bodies[1]
    torch.testing.assert_close(side.state["body"], mean)


def test_alignment_draws_the_features_of_the_received_body_to_the_clients_own() -> None:
    method = FedAS(align_lr=1.0, align_epochs=5)
    result = ft.run(method, **{**SMALL, "participation": "all", "rounds": 2})
    client = result.simulation.sites.site(0).client(3, dict(state(result, 0)))
    mu, y = client.state["means"], client.train_data[1]
    received = torch.cat([server(result, "body"), personal(result, 0)[client.head]])

    def away(theta: Tensor) -> Tensor:
        features = client.features(theta)
        assert features is not None
        return (features - mu[y]).square().mean()

    aligned = method.aligned(client, received)
    assert away(aligned) < 0.9 * away(received)
    assert torch.equal(aligned[client.head], received[client.head])


def test_a_client_predicts_with_its_own_last_model_and_a_new_one_with_the_shared_body() -> None:
    result = ft.run("fedas", **{**SMALL, "new_clients": 1})
    new, initial = result.data.n_clients - 1, result.simulation.server.initial
    head = result.simulation.server.head
    assert torch.equal(personal(result, new), torch.cat([server(result, "body"), initial[head]]))
    trained = next(client for client in range(4) if state(result, client))
    assert torch.equal(personal(result, trained), state(result, trained)["theta"])
    assert not torch.equal(personal(result, trained)[: len(server(result, "body"))], server(result, "body"))


def test_with_everything_in_the_head_it_is_local() -> None:
    whole, local = ft.run("fedas", **SMALL, head=2), ft.run("local", **SMALL)
    for client in range(5):
        assert torch.equal(personal(whole, client), personal(local, client))


def test_a_network_that_cannot_be_cut_is_refused_at_once() -> None:
    with pytest.raises(ft.FedtailorError, match=r"FedAS, round 1: .*needs a network that can be cut"):
        ft.run("fedas", **SMALL, head=0, on_failure="stop")


def test_targets_without_classes_are_refused() -> None:
    data = [(x, x.flatten(1)[:, :2]) for x, _ in digits([20, 30])]
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 2))
    how: dict[str, Any] = {"data": data, "model": module, "loss": "mse", "rounds": 2, "engine": "in-process"}
    with pytest.raises(ft.FedtailorError, match="its targets must be one class label per sample"):
        ft.run("fedas", **how, on_failure="stop")
    ft.run("fedas", **how, on_failure="stop", align_epochs=0)  # a trace needs no classes
