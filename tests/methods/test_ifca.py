"""IFCA against a second, slow implementation, its limit cases, and clients that fall into two groups."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.methods.ifca import IFCA
from tests.helpers import Quadratic, digits, final, mean_output, quadratic_clients
from tests.methods.test_pgfed import EXACT, MOMENTUM, SMALL, close, watched, who


class Random(Quadratic):
    """A quadratic model that begins anywhere."""

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.theta)


class FarAway(Quadratic):
    """A quadratic model whose other beginnings are of no use to anybody."""

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.theta, 1000.0)


def on_quadratics(method: str | ft.Method, model: torch.nn.Module, **settings: Any) -> ft.RunResult:
    """6 clients with 1 to 3 samples, 3 of which take part in a round."""
    data, _, _ = quadratic_clients(6, 4, seed=2)
    data = [(x.repeat(1 + i % 3, 1), y.repeat(1 + i % 3)) for i, (x, y) in enumerate(data)]
    how = {"rounds": 8, "participation": 3, "steps": 2, "batch": "full", "lr": 0.2, "seed": 3, **EXACT, **settings}
    return ft.run(method, data=data, model=model, loss=mean_output, **how)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_a_slow_version_comes_to_the_same_vectors(momentum: float) -> None:
    """Algorithm 1, Option II, by hand; where momentum is kept, each cluster's model has its own at each client."""
    method, log = watched(IFCA, clusters=3)
    result = on_quadratics(method, Random(4), momentum=momentum, keep_momentum=momentum > 0)
    _, centres, curvatures = quadratic_clients(6, 4, seed=2)
    run = result._federation
    models = [run.server.another_initial(j).clone() for j in range(3)]
    known, speeds, empty, moved = [-1] * 6, {}, 0, 0

    def risk(i: int, theta: Tensor) -> float:
        away = theta - centres[i]
        return 0.5 * float(away @ curvatures[i] @ away)

    for number, participants in enumerate(who(result), 1):
        ends: dict[int, list[tuple[int, Tensor]]] = {0: [], 1: [], 2: []}
        for i in participants:
            losses = [risk(i, theta) for theta in models]
            choice = losses.index(min(losses))
            theta, speed = models[choice].clone(), speeds.get((i, choice), torch.zeros(4, dtype=torch.float64))
            for _ in range(2):
                speed = momentum * speed + curvatures[i] @ (theta - centres[i])
                theta = theta - 0.2 * speed
            moved += known[i] not in (-1, choice)
            speeds[i, choice], known[i] = speed, choice
            ends[choice].append((1 + i % 3, theta))
        for j, members in ends.items():
            empty += not members
            if members:
                models[j] = sum(n * theta for n, theta in members) / sum(n for n, _ in members)
        close(log.server[number]["theta"], torch.stack(models))
        assert log.server[number]["cluster"].tolist() == known
        assert result.observed(number)["cluster"].tolist() == known
    assert empty
    assert moved
    assert len(set(known)) > 1
    for i in range(6):
        assert torch.equal(run.personal(i), run.server.state["theta"][min(range(3), key=lambda j: risk(i, models[j]))])


@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_one_cluster_is_fedavg(more: dict[str, Any]) -> None:
    ours, average = ft.run("ifca", clusters=1, **SMALL, **more), ft.run("fedavg", **SMALL, **more)
    assert torch.equal(final(ours)["server/theta"][0], final(average)["server/theta"])
    assert [record["loss"] for record in ours.rounds] == [record["loss"] for record in average.rounds]
    for client in range(6):
        state = ours._federation.states.get(f"client-{client}")
        for name, tensor in average._federation.states.get(f"client-{client}").items():
            assert torch.equal(state[name.replace("theta", "cluster-0")], tensor)


def test_where_all_choose_one_cluster_it_is_fedavg_on_that_model_and_the_others_stay() -> None:
    ours, average = on_quadratics(IFCA(clusters=3), FarAway(4)), on_quadratics("fedavg", FarAway(4))
    theta = final(ours)["server/theta"]
    assert torch.equal(theta[0], final(average)["server/theta"])
    assert (theta[1:] == 1000).all()


def in_two_groups(seed: int, **settings: Any) -> tuple[ft.RunResult, list[bool]]:
    """Digits at 8 clients, 4 of which call each digit y by the name 9 − y; and which ones do."""
    data = [(x, y if i < 4 else 9 - y) for i, (x, y) in enumerate(digits([60] * 8, seed))]
    how = {"model": "mlp:32", "rounds": 10, "epochs": 2, "lr": 0.2, "engine": "in-process", "seed": seed, **settings}
    result = ft.run(IFCA(clusters=2), data=data, evaluation=how.pop("evaluation", {"every": 10}), **how)
    return result, [int(name) >= 4 for name in result.names]


@pytest.mark.parametrize("seed", [0, 3])
def test_clients_with_permuted_labels_are_separated(seed: int) -> None:
    result, turned = in_two_groups(seed)
    found = result.observed(10)["cluster"]
    first, other = found[[not t for t in turned]].unique(), found[turned].unique()
    assert len(first) == len(other) == 1
    assert first != other
    assert result.accuracy is not None
    assert result.accuracy > 0.7  # one model for both groups cannot do much better than 0.5


def test_new_clients_get_the_model_of_their_group() -> None:
    result, turned = in_two_groups(3, new_clients=2, evaluation={"clients": "new", "every": 10})
    run = result._federation
    models = run.server.state["theta"]
    of_group = {turned[c]: int(run.server.state["cluster"][c]) for c in range(6)}
    assert len(set(of_group.values())) == 2
    for client in run.data.new:
        assert run.states.get(f"client-{client}") == {}
        assert torch.equal(run.personal(client), models[of_group[turned[client]]])


def test_the_cluster_is_chosen_by_the_models_that_came_and_the_training_samples() -> None:
    """A choice after training, or by a test or validation loss, would be another method."""
    method, log = watched(IFCA, clusters=3)
    result = ft.run(method, **SMALL)
    run = result._federation
    for (number, client), reply in log.up.items():
        x, y = run.data.train(client)
        losses = []
        for theta in log.down[number, client]["theta"]:
            w, b, v, c = theta.split([16 * 64, 16, 160, 10])
            hidden = (x.flatten(1) @ w.view(16, 64).T + b).relu()
            losses.append(torch.nn.functional.cross_entropy(hidden @ v.view(10, 16).T + c, y).item())
        assert reply["cluster"].item() == losses.index(min(losses))


def test_all_models_go_down_and_one_comes_up_with_its_number() -> None:
    record = ft.run("ifca", clusters=3, **SMALL).rounds[-1]
    size = 64 * 16 + 16 + 16 * 10 + 10
    assert record["bytes_down"] == 3 * 3 * 4 * size
    assert record["bytes_up"] == 3 * (4 * size + 8)


def test_right_after_its_work_a_client_predicts_with_what_it_trained() -> None:
    """In round 1 that is what Local has, as both begin with the first vector."""
    how = {**SMALL, "rounds": 1, "participation": "all", "evaluation": {"model": "local"}}
    assert ft.run("ifca", clusters=1, **how).per_client == ft.run("local", **how).per_client


def test_clusters_that_begin_equal_are_refused() -> None:
    with pytest.raises(ft.FedtailorError, match="begin equal"):
        on_quadratics(IFCA(clusters=2), Quadratic(4))
