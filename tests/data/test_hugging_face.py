"""Data sets of Hugging Face's `datasets`, saved to a disk: skipped where that is not installed."""

import json
import shutil
import socket
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


@pytest.fixture
def cached(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the data set someone/pets in two configurations, as a download from the hub leaves it."""
    from datasets.packaged_modules.csv.csv import Csv

    monkeypatch.setattr(hub.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, rows in (("small", 30), ("large", 60)):
        file = tmp_path / f"{name}.csv"
        file.write_text("age,label,site\n" + "".join(f"{k},{'ab'[k % 2]},s{k % 3}\n" for k in range(rows)))
        files = {"train": [str(file)], "test": [str(file)]}
        builder = Csv(dataset_name="pets", config_name=name, hash="0123", data_files=files)
        builder.download_and_prepare()
        there = tmp_path / "cache" / "someone___pets" / name / "0.0.0" / "0123"
        there.parent.mkdir(parents=True)
        Path(builder.cache_dir).rename(there)
        about = json.loads((there / "dataset_info.json").read_text())
        (there / "dataset_info.json").write_text(json.dumps({**about, "config_name": name}))
    return tmp_path / "cache" / "someone___pets"


def test_a_name_is_read_from_the_cache_and_nobody_is_asked(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def ask(*arguments: Any, **_: Any) -> None:
        asked.append(arguments)
        raise OSError("there is no network")

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    monkeypatch.setattr(socket.socket, "connect", ask)
    data = load("hf:someone/pets:large", client_column="site")
    assert (len(data), data.classes, data.client_names) == (120, ("a", "b"), ("s0", "s1", "s2"))
    assert data.part is not None
    assert data.part.tolist() == [0] * 60 + [2] * 60
    with pytest.raises(FedtailorError, match=r"hf:NAME:CONFIGURATION \(ValueError: There are multiple .* small"):
        load("hf:someone/pets")
    shutil.rmtree(cached / "large")
    assert len(load("hf:someone/pets", client_column="site")) == 60
    with pytest.raises(FedtailorError, match="nor in the local cache"):
        load("hf:someone/dogs")
    assert asked == []
