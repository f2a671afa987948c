"""Samples that are read when a batch needs them: the same bits, and never all at once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.data import FederatedData, from_list
from fedtailor.training.descent import EVALUATION_BATCH
from fedtailor.training.inputs import Inputs, Lazy, held, join, take
from tests.data.large import Array, Items, in_folder, lists, samples
from tests.helpers import numbers

SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch": 8, "lr": 0.05, "on_failure": "stop"}
KINDS = [("images", "lenet"), ("colour", "mlp:5"), ("floats", "mlp:5"), ("tokens", "gru:4"), ("tokens", "mlp:5")]


def assert_same(one: ft.RunResult, other: ft.RunResult) -> None:
    assert numbers(one.rounds) == numbers(other.rounds)
    assert numbers(one.clients) == numbers(other.clients)
    for client in range(len(one.names)):
        assert torch.equal(one.personal_vector(client), other.personal_vector(client))


@pytest.mark.parametrize(("kind", "model"), KINDS)
def test_a_folder_of_arrays_has_the_bits_of_an_npz_on_every_engine(kind: str, model: str, tmp_path: Path) -> None:
    x, y, client = samples(kind)
    np.savez(tmp_path / "all.npz", x=x, y=y, client=client)
    folder = in_folder(tmp_path / "folder", x=x, y=y, client=client)
    reference = ft.run("fedper", data=str(tmp_path / "all.npz"), model=model, engine="in-process", **SMALL)
    for engine in ("in-process", "processes"):
        result = ft.run("fedper", data=folder, model=model, engine=engine, workers=2, **SMALL)
        assert isinstance(result.data.x, Lazy)
        assert_same(result, reference)


@pytest.mark.parametrize("method", ["fedavg", "fedrecon", "moon", "pflego", "per-fedavg", "fedfomo"])
def test_a_lazy_dataset_has_the_bits_of_its_samples_in_memory(method: str) -> None:
    """Rows of 13 numbers: a client's samples begin at any address, on which last bits of matrix products depend."""
    in_memory, lazy = lists(*samples("floats"))
    settings = {**SMALL, "model": "mlp:5", "evaluation": {"train": True}, "engine": "in-process"}
    assert_same(ft.run(method, data=lazy, **settings), ft.run(method, data=in_memory, **settings))


def test_whole_batches_and_shared_evaluation_have_the_same_bits_too() -> None:
    in_memory, lazy = lists(*samples("images"))
    settings = {**SMALL, "batch": "full", "steps": 2, "model": "lenet", "evaluation": {"model": "global"}}
    assert_same(*(ft.run("fedavg", data=data, engine="processes", **settings) for data in (lazy, in_memory)))


def test_no_more_is_read_at_once_than_a_batch() -> None:
    x, y, _ = samples("floats", 900)
    read: list[int] = []

    def reads(numbers: Tensor) -> Tensor:
        read.append(len(numbers))
        return torch.from_numpy(x)[numbers]

    inputs = Lazy(reads, torch.arange(len(x)), torch.from_numpy(x[:0]))
    bounds = torch.tensor([[0, 400, 500, 600], [600, 800, 850, 900]])
    data = FederatedData("lazy", inputs, torch.from_numpy(y), bounds, ("a", "b"), ("0", "1"))
    ft.run("fedavg", data=data, model="logistic", engine="in-process", **SMALL)
    assert max(read) <= EVALUATION_BATCH
    assert sum(read) > 2 * 600  # two rounds of training


def test_labels_that_are_known_need_no_pass_over_the_data() -> None:
    items = Items(np.zeros((500, 3), np.float32), np.arange(500) % 2)
    x, y = ft.lazy(items, labels=items.y)
    assert y.tolist() == items.y.tolist()
    assert len(set(items.read)) == 1  # its shape and type
    items.targets = torch.arange(500) % 5  # type: ignore[attr-defined]
    assert ft.lazy(items)[1].tolist() == [k % 5 for k in range(500)]
    assert len(set(items.read)) == 1
    data = from_list([(x, y)])
    ft.federate(data, partition="natural").fingerprint()
    assert 200 < len(set(items.read)) < 300  # some of them, spread over all


