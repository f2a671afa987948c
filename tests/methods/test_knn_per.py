"""kNN-Per against its slow reference, its limit cases, its choice of λ, and its errors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.methods.knn_per import KNNPer
from tests.helpers import digits
from tests.methods.parts import SMALL, close, normed, server
from tests.methods.problems import BODY, MOMENTUM, OWN, features, own_label_clients
from tests.reference.knn_per import best_share, prediction

EXACT: dict[str, Any] = {"dtype": "float64", "engine": "in-process", "model": "mlp:6", "rounds": 3, "seed": 29}


def softmax(theta: Tensor, z: Tensor) -> Tensor:
    return (z @ theta[BODY : BODY + 60].view(10, 6).T + theta[BODY + 60 :]).softmax(1)


@pytest.mark.parametrize("lam", [0.3, 1.0, None])
def test_follows_its_formulas(lam: float | None) -> None:
    """Predictions of all clients, and the λ that validation samples choose: not the same for all."""
    data, method = [(x.double(), y) for x, y in digits([60, 12, 45, 80])], KNNPer(k=3, scale=0.02, lam=lam)
    run = ft.run(method, data=data, validation=0.3, **EXACT).simulation
    theta, chosen = run.server.state["theta"], set()
    for i in range(4):
        of = run.data.client(i)
        known, labels = features(of.train[0], theta).tolist(), of.train[1].tolist()
        z, probabilities = features(of.validation[0], theta), softmax(theta, features(of.validation[0], theta))
        samples = list(zip(z.tolist(), probabilities.tolist(), of.validation[1].tolist(), strict=True))
        share = best_share(samples, known, labels, 3, 0.02) if lam is None else lam
        chosen.add(share)
        x = of.test[0]
        for row, own, found in zip(
            features(x, theta), softmax(theta, features(x, theta)), run.predict(i, x), strict=True
        ):
            expected = prediction(row.tolist(), own.tolist(), known, labels, 3, 0.02, share)
            close(found.exp(), torch.tensor(expected, dtype=torch.float64))
    assert len(chosen) == 1 if lam else len(chosen) > 2


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_it_trains_as_fedavg_and_without_its_memory_predicts_as_fedavg(more: dict[str, Any]) -> None:
    mine, average = ft.run("knn-per", **{**SMALL, **more}, lam=0.0), ft.run("fedavg", **{**SMALL, **more})
    assert torch.equal(server(mine), server(average))
    for client in range(5):
        assert mine.per_client[client].accuracy == average.per_client[client].accuracy
        assert mine.per_client[client].loss == pytest.approx(average.per_client[client].loss, rel=1e-4)
    with_memory = ft.run("knn-per", **{**SMALL, **more})
    assert torch.equal(server(with_memory), server(average))
    assert [c.loss for c in with_memory.per_client.values()] != [c.loss for c in mine.per_client.values()]


def test_with_one_neighbour_and_the_memory_alone_it_is_the_nearest_neighbour() -> None:
    run = ft.run("knn-per", **SMALL, lam=1.0, k=1).simulation
    for i in range(5):
        of, client = run.data.client(i), run.sites.site(i).client(0, {})
        theta = run.server.state["theta"]
        z, known = client.flat_features(theta, of.test[0]), client.flat_features(theta)
        nearest = of.train[1][torch.cdist(z, known).argmin(1)]
        assert torch.equal(run.predict(i, of.test[0]).argmax(1), nearest)
        assert (run.predict(i, of.train[0]).argmax(1) == of.train[1]).all()


def test_more_neighbours_than_samples_and_no_validation_samples() -> None:
    how = {"data": digits([3, 2, 40]), "model": "mlp:8", "rounds": 2, "engine": "in-process", "on_failure": "stop"}
    result = ft.run("knn-per", **how, validation=0.0, k=100)
    half = ft.run("knn-per", **how, validation=0.0, k=100, lam=0.5)
    assert [c.loss for c in result.per_client.values()] == [c.loss for c in half.per_client.values()]
    x = digits([30])[0][0]
    assert result.simulation.predict(0, x).isfinite().all()


def test_predictions_do_not_depend_on_how_many_are_looked_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ft.run("knn-per", **SMALL).simulation
    x = digits([50])[0][0]
    whole = run.predict(2, x)
    monkeypatch.setattr("fedtailor.methods.knn_per.AT_ONCE", 7)
    assert torch.allclose(run.predict(2, x), whole, atol=1e-5)


def test_a_network_without_a_cut_is_refused_before_the_first_round() -> None:
    with pytest.raises(ft.FedtailorError, match="kNN-Per needs a network that can be cut"):
        ft.run("knn-per", **{**SMALL, "head": 0})


def test_targets_that_are_no_classes_are_refused() -> None:
    data = [(x, x.flatten(1)[:, :2]) for x, _ in digits([20, 30])]
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 2))
    with pytest.raises(ft.FedtailorError, match="its targets must be one class label per sample"):
        ft.run("knn-per", data=data, model=module, loss="mse", rounds=2, engine="in-process", on_failure="stop")


def test_labels_that_every_client_numbers_for_itself_are_predicted_within_its_own() -> None:
    result = ft.run("knn-per", data=own_label_clients(), **OWN)
    assert all(client.accuracy is not None for client in result.per_client.values())
