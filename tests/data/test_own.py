"""The user's own data: npz, CSV, folder of images, Python list."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedtailor._common.errors import FedtailorError
from fedtailor.data import federate, from_list, load

from .files import png, write_files


def save(path: Path, **arrays: object) -> str:
    np.savez(path / "own.npz", **arrays)
    return str(path / "own.npz")


def test_npz_with_numbers(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(5, 3))
    data = load(save(tmp_path, x=x, y=np.array([7, 10, 7, 2, 2]), client=np.array([5, 5, 11, 11, 11])))
    assert torch.equal(data.x, torch.from_numpy(x).float())
    assert data.classes == ("2", "7", "10")
    assert data.y.tolist() == [1, 2, 1, 0, 0]
    assert data.client is not None
    assert (data.client.tolist(), data.client_names) == ([0, 0, 1, 1, 1], ("5", "11"))


def test_npz_with_names(tmp_path: Path) -> None:
    data = load(save(tmp_path, x=np.zeros((3, 2), np.float32), y=np.array(["ill", "healthy", "ill"])))
    assert (data.classes, data.y.tolist(), data.client) == (("healthy", "ill"), [1, 0, 1], None)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 8, 6), (4, 1, 8, 6)),
        ((4, 8, 6, 3), (4, 3, 8, 6)),
        ((4, 3, 8, 6), (4, 3, 8, 6)),
        ((4, 8, 6, 1), (4, 1, 8, 6)),
    ],
)
def test_npz_images_stay_bytes(tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
    data = load(save(tmp_path, x=x, y=np.arange(4)))
    assert data.x.shape == expected
    assert data.x.dtype == torch.uint8
    assert data.x[1, 0, 2, 3] == (x[1, 2, 3] if x.ndim == 3 else x[1, 0, 2, 3] if shape[1] == 3 else x[1, 2, 3, 0])


class Trap:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def test_npz_with_pickled_objects_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    trap = np.array([Trap(tmp_path / "trace")], dtype=object)
    file = save(tmp_path, x=np.zeros((1, 2)), y=trap)
    with pytest.raises(FedtailorError, match="holds pickled objects, which fedtailor never loads"):
        load(file)
    assert not (tmp_path / "trace").exists()


def test_files_that_are_no_npz_are_refused(tmp_path: Path) -> None:
    for raw in (b"", b"text", pickle.dumps([1])):
        (tmp_path / "own.npz").write_bytes(raw)
        with pytest.raises(FedtailorError, match=r"own\.npz cannot be read: it is not an npz file, or truncated"):
            load(str(tmp_path / "own.npz"))


def test_npz_truncated_is_refused(tmp_path: Path) -> None:
    file = Path(save(tmp_path, x=np.zeros((50, 2)), y=np.zeros(50, int)))
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(FedtailorError, match="cannot be read"):
        load(str(file))


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"x": np.zeros((3, 2))}, r"has no array 'y', only x: save it with np\.savez"),
        ({"x": np.zeros((3, 2)), "y": np.array([0.5, 1, 2])}, "hold fractions or NaN: give whole numbers or names"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, np.nan, 2])}, "hold fractions or NaN"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2, int)}, "has 2 labels but 3 entries in 'x'"),
        ({"x": np.zeros((3, 2)), "y": np.full((3, 2), 2)}, "give one number or text each"),
        ({"x": np.zeros((3, 2)), "y": np.zeros((3, 2))}, "give one number or text each"),
        ({"x": np.array(["a"]), "y": np.zeros(1, int)}, "give numbers"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "has no samples"),
        ({"x": np.full((3, 2), 1e300), "y": np.zeros(3, int)}, "3 of 3 samples hold NaN or Inf"),
        (
            {"x": np.array([[0.0, 1], [np.nan, 1], [np.inf, 0]]), "y": np.zeros(3, int)},
            "2 of 3 samples hold NaN or Inf, the first is sample 1",
        ),
    ],
)
def test_npz_refusals(tmp_path: Path, arrays: dict[str, np.ndarray], sentence: str) -> None:
    with pytest.raises(FedtailorError, match=sentence):
        load(save(tmp_path, **arrays))


def write_csv(tmp_path: Path, text: str) -> str:
    (tmp_path / "own.csv").write_text(text, encoding="utf-8")
    return str(tmp_path / "own.csv")


def test_csv_with_text_labels_and_clients(tmp_path: Path) -> None:
    data = load(write_csv(tmp_path, "age,client,label,weight\n40,b,ill,70.5\n50,a,healthy,60\n\n31,b,ill,1e2\n"))
    assert data.x.tolist() == [[40, 70.5], [50, 60], [31, 100]]
    assert (data.classes, data.y.tolist()) == (("healthy", "ill"), [1, 0, 1])
    assert data.client is not None
    assert (data.client_names, data.client.tolist()) == (("a", "b"), [1, 0, 1])


@pytest.mark.parametrize("column", ["label", "y", "class", "target"])
def test_csv_finds_its_label_column(tmp_path: Path, column: str) -> None:
    data = load(write_csv(tmp_path, f"\ufeff{column},a\n10,1\n9,2\n"))
    assert (data.classes, data.y.tolist(), data.client) == (("9", "10"), [1, 0], None)


def test_text_labels_keep_their_names(tmp_path: Path) -> None:
    assert load(write_csv(tmp_path, "a,label\n1,v1.0\n2,v1\n")).classes == ("v1", "v1.0")


@pytest.mark.parametrize(
    ("written", "classes", "numbers"),
    [
        (["1", "1.0", " 1", "01", "1e0", "+1", "2"], ("1", "2"), [0, 0, 0, 0, 0, 0, 1]),
        (["-0", "0", "10", "9"], ("0", "9", "10"), [0, 0, 2, 1]),
        (["007", "8"], ("007", "8"), [0, 1]),
        (["-1.0", "+3", "-0.0"], ("-1", "0", "3"), [0, 2, 1]),
        (["9007199254740993", "9007199254740992"], ("9007199254740992", "9007199254740993"), [1, 0]),
        (["1", "1.0", "one"], ("1", "1.0", "one"), [0, 1, 2]),
        (["1_2", "12"], ("12", "1_2"), [1, 0]),
    ],
)
def test_labels_are_one_class_however_the_number_is_written(
    tmp_path: Path, written: list[str], classes: tuple[str, ...], numbers: list[int]
) -> None:
    for file in (
        write_csv(tmp_path, "a,label\n" + "".join(f"1,{label}\n" for label in written)),
        save(tmp_path, x=np.zeros((len(written), 1)), y=np.array(written)),
        save(tmp_path, x=np.zeros((len(written), 1)), y=np.array([label.encode() for label in written])),
    ):
        data = load(file)
        assert (data.classes, data.y.tolist()) == (classes, numbers)


def test_labels_that_are_floats_are_whole(tmp_path: Path) -> None:
    data = load(save(tmp_path, x=np.zeros((4, 1)), y=np.array([1.0, -0.0, 0.0, 10.0])))
    assert (data.classes, data.y.tolist()) == (("0", "1", "10"), [1, 0, 0, 2])


def test_csv_columns_can_be_named(tmp_path: Path) -> None:
    file = write_csv(tmp_path, "a,site,diagnosis\n1,x,0.0\n2,y,1.0\n")
    data = load(file, label_column="diagnosis", client_column="site")
    assert (data.x.tolist(), data.classes, data.client_names) == ([[1], [2]], ("0", "1"), ("x", "y"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "a,b,diagnosis\n1,2,x\n",
            r"no label column \(one of label, y, class, target\): its columns are a, b, diagnosis",
        ),
        ("a,label\n1,x\n2\n", r"Line 3 of .* has 1 cell, but the header 2"),
        ("a,label\n1,0.5\n2,1\n", r"column 'label' of .* hold fractions"),
        ("a,label\n1,0.5\n2,nan\n", r"Line 3 of .* has 'nan' in column 'label': fill it in"),
        ("a,label\n1,\n", "nothing in column 'label'"),
        ("1,2\n3,4\n", "has no header"),
        ("", "has no header"),
        ("a,label\n", "no samples"),
        ("a,a,label\n1,2,3\n", "names a column twice"),
        ("client,label\n1,2\n", "it needs features"),
        ("a,label\ninf,1\n3,1\n", "The column 'a' of 'own.csv' has inf in sample 0: it needs finite numbers"),
    ],
)
def test_csv_refusals(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(FedtailorError, match=sentence):
        load(write_csv(tmp_path, text))


def test_csv_asked_for_columns_it_has_not(tmp_path: Path) -> None:
    file = write_csv(tmp_path, "a,label\n1,2\n")
    with pytest.raises(FedtailorError, match="no label column 'diagnosis': its columns are a, label"):
        load(file, label_column="diagnosis")
    with pytest.raises(FedtailorError, match="no column 'site': its columns are a, label"):
        load(file, client_column="site")


def image(value: int, size: tuple[int, ...] = (5, 4)) -> bytes:
    return png(np.full(size, value, dtype=np.uint8))


def test_folder_of_grey_images(tmp_path: Path) -> None:
    files = {"b/ill/1.png": image(1), "a/ill/2.PNG": image(2), "a/well/3.png": image(3)}
    write_files(tmp_path / "clinic", files | {"a/well/notes.txt": b"", "a/readme.png": b""})
    data = load(str(tmp_path / "clinic"))
    assert data.x.shape == (3, 1, 5, 4)
    assert data.x[:, 0, 0, 0].tolist() == [2, 3, 1]
    assert (data.classes, data.y.tolist()) == (("ill", "well"), [0, 1, 0])
    assert data.client is not None
    assert (data.client_names, data.client.tolist()) == (("a", "b"), [0, 0, 1])


def test_folder_with_one_colour_image_is_colour(tmp_path: Path) -> None:
    red = np.zeros((5, 4, 3), dtype=np.uint8)
    red[..., 0] = 200
    write_files(tmp_path / "clinic", {"a/ill/1.png": image(7), "a/well/2.png": png(red)})
    x = load(str(tmp_path / "clinic")).x
    assert x.shape == (2, 3, 5, 4)
    assert x[:, :, 0, 0].tolist() == [[7, 7, 7], [200, 0, 0]]


def test_folder_of_different_sizes_needs_image_size(tmp_path: Path) -> None:
    write_files(tmp_path / "clinic", {"a/ill/1.png": image(7), "a/well/2.png": image(9, (8, 8))})
    with pytest.raises(FedtailorError, match=r"1\.png is 4×5, .*2\.png is 8×8; say with --image-size"):
        load(str(tmp_path / "clinic"))
    x = load(str(tmp_path / "clinic"), image_size=6).x
    assert x.shape == (2, 1, 6, 6)
    assert x[:, 0, 3, 3].tolist() == [7, 9]


def test_folder_refusals(tmp_path: Path) -> None:
    write_files(tmp_path / "clinic", {"ill/1.png": image(7)})
    with pytest.raises(FedtailorError, match="needs them as client/class/image"):
        load(str(tmp_path / "clinic"))
    write_files(tmp_path / "clinic", {"a/ill/1.png": image(7)[:40]})
    with pytest.raises(FedtailorError, match=r"1\.png cannot be read: it is not an image, or truncated"):
        load(str(tmp_path / "clinic"))
    write_files(tmp_path / "clinic", {"a/ill/1.png": png(np.zeros((4, 4), dtype=np.uint16))})
    with pytest.raises(FedtailorError, match="more than 8 bits per pixel"):
        load(str(tmp_path / "clinic"))
    with pytest.raises(FedtailorError, match="image_size is 0"):
        load(str(tmp_path / "clinic"), image_size=0)


def test_list_of_pairs_and_datasets() -> None:
    x = torch.randn(6, 3)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    data = from_list([(x[:2], y[:2]), (x[2:3].numpy(), y[2:3].numpy()), TensorDataset(x[3:], y[3:])])
    assert torch.equal(data.x, x)
    assert data.y.tolist() == y.tolist()
    assert data.classes == ("0", "1", "2")
    assert data.client is not None
    assert data.client.tolist() == [0, 0, 1, 2, 2, 2]


def test_list_takes_any_array() -> None:
    images = np.zeros((2, 4, 4), dtype=np.uint8)
    images.flags.writeable = False
    data = from_list([(images, torch.tensor([0, 1])), (images[::-1], np.array([1, 0], dtype=">i4"))])
    assert data.x.shape == (4, 1, 4, 4)
    assert data.y.tolist() == [0, 1, 1, 0]
    weights = torch.zeros(2, 3, requires_grad=True)
    assert not from_list([(weights, torch.tensor([0, 1]))]).x.requires_grad


def test_list_with_fractions_is_a_regression() -> None:
    data = from_list([(torch.randn(30, 3), torch.rand(30)), (torch.randn(20, 3), torch.rand(20))], "flats")
    assert (data.classes, data.y.dtype) == ((), torch.float32)
    split = federate(data, partition="natural", dtype=torch.float64)
    assert split.counts().tolist() == [[30], [20]]
    assert split.y.dtype == split.x.dtype == torch.float64


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([], "is empty: give one entry per client"),
        ([(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))], "has 2 samples and 3 labels"),
        ([(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))], "at least one"),
        (
            [
                (torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64)),
                (torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64)),
            ],
            r"Client 1 of 'list' has features of type float32 and shape \(4,\), but client 0 of .*\(3,\)",
        ),
        (
            [(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64)), (torch.zeros(1, 3), torch.zeros(1))],
            "Client 1 of 'list' has labels of type float32",
        ),
        ([(torch.zeros(1, 3), torch.tensor([-1]))], "go from -1 to -1"),
        ([5], "neither a pair"),
        ([(torch.tensor(1.0), torch.tensor([1, 2]))], "has 1 samples and 2 labels"),
        ([[(torch.zeros(3), 0), (torch.zeros(4), 1)]], "neither a pair"),
    ],
)
def test_list_refusals(parts: list[object], sentence: str) -> None:
    with pytest.raises(FedtailorError, match=sentence):
        from_list(parts)
