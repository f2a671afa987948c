"""A client's samples begin at a 64-byte address: its work has the same bits where they are alone in memory."""

from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.client.sites import Site
from fedtailor.data import ClientData, FederatedData, from_list
from fedtailor.engines.preparation import Objects, Prepared, prepare
from fedtailor.experiment import Experiment
from fedtailor.messages import Evaluate, Train
from fedtailor.training.inputs import Several, held, tensors

from .large import Items

SIZES = [17, 40, 31, 64, 23, 90, 55, 18, 77, 36]


def clients(features: int = 13, regression: bool = False, kind: Any = np.float32) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)

    def targets(n: int) -> Any:
        return rng.normal(size=(n, 1)).astype(np.float32) if regression else rng.integers(0, 2, n)

    return [((3 * rng.normal(size=(n, features))).astype(kind), targets(n)) for n in SIZES]


class Pair(nn.Module):
    """Two inputs, each with a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(13, 5), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.head((self.one(one) + self.other(other)).relu())  # type: ignore[no-any-return]


def drawn(kind: str, y: Any) -> Any:
    rng = np.random.default_rng(len(y))
    images = rng.integers(0, 256, (len(y), 17, 17), dtype=np.uint8)
    return images if kind == "images" else rng.integers(0, 9 if len(y) > 17 else 30, (len(y), 7)) + y[:, None]


def prepared(kind: str) -> Prepared:
    """An experiment with rows of 52 bytes or so, and steps over all samples of a client at once."""
    settings: dict[str, Any] = {"model": "mlp:5", "batch": "full", "steps": 3, "lr": 0.1}
    objects, data = Objects(), clients(regression=kind == "regression", kind=int if kind == "integers" else np.float32)
    if kind == "several":
        objects.model = Pair()
        data = [((x, np.ascontiguousarray(x[:, :6])), y) for x, y in data]
    elif kind in ("images", "tokens"):
        settings["model"] = "lenet" if kind == "images" else "gru:4"
        data = [(drawn(kind, y), y) for _, y in data]
    elif kind == "lazy":
        data = [ft.lazy(Items(*pair)) for pair in data]
    elif kind == "table":
        settings["dtype"] = "float64"
        pandas = pytest.importorskip("pandas")
        data = [pandas.DataFrame(x).rename(columns=str).assign(label=y) for x, y in data]
    elif kind == "made by hand":
        whole = torch.cat([torch.from_numpy(x) for x, _ in data]), torch.cat([torch.from_numpy(y) for _, y in data])
        ends = torch.tensor(SIZES).cumsum(0)
        bounds = torch.stack([ends - torch.tensor(SIZES), ends - 9, ends - 5, ends], 1)
        names = tuple(map(str, range(len(SIZES))))
        objects.data = FederatedData("hand", *whole, bounds, ("0", "1"), names)
    objects.data = objects.data or data
    loss = "mse" if kind == "regression" else "cross-entropy"
    return prepare(Experiment(loss=loss, **settings), objects)


def work(made: Prepared, client: int, data: ClientData) -> list[Any]:
    """The client's upload, and its metrics."""
    message = {"theta": made.terms.initial}
    trained, state = Site(client, data, made.terms).work(Train(1, client, message), {})
    measured, _ = Site(client, data, made.terms).work(Evaluate(1, client, trained.upload), state)
    assert not trained.error
    assert not measured.error
    return [trained.upload["theta"].tolist(), measured.measured]


