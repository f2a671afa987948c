"""The accuracy of each client's most frequent class: what a table's numbers begin with."""

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.studies.measures import majority_baseline
from fedtailor.studies.summary import summarize

SMALL = {"data": "digits", "clients": 5, "partition": "dirichlet:0.2", "rounds": 2, "max_train": 20}


def by_hand(result: ft.RunResult, clients: list[int], by_samples: bool) -> float:
    """Predict the most frequent training class for every test sample of these clients."""
    right = []
    for client in clients:
        (_, trained), (_, tested) = result.data.train(client), result.data.test(client)
        right.append((tested == torch.bincount(trained).argmax()).double())
    return float(torch.cat(right).mean()) if by_samples else float(np.mean([hits.mean() for hits in right]))


@pytest.mark.parametrize("average", ["client", "sample"])
def test_it_is_that_of_the_most_frequent_training_class(average: str) -> None:
    result = ft.run("local", evaluation={"average": average}, engine="in-process", **SMALL)
    found = majority_baseline(result)
    assert found == pytest.approx(by_hand(result, list(range(5)), average == "sample"), abs=1e-12)
    assert found != pytest.approx(by_hand(result, list(range(5)), average != "sample"), abs=1e-4)


def test_it_is_of_the_clients_that_the_result_is_of() -> None:
    study = {**SMALL, "clients": 6, "engine": "in-process"}
    hostile = ft.run("fedavg", attack="sign-flip, clients=0.34", **study)
    honest = [client for client in range(6) if client not in hostile.hostile]
    assert len(honest) == 4
    assert majority_baseline(hostile) == pytest.approx(by_hand(hostile, honest, by_samples=False), abs=1e-12)
    new = ft.run("fedavg", new_clients=2, evaluation={"clients": "new"}, **study)
    assert majority_baseline(new) == pytest.approx(by_hand(new, sorted(new.data.new), by_samples=False), abs=1e-12)


def test_there_is_none_without_classes_or_with_several_labels() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    for y, loss in ((x.sum(1, keepdims=True), "mse"), ((x > 0).astype(np.int64), "bce")):
        clients = [(x[:30], y[:30]), (x[30:], y[30:])]
        result = ft.run("local", data=clients, loss=loss, lr=0.01, rounds=1, engine="in-process")
        assert majority_baseline(result) is None
        assert "most frequent" not in summarize([result]).caption


def test_a_table_names_it_beside_its_accuracies_alone() -> None:
    runs = [ft.run("local", seed=seed, engine="in-process", **SMALL) for seed in (0, 1)]
    mean = sum(majority_baseline(run) or 0 for run in runs) / 2
    said = f"Predicting each client's most frequent training class: {100 * mean:.1f} %."
    assert said in summarize(runs).caption
    auc = ft.run("local", evaluation={"metric": "auc"}, engine="in-process", **SMALL)
    assert "most frequent" not in summarize([auc]).caption
