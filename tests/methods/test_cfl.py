"""CFL against its slow reference, its splits against all possible ones, its limit case, and clients in groups whose
labels mean different things."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.methods.cfl import CFL, bipartition
from tests.helpers import digits
from tests.methods.parts import SMALL, normed, personal, server
from tests.methods.problems import MOMENTUM, Problem, close, on_both, watched, who
from tests.reference.cfl import SlowCFL, completely_linked, cosine, least_similar


@on_both
@pytest.mark.parametrize(
    "parameters",
    [
        {"eps_1": 0.9, "eps_2": 0.5},
        {"eps_1": 0.95, "eps_2": 0.7, "linkage": "complete", "weighting": "equal"},
        {"eps_1": 100.0, "eps_2": 0.0, "relative": False, "gamma": 0.6},
    ],
)
def test_follows_its_formulas(run_on: Callable[..., tuple[ft.RunResult, Problem]], parameters: dict[str, Any]) -> None:
    """Clusters that are split again, and clients that missed it."""
    method, log = watched(CFL, **parameters)
    result, problem = run_on(method, rounds=12, participation=4)
    given = {name: parameters[name] for name in ("eps_1", "eps_2", "gamma", "relative") if name in parameters}
    complete, equal = parameters.get("linkage") == "complete", parameters.get("weighting") == "equal"
    slow = SlowCFL(problem, lr=result.experiment.lr, complete=complete, equal=equal, **given)
    slow.run(who(result))
    for at, start in slow.begun.items():
        if log.down[at]["theta"].dim() == 1:
            close(log.down[at]["theta"], start)
    assert slow.walked
    leaves = {id(slow.leaf(client)) for client in range(6)}
    assert len(leaves) > 1
    for client in range(6):
        close(personal(result, client), slow.leaf(client).model)


@pytest.mark.parametrize("n", [3, 4, 7])
def test_single_linkage_finds_the_split_with_the_least_similarity_across(n: int) -> None:
    """Of all splits; complete linkage, the release's, finds others."""
    others = 0
    for seed in range(60):
        changes = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        S = torch.tensor([[cosine(one, other) for other in changes] for one in changes], dtype=torch.float64)
        found = {}
        for linkage in ("single", "complete"):
            parts = bipartition(S, linkage)
            found[linkage] = set((parts == parts[0]).nonzero()[:, 0].tolist())
        assert found["single"] == least_similar(S.tolist())[0]
        assert found["complete"] == completely_linked(S.tolist())
        others += found["single"] != found["complete"]
    assert others or n == 3


def test_similarities_that_are_all_equal_make_two_parts() -> None:
    assert set(bipartition(torch.ones(5, 5), "single").tolist()) == {0, 1}


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_a_cluster_that_is_never_split_is_fedavg(more: dict[str, Any]) -> None:
    how = {**SMALL, **more, "dtype": "float64"}
    one, average = ft.run("cfl", eps_2=1e9, **how), ft.run("fedavg", **how)
    torch.testing.assert_close(server(one)[0], server(average), rtol=0, atol=1e-9)
    for client in range(5):
        assert torch.equal(personal(one, client), server(one)[0])


@pytest.mark.parametrize("n", [2, 3])
def test_clusters_of_two_are_not_split(n: int) -> None:
    how = {**SMALL, "participation": n, "rounds": 1}
    assert len(server(ft.run("cfl", eps_1=2.0, eps_2=0.0, **how))) == (1 if n == 2 else 3)


def test_parts_that_do_not_point_far_enough_apart_are_not_split() -> None:
    how = {**SMALL, "participation": "all", "rounds": 1}
    assert len(server(ft.run("cfl", eps_1=2.0, eps_2=0.0, gamma=0.1, **how))) == 3
    assert len(server(ft.run("cfl", eps_1=2.0, eps_2=0.0, gamma=0.99, **how))) == 1


def groups(count: int, clients: int, n: int) -> list[tuple[Tensor, Tensor]]:
    """Clients in groups, in each of which the digits have other labels."""
    x, y = digits([count * clients * n])[0]
    generator = torch.Generator().manual_seed(0)
    meaning = [torch.randperm(10, generator=generator) for _ in range(count)]
    pieces = zip(x.split(n), y.split(n), strict=True)
    return [(xs, meaning[number // clients][ys]) for number, (xs, ys) in enumerate(pieces)]


@pytest.mark.parametrize("participation", ["all", 0.8])
def test_groups_whose_labels_mean_different_things_are_found(participation: Any) -> None:
    """Also by clients that were not there when their cluster was split, and one that never took part."""
    how = {"data": groups(2, 5, 80), "rounds": 20, "participation": participation, "engine": "in-process", "seed": 0}
    result = ft.run("cfl", new_clients=1, **how)
    group = [int(name) // 5 for name in result.names]
    models = [personal(result, client) for client in range(10)]
    for i in range(10):
        for j in range(10):
            assert torch.equal(models[i], models[j]) == (group[i] == group[j])
    average = ft.run("fedavg", **how)
    assert result.accuracy is not None
    assert average.accuracy is not None
    assert result.accuracy > average.accuracy + 0.3


def test_one_group_is_not_split() -> None:
    result = ft.run("cfl", data=groups(1, 10, 80), rounds=20, engine="in-process")
    assert len(server(result)) == 1


def test_a_leaf_that_there_is_not_counts_for_nothing() -> None:
    """Whatever a hostile client says, the server goes on."""

    class Astray(CFL):
        def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
            upload = dict(super().train(client, message))
            return {**upload, "leaf": torch.tensor(99)} if client.id == 1 else upload

    found = ft.run(Astray(), **{**SMALL, "participation": "all"})
    assert not any(record.failed for record in found.rounds)
    assert found.server_state["place"].tolist() == [0] * 5
