"""GPFL against its slow reference, its limit case, its errors, and what its embeddings are worth."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.methods.gpfl import GPFL, valve
from tests.helpers import digits
from tests.methods.parts import SMALL, server, state
from tests.methods.problems import BODY, close, features, on_a_network, who
from tests.reference.gpfl import SlowGPFL

HEAD = slice(BODY, BODY + 6 * 10 + 10)


@pytest.mark.parametrize(("lam", "mu", "own_embeddings"), [(0.3, 0.0, False), (0.01, 0.1, False), (1.0, 0.05, True)])
def test_follows_its_formulas(lam: float, mu: float, own_embeddings: bool) -> None:
    result, problem = on_a_network(GPFL(lam=lam, mu=mu, own_embeddings=own_embeddings))
    samples = [result.data.client(client).train for client in range(6)]
    head = problem.initial[HEAD]
    guide = result.simulation.server.layout.extras(problem.initial)
    assert guide["E"].shape == (10, 6)
    assert guide["gamma_W"].shape == guide["beta_W"].shape == (6, 6)

    def of_body(client: int, body: Tensor) -> Tensor:
        return features(samples[client][0], body)

    slow = SlowGPFL(problem, of_body, [y.tolist() for _, y in samples], lam, mu, own_embeddings, 0.2)
    first = [head[:60].view(10, 6), head[60:]]
    shared = slow.run(who(result), problem.initial[:BODY], first, list(guide.values()))
    close(server(result, "body"), shared[0])
    close(server(result, "guide"), torch.cat([part.flatten() for part in shared[1:]]))
    assert len(slow.heads) > 3
    for client in range(6):
        assert ("head" in state(result, client)) == (client in slow.heads)
        if client in slow.heads:
            close(state(result, client)["head"], torch.cat([part.flatten() for part in slow.heads[client]]))
        expected = slow.predict(client, of_body(client, shared[0]), first, shared)
        close(result.simulation.predict(client, samples[client][0]), expected)


def test_with_as_many_samples_of_each_class_the_conditions_are_the_same() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    class Watched(GPFL):
        def conditions(self, client: Any, theta: Tensor) -> tuple[Tensor, Tensor]:
            seen.append(super().conditions(client, theta))
            return seen[-1]

    x, y = digits([900])[0]
    chosen = torch.cat([(y == c).nonzero()[:20, 0] for c in range(10)])
    how: dict[str, Any] = {"model": "mlp:8", "rounds": 1, "engine": "in-process", "test": 0.2, "validation": 0.0}
    for data, same in (((x[chosen], y[chosen]), True), ((x[:100], y[:100]), False)):
        seen.clear()
        ft.run(Watched(), data=[data], **how)
        assert seen
        assert all(torch.allclose(g, p, atol=1e-6) == same for g, p in seen)


def test_the_head_never_leaves() -> None:
    result = ft.run("gpfl", **SMALL)
    size = 64 * 16 + 16 + 10 * 16 + 2 * (16 * 16 + 3 * 16)  # body, embeddings, valve
    for record in result.rounds:
        assert record.bytes_up == record.bytes_down == 3 * 4 * size
    assert set(result.server_state) == {"body", "guide"}


@pytest.mark.parametrize("settings", [{"head": 0}, {"head": 2, "model": "mlp:8,8"}])
def test_a_head_that_is_not_one_linear_layer_is_refused_before_the_first_round(settings: dict[str, Any]) -> None:
    with pytest.raises(ft.FedtailorError, match="GPFL needs a head that is one linear layer"):
        ft.run("gpfl", **{**SMALL, **settings})


def test_other_targets_than_classes_are_refused() -> None:
    data = [(x, x.flatten(1)[:, :2]) for x, _ in digits([20, 30])]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with pytest.raises(ft.FedtailorError, match="its targets must be one class label per sample"):
        ft.run("gpfl", data=data, model=model, loss="mse", rounds=1, engine="in-process", on_failure="stop")


def test_embeddings_come_near_the_features_of_their_class() -> None:
    """The cosine with the own class's embedding is the largest for most samples, of which the heads know nothing."""
    how = {**SMALL, "rounds": 12, "participation": "all", "max_train": 100, "partition": "dirichlet:1"}
    result = ft.run("gpfl", **how)
    layout, theta = result.simulation.server.layout, result.personal_vector(0)
    guide, body = layout.extras(theta), theta[layout.body]
    x, y = (torch.cat(parts) for parts in zip(*(result.data.client(i).test for i in range(5)), strict=True))
    z = (x.flatten(1) @ body[:1024].view(16, 64).T + body[1024:]).relu()
    led = nn.functional.normalize(valve(guide, z, guide["E"].mean(0)))
    assert float(((led @ nn.functional.normalize(guide["E"]).T).argmax(1) == y).float().mean()) > 0.6
