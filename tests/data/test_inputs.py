"""Integer inputs, and several inputs of a sample."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.data import Dataset, from_list
from fedtailor.training.inputs import Several
from tests.data.large import Array, Items, in_folder
from tests.helpers import numbers

SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch": 8, "engine": "in-process", "on_failure": "stop"}
RNG = np.random.default_rng(1)
TABLE = RNG.integers(-3, 9, (60, 5))
LABELS = (TABLE.sum(1) > 12).astype(int)
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"]


def clients(x: Any, y: Array = LABELS, n: int = 3) -> list[tuple[Any, Array]]:
    def part(rows: slice) -> Any:
        return tuple(one[rows] for one in x) if isinstance(x, tuple) else x[rows]

    size = len(y) // n
    return [(part(slice(k * size, (k + 1) * size)), y[k * size : (k + 1) * size]) for k in range(n)]


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_stay_integers(kind: str, tmp_path: Path) -> None:
    x = np.abs(TABLE).astype(kind)
    np.savez(tmp_path / "x.npz", x=x, y=LABELS)
    items = [Items(part, y) for part, y in clients(x)]
    for data in (ft.load_data(str(tmp_path / "x.npz")), from_list(clients(x)), from_list(items)):
        assert isinstance(data.x, Tensor)
        assert data.x.dtype == torch.int64
        assert data.x.tolist() == x.tolist()


def test_images_booleans_and_very_large_integers_are_what_they_were() -> None:
    for x, kind in (
        (np.zeros((4, 6, 6), np.uint8), torch.uint8),
        (np.zeros((4, 6, 6, 3), np.uint8), torch.uint8),
        (np.zeros((4, 6), bool), torch.float32),
        (np.full((4, 2), 2**64 - 1, np.uint64), torch.float32),
    ):
        data = from_list([(x, np.array([0, 1, 0, 1]))])
        assert isinstance(data.x, Tensor)
        assert data.x.dtype == kind


@pytest.mark.parametrize("model", ["mlp:4", "logistic"])
def test_a_table_of_integers_has_the_bits_of_one_of_floats(model: str) -> None:
    one, other = (ft.run("ditto", data=clients(x), model=model, **SMALL) for x in (TABLE, TABLE.astype(np.float32)))
    assert numbers(one.rounds) == numbers(other.rounds)
    assert torch.equal(one.personal_vector(1), other.personal_vector(1))
    assert one.data.fingerprint() == other.data.fingerprint()


def embedding(size: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(size, 3), nn.Flatten(), nn.Linear(15, 2))


def test_an_embedding_gets_integers() -> None:
    result = ft.run("fedper", data=clients(np.abs(TABLE)), model=embedding(9), **SMALL)
    x, _ = result.data.train(0)
    assert isinstance(x, Tensor)
    assert x.dtype == torch.int64


def test_tokens_that_an_embedding_does_not_know_are_refused_before_the_run() -> None:
    x = np.abs(TABLE)
    x[55, 2] = 9  # the last client's
    with pytest.raises(ft.FedtailorError, match="Client 2 has the token 9, but the network's embedding takes 0 to 8"):
        ft.run("fedavg", data=clients(x), model=embedding(9), **SMALL)
    x[55, 2], x[21, 0] = 8, -1
    with pytest.raises(ft.FedtailorError, match="Client 1 has the token -1"):
        ft.run("fedavg", data=clients(x), model=embedding(9), **SMALL)
    with pytest.raises(ft.FedtailorError, match=r"gru is for sequences, .* 5 and are not such tokens"):
        ft.run("fedavg", data=clients(x), model="gru", **SMALL)


def test_new_clients_with_unknown_tokens_are_refused() -> None:
    result = ft.run("fedavg", data=clients(np.abs(TABLE).clip(0, 5)), model="gru:4", **SMALL)
    assert ft.adapt(result, data=clients(np.abs(TABLE).clip(0, 5)), epochs=1, engine="in-process").models
    with pytest.raises(ft.FedtailorError, match=r"has the token \d, but the network's embedding takes 0 to 5"):
        ft.adapt(result, data=clients(np.abs(TABLE)), epochs=1, engine="in-process")


def test_a_vocabulary_is_counted_or_said() -> None:
    x, y = torch.from_numpy(np.abs(TABLE)), torch.from_numpy(LABELS)
    assert ft.federate(Dataset("text", x, y, ("a", "b")), clients=2).vocabulary == 9
    assert ft.federate(Dataset("text", x, y, ("a", "b"), tokens=80), clients=2).vocabulary == 80
    assert ft.federate(Dataset("table", torch.from_numpy(TABLE), y, ("a", "b")), clients=2).vocabulary is None
    assert ft.federate(Dataset("floats", x.float(), y, ("a", "b")), clients=2).vocabulary is None


def test_a_text_for_a_network_without_embedding_is_a_warning() -> None:
    text = Dataset("text", torch.from_numpy(np.abs(TABLE)), torch.from_numpy(LABELS), ("a", "b"), tokens=80)
    with pytest.warns(UserWarning, match="texts of 80 tokens, but the network has no embedding") as caught:
        ft.run("fedavg", data=text, clients=2, model="mlp:4", **SMALL)
    assert [warning.filename for warning in caught] == [__file__]


# --- several inputs ---


class Joined(nn.Module):
    """A dense layer over two inputs, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, one: Tensor, other: Tensor | None = None) -> Tensor:
        x = one.clone() if other is None else torch.cat([one, other], 1)  # both at an address of their own
        return self.head(self.body(x).relu())  # type: ignore[no-any-return]


