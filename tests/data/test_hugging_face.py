"""Data sets of Hugging Face's `datasets`, saved to a disk: skipped where that is not installed."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtailor._common.errors import FedtailorError
from fedtailor.data import federate, load
from fedtailor.data.sources import names_code


@pytest.fixture
def hub() -> Any:
    return pytest.importorskip("datasets")


def test_a_name_of_the_hub_is_no_code_and_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not names_code("hf:mnist")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FedtailorError, match=r"need the package datasets: pip install .*huggingface"):
        load("hf:mnist")


def images(hub: Any, n: int, first: int = 0) -> Any:
    pixels = np.arange(first, first + n, dtype=np.uint8)[:, None, None] + np.zeros((1, 6, 6), np.uint8)
    features = hub.Features(
        {"image": hub.Image(), "label": hub.ClassLabel(names=["cat", "dog"]), "scanner": hub.Value("string")}
    )
    columns = {
        "image": [hub.Image().encode_example(array) for array in pixels],
        "label": [k % 2 for k in range(n)],
        "scanner": ["ab"[k % 3 == 0] for k in range(n)],
    }
    return hub.Dataset.from_dict(columns, features=features)


def test_images_with_their_labels_clients_and_split(hub: Any, tmp_path: Path) -> None:
    hub.DatasetDict({"train": images(hub, 20), "test": images(hub, 10, 20)}).save_to_disk(str(tmp_path / "pets"))
    data = load(f"hf:{tmp_path / 'pets'}", client_column="scanner")
    assert data.cells.shape == (30, 1, 6, 6)
    assert data.cells[:, 0, 0, 0].tolist() == list(range(30))
    assert [data.classes[label] for label in data.y.tolist()] == ["cat", "dog"] * 15
    assert data.client_names == ("a", "b")
    assert data.part is not None
    assert data.part.tolist() == [0] * 20 + [2] * 10
    clients = federate(data, partition="natural+brightness:0..0.5", split="official")
    assert [len(clients.test(client)[1]) for client in range(2)] == [6, 4]
    with pytest.raises(FedtailorError, match="has no column 'ward': it has image, label, scanner"):
        load(f"hf:{tmp_path / 'pets'}", client_column="ward")


def test_a_table_has_the_columns_of_any_table(hub: Any, tmp_path: Path) -> None:
    columns = {
        "age": [20.0 + k % 9 for k in range(40)],
        "ward": ["icu", "er"] * 20,
        "site": [f"s{k // 10}" for k in range(40)],
        "ill": [k % 2 for k in range(40)],
    }
    features = hub.Features(
        {
            "age": hub.Value("float64"), "ward": hub.Value("string"), "site": hub.Value("string"),
            "ill": hub.ClassLabel(names=["no", "yes"]),
        }
    )  # fmt: skip
    hub.Dataset.from_dict(columns, features=features).save_to_disk(str(tmp_path / "wards"))
    data = load(f"hf:{tmp_path / 'wards'}", label_column="ill", client_column="site")
    assert data.classes == ("no", "yes")
    assert [column.kind for column in data.columns] == ["number", "category"]
    assert data.cells[:, 0].tolist() == columns["age"]
    assert torch.equal(federate(data, partition="natural").n_samples, torch.tensor([7] * 4))


def test_what_is_not_there_or_has_lists_is_refused(hub: Any, tmp_path: Path) -> None:
    with pytest.raises(FedtailorError, match="is neither a folder of save_to_disk nor in the local cache"):
        load(f"hf:{tmp_path / 'nothing'}")
    hub.Dataset.from_dict({"x": [[1.0, 2.0]] * 4, "label": [0, 1] * 2}).save_to_disk(str(tmp_path / "lists"))
    with pytest.raises(FedtailorError, match="has lists in the column 'x'"):
        load(f"hf:{tmp_path / 'lists'}")
