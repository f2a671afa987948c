"""pFedGraph against its slow reference, the conditions of its optimum, its limit cases, and who collaborates."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.method import Server
from fedtailor.methods.pfedgraph import PFedGraph, cosine_gradient, onto_simplex
from fedtailor.server.aggregation import Aggregator
from fedtailor.training.layout import Layout
from tests.helpers import digits
from tests.methods.parts import SMALL, absent, normed, personal, server
from tests.methods.problems import MOMENTUM, Problem, close, on_both, watched, who
from tests.reference.pfedgraph import SlowPFedGraph


@on_both
@pytest.mark.parametrize(("alpha", "lam"), [(0.8, 0.5), (0.2, -0.5), (3.0, 0.0)])
def test_follows_its_formulas(run_on: Callable[..., tuple[ft.RunResult, Problem]], alpha: float, lam: float) -> None:
    """Towards the mix and away from it, with clients that come late or never."""
    method, log = watched(PFedGraph, alpha=alpha, lam=lam)
    result, problem = run_on(method)
    slow = SlowPFedGraph(problem, alpha, lam, result.experiment.lr)
    slow.run(who(result))
    for at, start in slow.begun.items():
        close(log.down[at]["theta"], start)
    assert 0 < len(absent(result)) < 4
    close(server(result), slow.mean())
    weights = result.observed(len(result.rounds))["weights"]
    for client in range(6):
        expected = torch.zeros(6, dtype=torch.float64)
        for j, weight in slow.weights(client).items():
            expected[j] = weight
        close(weights[client], expected)
        close(personal(result, client), slow.models.get(client, slow.mean()))


@pytest.mark.parametrize("alpha", [0.05, 0.8, 20.0])
def test_the_weights_are_the_optimum_of_its_quadratic_program(alpha: float) -> None:
    """The conditions of Karush, Kuhn and Tucker, which are sufficient: on the simplex, the slope of
    −⟨a, s⟩ + α‖a − p‖² is the same for all that count and no smaller for those that don't."""
    generator = torch.Generator().manual_seed(0)
    s = 2 * torch.rand(200, 9, generator=generator, dtype=torch.float64) - 1
    p = torch.rand(9, generator=generator, dtype=torch.float64)
    p = p / p.sum()
    a = onto_simplex(p + s / (2 * alpha))
    assert (a >= 0).all()
    torch.testing.assert_close(a.sum(1), torch.ones(200, dtype=torch.float64))
    slope = -s + 2 * alpha * (a - p)
    level = slope.where(a > 0, -torch.inf).max(1, keepdim=True).values
    torch.testing.assert_close(slope.where(a > 0, level), level.expand_as(slope))
    assert (slope >= level - 1e-9).all()


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_a_large_alpha_is_fedavg_where_all_take_part(more: dict[str, Any]) -> None:
    how = {**SMALL, **more, "participation": "all", "dtype": "float64"}
    mixed, average = ft.run("pfedgraph", alpha=1e9, lam=0.0, **how), ft.run("fedavg", **how)
    torch.testing.assert_close(server(mixed), server(average), rtol=0, atol=1e-7)


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_a_small_alpha_is_local_where_all_take_part(more: dict[str, Any]) -> None:
    how = {**SMALL, **more, "participation": "all", "dtype": "float64"}
    alone, local = ft.run("pfedgraph", alpha=1e-6, lam=0.0, **how), ft.run("local", **how)
    for client in range(5):
        torch.testing.assert_close(personal(alone, client), personal(local, client), rtol=0, atol=1e-7)


def test_the_pull_is_the_gradient_of_the_cosine() -> None:
    theta, mix = torch.randn(2, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaf = theta.clone().requires_grad_()
    torch.cosine_similarity(leaf, mix, dim=0).backward()
    assert leaf.grad is not None
    close(cosine_gradient(theta, mix), leaf.grad)
    assert not cosine_gradient(torch.zeros(3), torch.zeros(3)).any()


@pytest.mark.parametrize(("lam", "nearer"), [(20.0, True), (-20.0, False)])
def test_the_pull_keeps_to_the_mix_or_as_released_turns_away_from_it(lam: float, nearer: bool) -> None:
    def kept(lam: float) -> Tensor:
        """The cosines between the models with which the last round began and ended."""
        method, log = watched(PFedGraph, lam=lam)
        ft.run(method, **SMALL)
        ends = {at: upload["theta"] for at, upload in log.up.items() if at[0] == 3}
        return torch.stack([torch.cosine_similarity(log.down[at]["theta"], end, dim=0) for at, end in ends.items()])

    assert ((kept(lam) > kept(0.0)) == nearer).all()


def test_buffers_have_no_part_in_similarities_and_in_the_pull() -> None:
    layout = Layout(4, slice(0, 3), slice(3, 4), buffers=(slice(2, 3),))
    side = Server(torch.zeros(4), layout, torch.tensor([1, 1]), 2.0, round=1)
    method = PFedGraph()
    method.start(side)
    total = Aggregator(method.uploads, [0, 1], side.n_samples, layout)
    total.put(0, {"theta": torch.tensor([1.0, 0.0, 50.0, 0.0])})
    total.put(1, {"theta": torch.tensor([0.0, 1.0, 50.0, 0.0])})
    method.receive(side, total.total())
    assert torch.equal(side.state["S"], torch.eye(2, dtype=torch.float64))


def test_clients_with_the_same_classes_collaborate() -> None:
    x, y = digits([1200])[0]
    data = []
    for i in range(6):
        chosen = ((y < 5) == (i < 3)).nonzero()[:, 0][i % 3 :: 3][:60]
        data.append((x[chosen], y[chosen]))
    result = ft.run("pfedgraph", data=data, model="mlp:16", rounds=4, engine="in-process", stratify=False)
    group = torch.tensor([int(name) < 3 for name in result.names])
    same = group[:, None] == group
    weights = result.observed(4)["weights"]
    assert weights[same].min() > weights[~same].max()


def test_whoever_comes_later_begins_with_the_mean_of_those_who_were_there() -> None:
    """It is like nobody yet, and its weights are p."""
    layout = Layout(3, slice(0, 2), slice(2, 3))
    side = Server(torch.zeros(3), layout, torch.tensor([30, 10, 20]), 3.0, round=1, participants=[0, 1])
    method = PFedGraph()
    method.start(side)
    assert torch.equal(method.send_all(side)[0]["theta"], side.initial)
    total = Aggregator(method.uploads, [0, 1], side.n_samples, layout)
    total.put(0, {"theta": torch.tensor([1.0, 0.0, 0.0])})
    total.put(1, {"theta": torch.tensor([0.0, 1.0, 0.0])})
    method.receive(side, total.total())
    side.participants = [2]
    torch.testing.assert_close(method.send_all(side)[2]["theta"], torch.tensor([0.75, 0.25, 0.0]))


def test_a_new_client_predicts_with_the_mean_of_all_models() -> None:
    method, log = watched(PFedGraph)
    result = ft.run(method, **{**SMALL, "new_clients": 1, "participation": "all", "rounds": 2})
    n = result.simulation.server.n_samples
    models = torch.stack([log.up[2, client]["theta"] for client in range(4)])
    torch.testing.assert_close(personal(result, 4), (n / n.sum()) @ models)
