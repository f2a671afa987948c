"""IFCA against its slow reference, its limit cases, and clients that fall into two groups."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.method import Server
from fedtailor.methods.ifca import IFCA
from fedtailor.server.aggregation import Aggregator
from fedtailor.training.layout import Layout
from tests.helpers import Quadratic, digits, final, mean_output, quadratic_clients
from tests.methods.problems import EXACT, MOMENTUM, SMALL, close, watched, who
from tests.reference.ifca import ifca, nearest


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
    server, samples = result.simulation.server, [1 + i % 3 for i in range(6)]

    def risk(i: int, theta: Tensor) -> float:
        return 0.5 * float((theta - centres[i]) @ curvatures[i] @ (theta - centres[i]))

    def slope(i: int, theta: Tensor) -> Tensor:
        return curvatures[i] @ (theta - centres[i])

    models, before = [server.initial_for(j).clone() for j in range(3)], [-1] * 6
    empty, moved = 0, 0
    slow_rounds = ifca(risk, slope, who(result), samples, models, lr=0.2, steps=2, momentum=momentum)
    for number, slow in enumerate(slow_rounds, 1):
        close(log.server[number]["theta"], torch.stack(slow.models))
        assert log.server[number]["cluster"].tolist() == slow.chosen
        assert result.observed(number)["cluster"].tolist() == slow.chosen
        empty += sum(not members for members in slow.members)
        moved += sum(old not in (-1, new) for old, new in zip(before, slow.chosen, strict=True))
        before = slow.chosen
    assert empty
    assert moved
    assert len(set(slow.chosen)) > 1
    for i in range(6):
        expected = server.state["theta"][nearest(lambda theta, i=i: risk(i, theta), slow.models)]
        assert torch.equal(result.personal_vector(i), expected)


@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_one_cluster_is_fedavg(more: dict[str, Any]) -> None:
    ours, average = ft.run("ifca", clusters=1, **SMALL, **more), ft.run("fedavg", **SMALL, **more)
    assert torch.equal(final(ours)["server/theta"][0], final(average)["server/theta"])
    assert [record.loss for record in ours.rounds] == [record.loss for record in average.rounds]
    for client in range(6):
        state = ours.client_state(client)
        for name, tensor in average.client_state(client).items():
            assert torch.equal(state[name.replace("theta", "cluster-0")], tensor)


def test_where_all_choose_one_cluster_it_is_fedavg_on_that_model_and_the_others_stay() -> None:
    ours, average = on_quadratics(IFCA(clusters=3), FarAway(4)), on_quadratics("fedavg", FarAway(4))
    theta = final(ours)["server/theta"]
    assert torch.equal(theta[0], final(average)["server/theta"])
    assert (theta[1:] == 1000).all()


def test_a_cluster_is_the_mean_of_its_members_by_samples_and_one_without_members_stays() -> None:
    """Of six clients 0, 1, 3, 4 and 5 are called; 0, 3 and 5 choose the first of three clusters, 1 the last one, and 4
    fails."""
    samples, called, choice = [3, 2, 9, 4, 7, 1], [0, 1, 3, 4, 5], {0: 0, 1: 2, 3: 0, 5: 0}
    generator = torch.Generator().manual_seed(0)
    theta = {i: torch.randn(4, generator=generator, dtype=torch.float64) for i in called}
    before = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    method, layout = IFCA(clusters=3), Layout(4, slice(0, 3), slice(3, 4))
    server = Server(before[0], layout, torch.tensor(samples), 5.0)
    server.state = {"theta": before.clone(), "cluster": torch.tensor([1, 1, 1, -1, 0, -1])}
    uploads = Aggregator(method.uploads, called, server.n_samples, layout)
    for i in called:
        member = torch.tensor([[float(samples[i]) * (choice.get(i) == j)] for j in range(3)], dtype=torch.float64)
        upload = {"theta": theta[i], "member": member, "cluster": torch.tensor(choice.get(i, 0))}
        uploads.put(i, upload if i in choice else None)
    total = uploads.total()
    method.receive(server, total)
    close(total.weight("theta"), torch.tensor([[8.0], [0.0], [2.0]], dtype=torch.float64))
    close(server.state["theta"][0], (3 * theta[0] + 4 * theta[3] + 1 * theta[5]) / 8)
    assert torch.equal(server.state["theta"][1], before[1])
    close(server.state["theta"][2], theta[1])
    assert server.state["cluster"].tolist() == [0, 2, 1, 0, 0, 0]


def test_a_client_weighs_its_model_by_its_samples_in_its_own_cluster_alone() -> None:
    method, log = watched(IFCA, clusters=3)
    on_quadratics(method, Random(4))
    assert len({int(upload["cluster"]) for upload in log.up.values()}) > 1
    for (_, client), upload in log.up.items():
        expected = torch.zeros(3, 1, dtype=torch.float64)
        expected[int(upload["cluster"])] = 1 + client % 3
        assert torch.equal(upload["member"], expected)


def in_two_groups(seed: int, **settings: Any) -> tuple[ft.RunResult, list[bool]]:
    """Digits at 8 clients, 4 of which call each digit y by the name 9 − y; and which ones do. Not every start and split
    separates them."""
    data = [(x, y if i < 4 else 9 - y) for i, (x, y) in enumerate(digits([60] * 8, seed))]
    how = {"model": "mlp:32", "rounds": 10, "epochs": 2, "lr": 0.2, "engine": "in-process", "seed": seed, **settings}
    how["stratify"] = False
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
    run = result.simulation
    models = run.server.state["theta"]
    of_group = {turned[c]: int(run.server.state["cluster"][c]) for c in range(6)}
    assert len(set(of_group.values())) == 2
    for client in run.data.new:
        assert run.state_of(client) == {}
        assert torch.equal(run.personal_model(client), models[of_group[turned[client]]])


def test_the_cluster_is_chosen_by_the_models_that_came_and_the_training_samples() -> None:
    """A choice after training, or by a test or validation loss, would be another method."""
    method, log = watched(IFCA, clusters=3)
    result = ft.run(method, **SMALL)
    run = result.simulation
    for (number, client), reply in log.up.items():
        x, y = run.data.client(client).train
        losses = []
        for theta in log.down[number, client]["theta"]:
            w, b, v, c = theta.split([16 * 64, 16, 160, 10])
            hidden = (x.flatten(1) @ w.view(16, 64).T + b).relu()
            losses.append(torch.nn.functional.cross_entropy(hidden @ v.view(10, 16).T + c, y).item())
        assert reply["cluster"].item() == losses.index(min(losses))


def test_right_after_its_work_a_client_predicts_with_what_it_trained() -> None:
    """In round 1 that is what Local has, as both begin with the first vector."""
    how = {**SMALL, "rounds": 1, "participation": "all", "evaluation": {"model": "local"}}
    assert ft.run("ifca", clusters=1, **how).per_client == ft.run("local", **how).per_client


def test_clusters_that_begin_equal_are_refused() -> None:
    with pytest.raises(ft.FedtailorError, match="begin equal"):
        on_quadratics(IFCA(clusters=2), Quadratic(4))