def test_the_checksum_tells_other_samples_apart() -> None:
    x, y, client = samples("floats")
    checksums = [
        ft.federate(from_list(lists(x * factor, y, client)[1]), partition="natural").fingerprint()
        for factor in (1, 1, 2)
    ]
    assert checksums[0] == checksums[1] != checksums[2]


def test_selections_and_joined_pieces_are_those_of_tensors() -> None:
    x = torch.arange(60.0).reshape(20, 3)
    _, lazy = lists(x.numpy(), np.zeros(20, int), np.arange(20) // 7)
    together = join([part for part, _ in lazy])
    indices = torch.tensor([19, 0, 8, 8, 3])

    def both(function: Any) -> tuple[Inputs, Inputs]:
        return held(function(together)), function(x)

    assert torch.equal(*both(lambda t: t[5:17]))  # type: ignore[arg-type]
    assert torch.equal(*both(lambda t: t[5:17][2:]))  # type: ignore[arg-type]
    assert torch.equal(*both(lambda t: take(t, indices)))  # type: ignore[arg-type]
    assert torch.equal(*both(lambda t: t[indices > 3] if len(t) == 5 else t[torch.arange(20) % 3 == 0]))  # type: ignore[arg-type]
    pieces = zip(together.split(6), x.split(6), strict=True)
    assert all(torch.equal(one, other) for one, other in pieces)  # type: ignore[arg-type]


def test_a_slice_lies_where_it_would_in_the_tensor_of_all_samples() -> None:
    x = torch.arange(20.0 * 13).reshape(20, 13)
    lazy = Lazy(lambda numbers: x[numbers], torch.arange(20), x[:0])
    for key in (slice(1, 5), slice(7, 9)):
        piece = held(lazy[key])
        assert isinstance(piece, Tensor)
        assert (piece.data_ptr() - x[key].data_ptr()) % 64 == 0


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda x: np.where(x == x[4, 1], np.nan, x), "folder/x.npy' are not all finite: 1 of 90 .* sample 4"),
        (lambda x: x.astype(object), "cannot be read"),
        (lambda x: x[:80], "has 90 labels but 80 entries in 'x'"),
        (lambda x: x.astype(complex), "of type complex128: give numbers"),
    ],
)
def test_a_bad_folder_is_refused_before_the_run(spoil: Any, said: str, tmp_path: Path) -> None:
    x, y, _ = samples("floats")
    spoilt: Array = spoil(x)
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder/x.npy", spoilt, allow_pickle=True)
    np.save(tmp_path / "folder/y.npy", y)
    with pytest.raises(ft.FedtailorError, match=said):
        ft.load_data(str(tmp_path / "folder"))


def test_a_truncated_array_is_refused(tmp_path: Path) -> None:
    x, y, _ = samples("floats")
    folder = Path(in_folder(tmp_path / "folder", x=x, y=y))
    (folder / "x.npy").write_bytes((folder / "x.npy").read_bytes()[:-1])
    with pytest.raises(ft.FedtailorError, match=r"x\.npy cannot be read"):
        ft.load_data(str(folder))


@pytest.mark.parametrize(
    ("items", "labels", "said"),
    [
        ([1, 2, 3], None, r"not a data set of \(x, y\) items"),
        (Items(np.zeros((3, 2)), [0, 1, 0]), [0, 1], "has 3 items, but 2 labels"),
        (Items([], []), None, r"not a data set of \(x, y\) items"),
    ],
)
def test_lazy_refuses_what_is_no_data_set(items: Any, labels: Any, said: str) -> None:
    with pytest.raises(ft.FedtailorError, match=said):
        ft.lazy(items, labels)


def test_a_bad_item_is_one_sentence_when_it_is_read() -> None:
    for x in (
        [np.zeros(2, np.float32)] * 9 + [np.zeros(3, np.float32)],
        [np.float32([0, 0])] * 9 + [np.float32([0, np.inf])],
    ):
        data = [ft.lazy(Items(x, [0, 1] * 5), labels=[0, 1] * 5)]
        with pytest.raises(ft.FedtailorError, match=r"The lazy Items' are not all finite|items of different shapes"):
            ft.run("fedavg", data=data, model="logistic", test=0, validation=0, evaluate_every=0, **SMALL)
