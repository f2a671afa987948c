"""Data that were objects, kept as a file: what comes back is what was given, to the bit."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import fedtailor as ft
from fedtailor.data import Dataset, federate, from_list, load
from fedtailor.data.own_data import can_be_kept, data_in_words, kept, write_own
from fedtailor.data.table import Purpose, from_frame
from fedtailor.training.inputs import Several

rng = np.random.default_rng(0)
X, Y = rng.random((12, 4)), rng.integers(0, 3, 12)
FRAME = pandas.DataFrame(
    {"age": [*range(40, 51), None], "ward": ["a", "b", None] * 4, "client": ["n", "s"] * 6, "label": ["ill", "ok"] * 6}
)


def several() -> Dataset:
    return from_list([((torch.ones(6, 2) * k, torch.arange(6) % 4, torch.zeros(6, 3).bool()), Y[:6]) for k in (1, 2)])


def many() -> Dataset:
    """Twelve inputs: x10 is behind x9."""
    return from_list([(tuple(torch.full((6, 1), float(k)) for k in range(12)), Y[:6])])


def from_the_side() -> Dataset:
    """Images whose memory is in another order."""
    images = torch.randint(0, 255, (6, 5, 7, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    return Dataset("mine", images, torch.arange(6), tuple("abcdef"))


def grouped() -> Dataset:
    groups = [f"p{number // 3}" for number in range(12)]
    return from_list([{"x": X, "y": Y, "group": groups, "split": ["train"] * 9 + ["test"] * 3}])


def tables() -> Dataset:
    table = FRAME.drop(columns="client")
    return from_frame({"ü": table, "\n": table}, {}, Purpose())


DATA: dict[str, Callable[[], Dataset]] = {
    "a dictionary, not in the order of its names": lambda: from_list({"south": (X, Y), "north": (X + 1, Y)}),
    "labels with a gap": lambda: from_list([(X, 2 * Y), (X, 2 * Y)]),
    "double precision": lambda: from_list([(torch.rand(6, 3, dtype=torch.float64), Y[:6])]),
    "numbers to predict": lambda: from_list([(X, rng.random(12))]),
    "several labels": lambda: from_list([(X, rng.integers(0, 2, (12, 3)))]),
    "several inputs": several,
    "many inputs": many,
    "images": lambda: from_list([(rng.integers(0, 256, (6, 5, 5, 3)).astype(np.uint8), Y[:6])]),
    "images that are seen from the side": from_the_side,
    "tokens": lambda: replace(from_list([(rng.integers(0, 9, (12, 5)), Y)]), tokens=20),
    "groups and a split": grouped,
    "a table": lambda: from_frame(FRAME, {"columns": "age=number"}, Purpose()),
    "tables by client": tables,
    "a data set of the catalogue": lambda: load("digits"),
}


def tensors(x: Any) -> list[Tensor]:
    return [tensor for part in x.parts for tensor in tensors(part)] if isinstance(x, Several) else [x]


def assert_alike(one: Dataset, other: Dataset) -> None:
    for field in fields(Dataset):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, Tensor | Several):
            assert type(a) is type(b)
            for left, right in zip(tensors(a), tensors(b), strict=True):
                assert left.dtype == right.dtype, field.name
                torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b, field.name


@pytest.mark.parametrize("kind", DATA)
def test_what_is_read_is_what_was_given(kind: str, tmp_path: Path) -> None:
    given = DATA[kind]()
    name, made = kept(given)
    write_own(made, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    read = load(name, tmp_path, label_column="which was asked for", image_size=8)  # of what it was made of
    assert_alike(read, given)
    assert kept(read)[0] == name
    if given.client is not None:
        one, other = (federate(data, partition="natural", min_samples=1) for data in (made, read))
        assert one.fingerprint() == other.fingerprint()


def test_other_data_have_another_name() -> None:
    base = from_list({"a": (X, Y), "b": (X, Y)})
    changed = X.copy()
    changed[3, 2] += 1e-6
    others = [
        from_list({"a": (X, Y), "b": (changed, Y)}),
        from_list({"a": (X, Y), "c": (X, Y)}),
        from_list({"b": (X, Y), "a": (X, Y)}),
        replace(base, classes=("x", "y", "z")),
        replace(base, y=base.y.flip(0)),
        replace(base, x=base.x.float()),
        replace(base, own_split=True),
    ]
    assert kept(from_list({"a": (torch.tensor(X), torch.tensor(Y)), "b": (X, Y)}))[0] == kept(base)[0]
    names = [kept(data)[0] for data in (base, *others)]
    assert len(set(names)) == len(names)


def test_a_file_that_was_changed_or_renamed_is_refused(tmp_path: Path) -> None:
    name, made = kept(from_list([(X, Y)]))
    write_own(made, tmp_path)
    file = tmp_path / name
    other = tmp_path / "own-data-0123456789abcdef.npz"
    file.rename(other)
    with pytest.raises(ft.FedtailorError, match="cannot be read: it was renamed or changed since it was written"):
        load(other)
    with pytest.raises(ft.FedtailorError, match="renamed or changed"):
        load(other.rename(tmp_path / "mine.npz"))
    arrays = dict(np.load(tmp_path / "mine.npz"))
    arrays["y"] = arrays["y"][::-1]
    np.savez(file, **arrays)
    with pytest.raises(ft.FedtailorError, match="renamed or changed"):
        load(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"y": Y.astype(np.int32)}, "of other types than are written"),
        ({"client": np.zeros(12)}, "of other types than are written"),
        ({"fedtailor": np.frombuffer(b"{}", np.uint8)}, "something else than was written"),
        ({"more": X}, "something else than was written"),
        ({"xtra": X}, "something else than was written"),
        ({"when": np.zeros(3, "datetime64[s]")}, "something else than was written"),
        ({"y": Y + 5}, "go from 5 to"),
        ({"x": np.array([["a"]] * 12)}, "something else than was written"),
    ],
)
def test_an_odd_one_with_the_right_checksum_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    from fedtailor.data import own_data

    arrays = {**own_data._arrays(from_list([(X, Y)])), **change}
    try:
        name = own_data._name(arrays)
    except ValueError:
        name = "own-data-0123456789abcdef.npz"
    np.savez(tmp_path / name, **arrays)
    with pytest.raises(ft.FedtailorError, match=said):
        load(tmp_path / name)


def test_no_pickle_is_written_and_none_is_read(tmp_path: Path) -> None:
    write_own(kept(from_list([(X, Y)]))[1], tmp_path)
    (file,) = tmp_path.iterdir()
    with np.load(file, allow_pickle=False) as content:
        assert set(content) == {"x", "y", "client", "fedtailor"}
    np.savez(tmp_path / "own-data-0123456789abcdef.npz", x=X, fedtailor=np.array([None], dtype=object))
    with pytest.raises(ft.FedtailorError, match="holds pickled objects"):
        load(tmp_path / "own-data-0123456789abcdef.npz")


def test_lazy_data_stay_where_they_are() -> None:
    lazy = ft.lazy(TensorDataset(torch.rand(8, 3), torch.arange(8) % 2))
    assert not can_be_kept(from_list([lazy]).x)
    assert not can_be_kept(Several((torch.zeros(8, 1), lazy[0])))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digits", "digits"),
        ("object:dict", "your own data"),
        ("__main__:clients", "your own data"),
        ("mine:clients", "mine:clients"),
        ("own-data-0123456789abcdef.npz", "your own data"),
        ("own-data.npz", "own-data.npz"),
    ],
)
def test_what_was_an_object_is_your_own_data(name: str, words: str) -> None:
    assert data_in_words(name) == words