KINDS = ["floats", "regression", "integers", "several", "lazy", "table", "made by hand"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_alone_has_the_bits_of_the_federation(kind: str) -> None:
    made = prepared(kind)
    for client in range(len(SIZES)):
        data = made.data.client(client)
        copies = tuple(part.clone() for part in tensors(held(data.x)))
        alone = replace(data, x=Several(copies) if kind == "several" else copies[0], y=data.y.clone())
        assert work(made, client, data) == work(made, client, alone)


@pytest.mark.parametrize("kind", [*KINDS, "images", "tokens"])
def test_one_client_alone_is_the_same_client_in_memory_of_its_own(kind: str) -> None:
    made = prepared(kind)
    for client in range(len(SIZES)):
        alone = made.data.only(client)
        assert (alone.names, alone.classes, alone.n_outputs) == (
            made.data.names,
            made.data.classes,
            made.data.n_outputs,
        )
        assert alone.vocabulary == made.data.vocabulary
        assert alone.n_samples.nonzero().flatten().tolist() == [client]
        assert len(alone.y) == SIZES[client]
        assert not len(alone.client(client - 1).y)
        own, mine = (tensors(held(data.client(client).x)) for data in (made.data, alone))
        for one, other in zip(own, mine, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
            assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
        assert work(made, client, made.data.client(client)) == work(made, client, alone.client(client))


def test_what_is_known_of_others_is_left_out() -> None:
    pandas = pytest.importorskip("pandas")
    tables = {name: pandas.DataFrame({"ward": [name] * 9, "label": [name] * 9}) for name in ("a", "b", "c")}
    data = ft.federate(from_list(tables), partition="natural", labels="own")
    alone = data.only(1)
    assert (alone.own_classes, alone.own_names) == ((0, 1, 0), ((), ("b",), ()))
    assert alone.facts == ((), data.facts[1], ())
    assert alone.preprocessing_of(1) == data.preprocessing_of(1)
    assert data.counts()[1].tolist() == alone.counts()[1].tolist()
    assert not alone.counts()[0].any()


@pytest.mark.parametrize("lazy", [False, True])
def test_a_sites_own_data_take_their_place_in_the_federation(lazy: bool) -> None:
    data = [ft.lazy(Items(*pair)) for pair in clients()] if lazy else clients()
    names = tuple(map(str, range(len(data))))
    together = ft.federate(from_list(data), partition="natural", test=0, validation=0)
    for client in range(len(data)):
        own = ft.federate(from_list([data[client]]), partition="natural", test=0, validation=0)
        placed = own.placed(client, names)
        assert placed.fingerprint() == together.only(client).fingerprint()
        assert placed.client(client).name == names[client]
    with pytest.raises(ValueError, match="data of 10 clients"):
        together.placed(0, names)


@pytest.mark.parametrize("kind", KINDS)
def test_addresses(kind: str) -> None:
    data = prepared(kind).data
    for client in range(len(SIZES)):
        x, y = data.train(client)
        assert len(y) > 0
        assert [part.data_ptr() % 64 for part in tensors(held(x))] == [0] * len(tensors(held(x)))
        assert y.data_ptr() % 64 == 0 or not y.is_floating_point()


def test_the_checksum_is_that_of_samples_without_gaps() -> None:
    data = ft.federate(from_list(clients(regression=True)), partition="natural", new_clients=2)
    assert len(data.y) > sum(SIZES)
    bounds, end = data.bounds.clone(), 0
    for client, size in enumerate((data.bounds[:, 3] - data.bounds[:, 0]).tolist()):
        bounds[client] += end - bounds[client, 0].item()
        end += size
    packed = [torch.cat([getattr(data.client(c), part) for c in range(data.n_clients)]) for part in ("y", "x")]
    checksum = 0
    for tensor in (bounds, *packed):
        checksum = crc32(tensor.numpy().tobytes(), checksum)
    assert data.fingerprint() == f"{checksum:08x}"
    assert FederatedData("packed", packed[1], packed[0], bounds, (), data.names).fingerprint() == data.fingerprint()


def test_samples_whose_rows_are_lines_have_no_gaps() -> None:
    data = ft.federate(from_list(clients(features=16)), partition="natural")
    assert len(data.y) == sum(SIZES)
    assert data.aligned() is data


def test_clients_that_come_later_are_aligned_too() -> None:
    data = ft.federate(from_list(clients()[:3]), partition="natural")
    both = data.with_new(ft.federate(from_list(clients()[3:]), partition="natural"))
    assert torch.equal(both.x[: len(data.y)], data.x)
    assert all(both.train(client)[0].data_ptr() % 64 == 0 for client in range(len(SIZES)))
    assert torch.equal(both.client(3).x.sum(1).sort()[0], torch.from_numpy(clients()[3][0]).sum(1).sort()[0])
