from pathlib import Path

import numpy as np
import pytest
import torch

from fedtailor._common.errors import FedtailorError
from fedtailor.data import load

PARTS = {"train": 6, "val": 2, "test": 4}


def arrays(style: str, *, colour: bool = False, column: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    contents = {}
    for part, samples in PARTS.items():
        x = rng.integers(0, 256, (samples, 28, 28, 3) if colour else (samples, 28, 28), dtype=np.uint8)
        y = rng.integers(0, 8, (samples, 1) if column else samples, dtype=np.uint8)
        names = (f"{part}_images", f"{part}_labels") if style == "published" else (f"x_{part}", f"y_{part}")
        contents.update(zip(names, (x, y), strict=True))
    return contents


@pytest.mark.parametrize("column", [True, False])
@pytest.mark.parametrize("style", ["published", "short"])
def test_reads_grey_images_under_both_sets_of_keys(tmp_path: Path, style: str, column: bool) -> None:
    contents = arrays(style, column=column)
    np.savez(tmp_path / "organamnist.npz", **contents)
    data = load("organamnist", tmp_path)
    x, y = (np.concatenate(list(contents.values())[side::2]) for side in (0, 1))
    assert torch.equal(data.x[:, 0], torch.from_numpy(x))
    assert data.y.tolist() == y.reshape(-1).tolist()
    assert data.part is not None
    assert data.part.tolist() == [0] * 6 + [1] * 2 + [2] * 4
    assert data.classes[3] == "heart"


def test_colour_images_get_their_channels_first(tmp_path: Path) -> None:
    contents = arrays("published", colour=True)
    np.savez(tmp_path / "bloodmnist.npz", **contents)
    data = load("bloodmnist", tmp_path)
    assert data.x.shape == (12, 3, 28, 28)
    assert torch.equal(data.x[:6].permute(0, 2, 3, 1), torch.from_numpy(contents["train_images"]))


def test_any_other_medmnist_file_is_read_by_its_path(tmp_path: Path) -> None:
    np.savez(tmp_path / "pathmnist_64.npz", **arrays("published"))
    data = load(str(tmp_path / "pathmnist_64.npz"))
    assert (data.name, len(data)) == ("pathmnist_64", 12)
    assert data.part is not None


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    contents = arrays("published")
    del contents["val_labels"]
    np.savez(tmp_path / "organamnist.npz", **contents)
    with pytest.raises(
        FedtailorError, match=r"organamnist\.npz cannot be read: there are no val_images and val_labels"
    ):
        load("organamnist", tmp_path)


def test_several_labels_per_sample(tmp_path: Path) -> None:
    contents = arrays("published")
    for part in ("train", "val", "test"):
        contents[f"{part}_labels"] = np.eye(14, dtype=np.uint8)[: len(contents[f"{part}_labels"])]
    np.savez(tmp_path / "chestmnist.npz", **contents)
    data = load("chestmnist", tmp_path)
    assert data.targets == "labels"
    assert data.y.shape == (12, 14)
    assert data.classes[:2] == ("atelectasis", "cardiomegaly")
    assert data.y[1].tolist() == [0, 1, *[0] * 12]
    np.savez(tmp_path / "organamnist.npz", **contents)
    with pytest.raises(FedtailorError, match=r"have shape \(12, 14\) for 11 classes: give a 0 or 1 for each"):
        load("organamnist", tmp_path)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.zeros((6, 14), dtype=np.uint8), "differ in their number of labels"),
        (np.full((6, 2), 3), "or several labels"),
    ],
)
def test_labels_that_are_neither_classes_nor_several_are_refused(labels: np.ndarray, said: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "organamnist.npz", **arrays("published") | {"train_labels": labels})
    with pytest.raises(FedtailorError, match=said):
        load("organamnist", tmp_path)


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    contents = arrays("published") | {"test_images": np.zeros((4, 20, 28), dtype=np.uint8)}
    np.savez(tmp_path / "organamnist.npz", **contents)
    with pytest.raises(FedtailorError, match=r"its test images have shape \(1, 20, 28\), others \(1, 28, 28\)"):
        load("organamnist", tmp_path)
    np.savez(tmp_path / "organamnist.npz", **arrays("published") | {"val_labels": np.zeros(1, dtype=np.uint8)})
    with pytest.raises(FedtailorError, match="its val part has 2 images but 1 labels"):
        load("organamnist", tmp_path)


@pytest.mark.parametrize("keep", [0, 100, -50])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "organamnist.npz"
    np.savez(file, **arrays("published"))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(FedtailorError, match=r"organamnist\.npz cannot be read"):
        load("organamnist", tmp_path)


def test_damage_inside_the_file_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "organamnist.npz"
    np.savez(file, **arrays("published"))
    raw = bytearray(file.read_bytes())
    raw[1000] ^= 255
    file.write_bytes(raw)
    with pytest.raises(FedtailorError, match="truncated or damaged"):
        load("organamnist", tmp_path)
