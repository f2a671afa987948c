"""Samples with several labels of 0 and 1: how they are read, partitioned and counted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.data import Dataset, load

Y = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 1], [1, 0, 0]])
X = np.arange(12.0).reshape(6, 2)


def test_an_npz_file_with_several_columns_of_0_and_1(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=X, y=Y, client=np.array(["a", "a", "a", "b", "b", "b"]))
    data = load(str(tmp_path / "own.npz"))
    assert data.targets == "labels"
    assert data.y.dtype == torch.float32
    assert data.y.tolist() == Y.tolist()
    assert data.classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("y", "targets"),
    [
        (Y, "labels"),
        (Y.astype(bool), "labels"),
        (Y.astype(float), "numbers"),  # floating-point numbers are a regression
        (Y[:, 0], "classes"),
    ],
)
def test_a_list_of_clients(y: Any, targets: str) -> None:
    data = ft.federate(ft.data.from_list([(X, y), (X, y)]), partition="natural", validation=0)
    assert data.targets == targets


def test_one_column_is_one_class_each(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=X, y=Y[:, :1])
    assert load(str(tmp_path / "own.npz")).targets == "classes"


def test_labels_are_counted_one_by_one_and_samples_too() -> None:
    data = ft.federate(ft.data.from_list([(X, Y), (X[:3], Y[:3])]), partition="natural", test=0, validation=0)
    assert data.counts("train").tolist() == [[3, 2, 4], [1, 1, 2]]
    assert data.n_samples.tolist() == [6, 3]
    assert data.n_outputs == 3


@pytest.mark.parametrize("partition", ["dirichlet:0.3", "classes:2", "pairs", "dirichlet-plain:1", "natural+classes:1"])
def test_partitions_by_class_are_refused(partition: str) -> None:
    dataset = ft.data.from_list([(X, Y), (X, Y)])
    with pytest.raises(ft.FedtailorError, match="draws by class, but these samples have several labels: use iid"):
        ft.federate(dataset, partition=partition, clients=2, min_samples=1)


@pytest.mark.parametrize("partition", ["iid", "quantity:5", "natural", "natural+iid"])
def test_others_are_not(partition: str) -> None:
    dataset = ft.data.from_list([(X, Y), (X, Y)])
    data = ft.federate(dataset, partition=partition, clients=2, min_samples=2, seed=1)
    assert data.counts().sum(0).tolist() == (2 * Y.sum(0)).tolist()


def test_labels_of_their_own_need_classes() -> None:
    with pytest.raises(ft.FedtailorError, match="need classes: these targets are several labels a sample"):
        ft.federate(ft.data.from_list([(X, Y), (X, Y)]), partition="natural", labels="own")


@pytest.mark.parametrize("y", [torch.full((3, 2), 0.5), torch.zeros(3, 3)])
def test_a_data_set_needs_a_0_or_1_for_each_class(y: torch.Tensor) -> None:
    with pytest.raises(ft.FedtailorError, match="for 2 classes: give a 0 or 1 for each class and sample"):
        Dataset("own", torch.zeros(3, 4), y, ("a", "b"))


def test_cross_entropy_is_refused_with_a_hint() -> None:
    with pytest.raises(ft.FedtailorError, match="these samples have several labels: take --loss bce"):
        ft.run("fedavg", data=[(X, Y), (X, Y)], rounds=1)
