"""FedPAC against its slow reference, its limit cases, its errors, and whose heads it mixes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.methods.fedpac import FedPAC, minimum_in_simplex
from tests.helpers import digits
from tests.methods.parts import SMALL, normed, personal, server, state
from tests.methods.problems import EXACT, MOMENTUM, OWN, close, on_a_network, own_label_clients, watched, who
from tests.reference.batches import batches
from tests.reference.fedpac import SlowFedPAC, smallest

BODY = 6 * 64 + 6


@pytest.mark.parametrize(("lam", "epochs"), [(2.0, 1), (0.0, 3)])
def test_follows_its_formulas(lam: float, epochs: int) -> None:
    method, log = watched(FedPAC, lam=lam, head_epochs=epochs, head_speed=2.5)
    result, problem = on_a_network(method, rounds=6, participation=3)
    samples = [result.data.client(client).train for client in range(6)]

    def features(client: int, theta: Tensor) -> Tensor:
        return (samples[client][0] @ theta[: BODY - 6].view(6, 64).T + theta[BODY - 6 : BODY]).relu()

    def head_order(number: int, client: int) -> Any:
        return batches(len(samples[client][1]), 29, number, client, epochs=epochs, batch=5, drop_last=True)

    slow = SlowFedPAC(problem, BODY, features, [y for _, y in samples], lam, head_order, 0.5, 0.2)
    close(server(result, "body"), slow.run(who(result)))
    assert len(slow.own) > 4
    for c, prototype in slow.prototypes.items():
        close(server(result, "prototypes")[c], prototype)
    for at, head in slow.begun.items():
        close(log.down[at]["head"], head)
    for i, theta in slow.own.items():
        close(personal(result, i), theta)
        close(
            server(result, "alpha")[i], torch.tensor([slow.alpha[i].get(j, 0.0) for j in range(6)], dtype=torch.float64)
        )
    assert any(0.01 < weight < 0.9 for each in slow.alpha.values() for weight in each.values())
    absent = [i for i in range(6) if i not in slow.own]
    assert not server(result, "alpha")[absent].any()


# --- the weights ---


def test_the_weights_are_the_best_in_the_simplex() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for trial in range(200):
        n, d = (int(torch.randint(1, 7, (), generator=generator)) for _ in range(2))
        rows = torch.randn(n, d, generator=generator, dtype=torch.float64) + trial % 4
        P = rows @ rows.T + 0.1 * (trial % 3) * torch.rand(n, generator=generator, dtype=torch.float64).diag()
        alpha = minimum_in_simplex(P)
        assert alpha.min() >= 0
        close(alpha.sum(), torch.ones((), dtype=torch.float64))
        best = torch.from_numpy(smallest(P.numpy()))
        torch.testing.assert_close(alpha @ P @ alpha, best @ P @ best, rtol=1e-6, atol=1e-7)
        if P.det() > 1e-3:
            torch.testing.assert_close(alpha, best, rtol=0, atol=1e-5)
            inside += bool((alpha > 0).all() and n > 1)
    assert inside > 20


@pytest.mark.parametrize(
    ("P", "alpha"),
    [
        ([[5.0]], [1.0]),
        ([[1.0, 0.0], [0.0, 3.0]], [0.75, 0.25]),  # as 1/v
        ([[1.0, 2.0], [2.0, 5.0]], [1.0, 0.0]),
        ([[0.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 1.0]], [1.0, 0.0, 0.0]),  # without variance
        ([[0.0] * 3] * 3, [1 / 3] * 3),
        ([[4.0, -2.0, 0.0], [-2.0, 1.0, 0.0], [0.0, 0.0, 9.0]], [1 / 3, 2 / 3, 0.0]),  # a minimum of 0
    ],
)
def test_weights_in_closed_form(P: list[list[float]], alpha: list[float]) -> None:
    expected = torch.tensor(alpha, dtype=torch.float64)
    torch.testing.assert_close(minimum_in_simplex(torch.tensor(P, dtype=torch.float64)), expected, rtol=0, atol=1e-9)


def test_clients_that_are_alike_in_all_have_equal_weights_as_far_as_rounding_tells() -> None:
    alpha = minimum_in_simplex(torch.full((3, 3), 2.0, dtype=torch.float64))
    torch.testing.assert_close(alpha, torch.full((3,), 1 / 3, dtype=torch.float64), rtol=0, atol=1e-3)


def test_many_clients_are_weighed_exactly() -> None:
    """By the conditions of a minimum: the slope is least, and the same, wherever there is weight."""
    generator = torch.Generator().manual_seed(1)
    groups = torch.randn(10, 500, generator=generator, dtype=torch.float64)
    h = groups[torch.arange(120) % 10] + 0.3 * torch.randn(120, 500, generator=generator, dtype=torch.float64)
    P = (h[0] - h) @ (h[0] - h).T + torch.rand(120, generator=generator, dtype=torch.float64).diag()
    alpha = minimum_in_simplex(P)
    slope = P @ alpha
    assert 1 < int((alpha > 0).sum()) < 60
    torch.testing.assert_close(slope[alpha > 0], (alpha @ slope).expand(int((alpha > 0).sum())), rtol=1e-6, atol=1e-6)
    assert slope.min() > (1 - 1e-6) * (alpha @ slope)


def test_clients_with_equal_samples_mix_equally() -> None:
    x, y = digits([40])[0]
    method, log = watched(FedPAC)
    ft.run(method, **EXACT, data=[(x, y)] * 3, model="mlp:6", rounds=2, batch=10)
    heads = [log.up[1, client]["head"] for client in range(3)]
    assert not torch.equal(heads[0], heads[1])  # of other batches
    for client in range(3):
        close(log.down[2, client]["head"], torch.stack(heads).mean(0))


def test_heads_of_clients_with_the_same_classes_are_mixed() -> None:
    x, y = digits([1200])[0]
    data = []
    for i in range(6):
        chosen = ((y < 5) == (i < 3)).nonzero()[:, 0][i % 3 :: 3][:60]
        data.append((x[chosen], y[chosen]))
    result = ft.run("fedpac", data=data, model="mlp:16", rounds=3, engine="in-process", stratify=False)
    group = torch.tensor([int(name) < 3 for name in result.names])
    same = group[:, None] == group
    alpha = result.observed(3)["alpha"]
    torch.testing.assert_close(alpha.sum(1), torch.ones(6, dtype=torch.float64))
    assert (alpha * same).sum(1).min() > 0.9  # measured: 0.96
    assert alpha.diagonal().max() < 0.9


# --- limit cases ---


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_alone_in_each_round_and_without_alignment_it_trains_as_fedrep(more: dict[str, Any]) -> None:
    how = {**SMALL, "participation": 1, "rounds": 8, **more}
    mine = ft.run("fedpac", **how, lam=0.0, head_epochs=3, head_speed=1.0)
    as_here = {"head_epochs": 3, "body_epochs": SMALL["epochs"], "max_lr": 0.1, "refit": False}
    fedrep = ft.run("fedrep", **how, **as_here, released_weights=True)
    assert len({tuple(called) for called in who(mine)}) < 8  # somebody came again
    assert torch.equal(server(mine, "body"), server(fedrep, "body"))
    head = mine.simulation.server.head
    for client in range(5):
        if state(fedrep, client):
            assert torch.equal(state(mine, client)["theta"][head], state(fedrep, client)["head"])


def test_alignment_brings_the_features_of_a_class_together() -> None:
    spread = []
    for lam in (0.0, 1.0, 30.0):
        method, log = watched(FedPAC, lam=lam)
        ft.run(method, **{**SMALL, "rounds": 5, "participation": "all"})
        P = torch.stack([log.up[5, client]["prototypes"] for client in range(5)])
        there = torch.stack([log.up[5, client]["counts"] for client in range(5)]) > 0
        mean = (P * there).sum(0) / there.sum(0).clamp(min=1)
        spread.append(float(((P - mean) * there).square().sum()))
    assert spread[0] > 1.1 * spread[1] > 1.1**2 * spread[2]


def test_a_client_predicts_with_what_it_has_trained_and_a_new_one_with_the_shared_body() -> None:
    result = ft.run("fedpac", **{**SMALL, "new_clients": 1})
    new, side = result.data.n_clients - 1, result.simulation.server
    assert torch.equal(personal(result, new), torch.cat([server(result, "body"), side.initial[side.head]]))
    trained = next(client for client in range(4) if state(result, client))
    assert torch.equal(personal(result, trained), state(result, trained)["theta"])


def test_one_sample_has_no_variance_and_needs_nobodys_head() -> None:
    data = digits([1, 30, 40])
    how: dict[str, Any] = {"data": data, "model": "mlp:8", "rounds": 2, "test": 0.0, "evaluation": {"every": 0}}
    result = ft.run("fedpac", engine="in-process", on_failure="stop", **how)
    alone = int(result.data.n_samples.argmin())
    torch.testing.assert_close(server(result, "alpha")[alone, alone], torch.ones((), dtype=torch.float64))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10), nn.Linear(10, 10))


def test_a_head_without_a_bias_will_do_and_one_that_is_not_linear_will_not() -> None:
    unbiased = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10, bias=False))
    ft.run("fedpac", **{**SMALL, "model": unbiased}, on_failure="stop")
    for settings in ({"head": 0}, {"model": two_layers(), "head": 2}):
        with pytest.raises(ft.FedtailorError, match=r"FedPAC needs a head that is one linear layer, .*: set head=1\.$"):
            ft.run("fedpac", **{**SMALL, **settings})


def test_targets_without_common_classes_are_refused() -> None:
    data = [(x, x.flatten(1)[:, :2]) for x, _ in digits([20, 30])]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with pytest.raises(ft.FedtailorError, match="its targets must be one class label per sample"):
        ft.run("fedpac", data=data, model=model, loss="mse", rounds=1, engine="in-process", on_failure="stop")
    with pytest.raises(ft.FedtailorError, match="FedPAC cannot train with labels own"):
        ft.run("fedpac", data=own_label_clients(), **OWN)


def test_the_search_ends_where_nothing_is_found() -> None:
    """A matrix that is not positive semidefinite, for which the conditions cannot be met."""
    alpha = minimum_in_simplex(torch.tensor([[3.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, -2.0]], dtype=torch.float64))
    assert alpha.min() >= 0
    assert float(alpha.sum()) == pytest.approx(1)