FEATURES = RNG.normal(size=(60, 5)).astype(np.float32)
PAIR = (FEATURES[:, :2].copy(), FEATURES[:, 2:].copy())


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "moon", "pflego", "fedrecon", "per-fedavg", "fedfomo"])
def test_two_inputs_have_the_bits_of_one_that_is_both(method: str) -> None:
    settings = {**SMALL, "evaluation": {"train": True}}
    one = ft.run(method, data=clients(FEATURES), model=Joined, **settings)
    two = ft.run(method, data=clients(PAIR), model=Joined, **settings)
    assert numbers(one.rounds) == numbers(two.rounds)
    assert all(torch.equal(one.personal_vector(c), two.personal_vector(c)) for c in range(3))


def test_two_inputs_from_files_and_data_sets_and_on_every_engine(tmp_path: Path) -> None:
    client = np.repeat([0, 1, 2], 20)
    np.savez(tmp_path / "both.npz", x1=PAIR[0], x2=PAIR[1], y=LABELS, client=client)
    folder = in_folder(tmp_path / "folder", x1=PAIR[0], x2=PAIR[1], y=LABELS, client=client)
    items = [Items(x, y) for x, y in clients(PAIR)]
    reference = ft.run("fedper", data=clients(PAIR), model=Joined, **SMALL)
    for data in (str(tmp_path / "both.npz"), folder, items, [ft.lazy(each) for each in items]):
        result = ft.run("fedper", data=data, model=Joined, **{**SMALL, "engine": "processes"})
        assert numbers(result.rounds) == numbers(reference.rounds)
    assert (
        reference.data.fingerprint()
        != ft.run("fedper", data=clients((PAIR[0], -PAIR[1])), model=Joined, **SMALL).data.fingerprint()
    )


def test_integers_booleans_and_single_numbers_of_several_inputs_stay_as_they_are() -> None:
    data = from_list(clients((np.abs(TABLE), np.arange(60), TABLE > 3, FEATURES)))
    assert isinstance(data.x, Several)
    kinds = [torch.int64, torch.int64, torch.bool, torch.float32]
    assert [part.dtype for part in ft.federate(data, partition="natural").client(0).x.parts] == kinds
    assert [part.shape[1:] for part in data.x.parts] == [(5,), (), (5,), (5,)]


def test_several_inputs_are_exported_predicted_and_adapted(tmp_path: Path) -> None:
    result = ft.run("fedper", data=clients(PAIR), model=Joined, **SMALL)
    (file,) = ft.export(result, client=0, to=tmp_path)
    found = ft.predict(file, PAIR, model=Joined)
    assert found.outputs.shape == (60, 2)
    module = Joined()
    module.load_state_dict(result.personal(0))
    assert torch.allclose(found.outputs, module(*map(torch.from_numpy, PAIR)), atol=1e-6)
    assert len(ft.adapt(result, data=clients(PAIR, n=2), epochs=1, engine="in-process").per_client) == 2
    with pytest.raises(ft.FedtailorError, match=r"The samples have the shape 3 and 3, but the model .* for 2 and 3"):
        ft.predict(file, (PAIR[1], PAIR[1]), model=Joined)


def test_several_inputs_are_for_networks_of_ones_own() -> None:
    with pytest.raises(
        ft.FedtailorError, match="The model mlp takes one input, but the samples have 2: give a network"
    ):
        ft.run("fedavg", data=clients(PAIR), **SMALL)
    with pytest.raises(ft.FedtailorError, match="have 60 and 59 samples: give each as many"):
        from_list([((FEATURES, FEATURES[1:]), LABELS)])
    with pytest.raises(ft.FedtailorError, match="Client 1 of 'list' has features of"):
        from_list([(PAIR, LABELS), (PAIR[0], LABELS)])


def test_a_method_that_writes_into_one_of_several_inputs_is_found_out() -> None:
    class Writes(Joined):
        def forward(self, one: Tensor, other: Tensor | None = None) -> Tensor:
            if self.training and other is not None:
                other.add_(1)
            return super().forward(one, other)

    with pytest.raises(ft.FedtailorError, match="wrote into the inputs of its samples"):
        ft.run("fedavg", data=clients(PAIR), model=Writes, **{**SMALL, "batch": "full"})
