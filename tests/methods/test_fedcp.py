"""FedCP against its slow reference, its first visit, its predictions, and its errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.methods.fedcp import FedCP
from tests.helpers import digits
from tests.methods.parts import SMALL, absent, server, state
from tests.methods.problems import BODY, EXACT, close, features, on_a_network, who
from tests.reference.batches import stream
from tests.reference.fedcp import SlowFedCP

HEAD = slice(BODY, BODY + 6 * 10 + 10)


def halves(head: Tensor, features: int = 6) -> tuple[Tensor, Tensor]:
    """The weights and biases of a head's vector."""
    return head[: 10 * features].view(10, features), head[10 * features :]


def uniform(number: int, client: int) -> Callable[[int, int], Tensor]:
    generator = stream(29, "policy", number, client)
    return lambda *shape: torch.rand(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("lam", "noise"), [(0.5, False), (2.0, True), (0.0, True)])
def test_follows_its_formulas(lam: float, noise: bool) -> None:
    result, problem = on_a_network(FedCP(lam=lam, noise=noise))
    samples = [result.data.client(client).train for client in range(6)]
    sizes = {"W": (12, 6), "b": (12,), "gain": (12,), "shift": (12,)}
    initial = result.simulation.server.layout.extras(problem.initial)
    assert {name: tuple(tensor.shape) for name, tensor in initial.items()} == sizes

    def of_body(client: int, body: Tensor) -> Tensor:
        return features(samples[client][0], body)

    labels = [y.tolist() for _, y in samples]
    slow = SlowFedCP(problem, of_body, labels, uniform if noise else None, lam, 0.2)
    body, head, policy = slow.run(
        who(result), problem.initial[:BODY], halves(problem.initial[HEAD]), tuple(initial.values())
    )
    close(server(result, "body"), body)
    close(server(result, "head"), torch.cat([part.flatten() for part in head]))
    close(server(result, "policy"), torch.cat([part.flatten() for part in policy]))
    assert len(slow.heads) > 3
    for client in range(6):
        assert ("head" in state(result, client)) == (client in slow.heads)
        if client in slow.heads:
            close(state(result, client)["head"], torch.cat([part.flatten() for part in slow.heads[client]]))
        expected = slow.predict(client, of_body(client, body), head, policy)
        close(result.simulation.predict(client, samples[client][0]), expected)


def test_in_the_first_step_the_policy_has_no_gradient() -> None:
    """Both heads are the same then."""
    for steps, same in ((1, True), (2, False)):
        result = ft.run("fedcp", **{**SMALL, "rounds": 1}, steps=steps, batch="full")
        policy = result.simulation.server.initial[result.simulation.server.head.stop :]
        assert torch.allclose(server(result, "policy"), policy, rtol=0, atol=1e-7) == same


def test_a_client_that_never_took_part_has_the_generic_head_twice() -> None:
    result = ft.run("fedcp", **{**SMALL, "participation": 2})
    (client, *_) = absent(result)
    x = result.data.client(client).train[0]
    W, b = halves(server(result, "head"), 16)
    body = server(result, "body")
    z = (x.flatten(1) @ body[:1024].view(16, 64).T + body[1024:]).relu()
    torch.testing.assert_close(result.simulation.predict(client, x), z @ W.T + 2 * b)


def test_predictions_are_not_random() -> None:
    result = ft.run("fedcp", **SMALL)
    client = who(result)[0][0]
    x = result.data.client(client).train[0]
    first = result.simulation.predict(client, x)
    assert torch.equal(first, result.simulation.predict(client, x))
    assert torch.allclose(first[:3], result.simulation.predict(client, x[:3]), atol=1e-5)


def test_the_distance_holds_the_features() -> None:
    moved = []
    for lam in (0.0, 100.0):
        result = ft.run("fedcp", **{**SMALL, "rounds": 1, "participation": 1}, lam=lam)
        x = result.data.client(who(result)[0][0]).train[0].flatten(1)
        bodies = (server(result, "body"), result.simulation.server.initial)
        one, other = ((x @ body[:1024].view(16, 64).T + body[1024:1040]).relu() for body in bodies)
        moved.append(float((one.mean(0) - other.mean(0)).norm()))
    assert moved[0] > 2 * moved[1]  # measured: 2.7


def test_a_head_without_biases_will_do_and_one_that_is_not_linear_will_not() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10, bias=False))
    result = ft.run("fedcp", data=digits([60, 60]), model=plain, **EXACT, rounds=2)
    assert len(state(result, 0)["head"]) == 80
    deep: dict[str, Any] = {"head": 2, "model": "mlp:8,8"}
    with pytest.raises(ft.FedtailorError, match="FedCP needs a head that is one linear layer"):
        ft.run("fedcp", **{**SMALL, **deep})
