import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedtailor._common.errors import FedtailorError
from fedtailor.data import Dataset, catalogue, data_dir, found, load, partitions_catalogue

from .files import cifar_contents, write_files, write_mnist


def test_digits_are_scaled_to_one() -> None:
    data = load("digits")
    assert data.x.shape == (1797, 1, 8, 8)
    assert (data.x.min(), data.x.max(), data.x.dtype) == (0, 1, torch.float32)
    assert data.y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_are_those_of_scikit_learn() -> None:
    theirs, data = load_digits(), load("digits")
    assert torch.equal(data.x, torch.from_numpy(theirs.images).float()[:, None] / 16)
    assert torch.equal(data.y, torch.from_numpy(theirs.target))
    assert (data.x.is_contiguous(), data.y.dtype) == (True, torch.int64)


def test_synthetic_is_the_same_each_time_and_named_by_its_parameters() -> None:
    data = load("synthetic")
    assert torch.equal(data.x, load("synthetic:0.5:0.5").x)
    assert data.x.shape[1] == 60
    assert len(data.client_names) == 30
    assert data.client is not None
    assert int(data.client.bincount().min()) >= 50


def test_synthetic_parameters_say_how_much_clients_differ() -> None:
    def spread(name: str) -> float:
        data = load(name)
        assert data.client is not None
        means = torch.stack([data.x[data.client == client].mean() for client in range(30)])
        return float(means.std())

    assert spread("synthetic:0:2") > 3 * spread("synthetic:0:0")


@pytest.mark.parametrize("variant", ["1", "a:b", "-1:0", "nan:1", "1:2:3"])
def test_synthetic_refuses_other_parameters(variant: str) -> None:
    with pytest.raises(FedtailorError, match="needs two numbers"):
        load(f"synthetic:{variant}")


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(FedtailorError, match="There is no data set 'mnits': did you mean 'mnist'"):
        load("mnits")
    with pytest.raises(FedtailorError, match=r"There is no data set 'synthetik:0\.5:0\.5': did you mean 'synthetic'"):
        load("synthetik:0.5:0.5")


@pytest.mark.parametrize("name", ["own.csv", "some/where", "./x.npz"])
def test_paths_that_are_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(FedtailorError, match="There is no file"):
        load(name, tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("hello")
    with pytest.raises(FedtailorError, match=r"is neither \.npz, \.csv"):
        load(str(tmp_path / "own.txt"))


def test_options_and_variants_that_do_not_belong_are_refused() -> None:
    with pytest.raises(FedtailorError, match="are for CSV files"):
        load("digits", label_column="label")
    with pytest.raises(FedtailorError, match="is for folders of images"):
        load("digits", image_size=3)
    with pytest.raises(FedtailorError, match="has no variants: write 'digits'"):
        load("digits:3")


def test_the_directory_is_the_argument_else_the_variable_else_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDTAILOR_DATA", str(tmp_path))
    assert data_dir() == tmp_path
    assert data_dir("here") == Path("here")
    write_mnist(tmp_path / "mnist")
    np.savez(tmp_path / "own.npz", x=np.zeros((2, 2)), y=np.arange(2))
    assert len(load("mnist")) == 18
    assert len(load("own.npz")) == 2
    monkeypatch.delenv("FEDTAILOR_DATA")
    assert data_dir() == Path("data")


def test_catalogue_says_what_is_there(tmp_path: Path) -> None:
    infos = {info.name: info for info in catalogue()}
    assert {"mnist", "fashion-mnist", "emnist", "cifar-10", "cifar-100", "organamnist", "omniglot"} <= set(infos)
    assert [info.name for info in infos.values() if info.bundled] == ["digits", "synthetic"]
    assert [info.name for info in infos.values() if found(info, tmp_path)] == ["digits", "synthetic"]
    write_mnist(tmp_path / "mnist", packed=False)
    write_files(tmp_path, cifar_contents("cifar-10", "python")[0])
    there = [info.name for info in infos.values() if found(info, tmp_path)]
    assert there == ["digits", "synthetic", "mnist", "cifar-10"]
    assert json.dumps([dataclasses.asdict(info) for info in infos.values()])


@pytest.mark.parametrize("info", [info for info in catalogue() if not info.bundled], ids=lambda info: info.name)
def test_each_missing_data_set_says_its_files_its_home_and_its_place(info: object, tmp_path: Path) -> None:
    with pytest.raises(FedtailorError) as error:
        load(info.name, tmp_path)
    sentence = str(error.value)
    for word in (*info.files, info.source, str(tmp_path)):
        assert word in sentence


def test_partitions_have_one_line_each() -> None:
    lines = partitions_catalogue()
    assert {"iid", "dirichlet:ALPHA", "classes:K", "pairs", "natural"} <= set(lines)
    assert all(line and "\n" not in line for line in lines.values())


def test_a_data_set_checks_itself() -> None:
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    with pytest.raises(FedtailorError, match="one number from 0 to 0"):
        Dataset("own", x, y, ("a",))
    with pytest.raises(FedtailorError, match="int64, float32 or float64 features or uint8 images"):
        Dataset("own", x.half(), y, ("a", "b"))
    with pytest.raises(FedtailorError, match=r"as \(samples, channels, height, width\)"):
        Dataset("own", x.byte(), y, ("a", "b"))
    with pytest.raises(FedtailorError, match="classes need whole numbers"):
        Dataset("own", x, y.float(), ("a", "b"))
    with pytest.raises(FedtailorError, match="targets of 'own' hold NaN"):
        Dataset("own", x, torch.full((4,), torch.nan), ())
    with pytest.raises(FedtailorError, match="entries in 'part'"):
        Dataset("own", x, y, ("a", "b"), part=torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(FedtailorError, match="sample 1 is of another than sample 0"):
        Dataset("own", x, y, ("a", "b"), part=y.byte(), group=torch.tensor([0, 0, 1, 2]))
