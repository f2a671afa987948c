from pathlib import Path

import numpy as np
import pytest
import torch

from fedtailor._common.errors import FedtailorError
from fedtailor.data import load

from .files import write_idx, write_mnist


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_reads_all_images_with_labels_and_parts(tmp_path: Path, name: str, packed: bool) -> None:
    x, y = write_mnist(tmp_path / name, packed=packed)
    data = load(name, tmp_path)
    assert torch.equal(data.x, torch.from_numpy(x)[:, None])
    assert data.y.tolist() == y.tolist()
    assert data.part is not None
    assert data.part.tolist() == [0] * 12 + [2] * 6
    assert len(data.classes) == 10


def test_plain_and_gzip_files_may_be_mixed(tmp_path: Path) -> None:
    x, _ = write_mnist(tmp_path / "mnist")
    packed = tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz"
    packed.unlink()
    write_idx(packed.with_suffix(""), x[12:], packed=False)
    assert torch.equal(load("mnist", tmp_path).x[:, 0], torch.from_numpy(x))


def write_emnist(root: Path, split: str, part: str, labels: list[int]) -> np.ndarray:
    x = np.random.default_rng(len(part)).integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
    write_idx(root / "emnist" / f"emnist-{split}-{part}-images-idx3-ubyte.gz", x, packed=True)
    name = f"emnist-{split}-{part}-labels-idx1-ubyte.gz"
    write_idx(root / "emnist" / name, np.array(labels, dtype=np.uint8), packed=True)
    return x


@pytest.mark.parametrize(
    ("split", "classes", "last"),
    [("byclass", 62, "z"), ("bymerge", 47, "t"), ("balanced", 47, "t"), ("digits", 10, "9"), ("mnist", 10, "9")],
)
def test_emnist_is_turned_upright(tmp_path: Path, split: str, classes: int, last: str) -> None:
    train = write_emnist(tmp_path, split, "train", [0, classes - 1])
    test = write_emnist(tmp_path, split, "test", [1, 2, 3])
    data = load(f"emnist:{split}", tmp_path)
    stored = np.concatenate([train, test])
    assert torch.equal(data.x[:, 0], torch.from_numpy(stored.transpose(0, 2, 1).copy()))
    assert data.y.tolist() == [0, classes - 1, 1, 2, 3]
    assert (len(data.classes), data.classes[-1]) == (classes, last)
    assert data.part is not None
    assert data.part.tolist() == [0, 0, 2, 2, 2]


def test_emnist_letters_count_from_zero(tmp_path: Path) -> None:
    write_emnist(tmp_path, "letters", "train", [1, 26])
    write_emnist(tmp_path, "letters", "test", [2])
    data = load("emnist:letters", tmp_path)
    assert [data.classes[label] for label in data.y.tolist()] == ["A", "Z", "B"]


def test_emnist_test_part_alone_has_no_split(tmp_path: Path) -> None:
    write_emnist(tmp_path, "byclass", "test", [1, 2, 3])
    data = load("emnist:byclass:test", tmp_path)
    assert len(data) == 3
    assert data.part is None
    with pytest.raises(FedtailorError, match=r"'emnist' is missing: get emnist/emnist-byclass-train-images.*nist\.gov"):
        load("emnist", tmp_path)


def test_emnist_refuses_unknown_splits(tmp_path: Path) -> None:
    with pytest.raises(FedtailorError, match="did you mean 'letters'"):
        load("emnist:leters", tmp_path)
    with pytest.raises(FedtailorError, match="write 'emnist:digits' or 'emnist:digits:test'"):
        load("emnist:digits:all", tmp_path)


@pytest.mark.parametrize("packed", [True, False])
def test_truncated_file_is_named(tmp_path: Path, packed: bool) -> None:
    write_mnist(tmp_path / "mnist", packed=packed)
    file = next((tmp_path / "mnist").glob("train-images*"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(FedtailorError, match=rf"{file.name} cannot be read: it.*(truncated|bytes where)"):
        load("mnist", tmp_path)


@pytest.mark.parametrize("contents", [b"", b"\0\0", b"<html>Not found</html>", b"\0\0\x08\x01" + bytes(30)])
def test_wrong_magic_number_is_refused(tmp_path: Path, contents: bytes) -> None:
    write_mnist(tmp_path / "mnist", packed=False)
    (tmp_path / "mnist" / "train-images-idx3-ubyte").write_bytes(contents)
    with pytest.raises(FedtailorError, match="does not begin like an idx file of bytes in 3 dimensions"):
        load("mnist", tmp_path)


def test_labels_and_images_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", packed=False)
    write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte", np.zeros(11, dtype=np.uint8), packed=False)
    with pytest.raises(FedtailorError, match=r"holds 12 images but .* 11 labels"):
        load("mnist", tmp_path)


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", packed=False)
    images = np.zeros((6, 28, 20), dtype=np.uint8)
    write_idx(tmp_path / "mnist" / "t10k-images-idx3-ubyte", images, packed=False)
    with pytest.raises(FedtailorError, match="its images are 20×28 pixels, not 28×28"):
        load("mnist", tmp_path)


def test_labels_outside_the_classes_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", packed=False)
    labels = np.full(12, 10, dtype=np.uint8)
    write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte", labels, packed=False)
    with pytest.raises(FedtailorError, match="one number from 0 to 9"):
        load("mnist", tmp_path)
