"""The server's side of a method: what it keeps of clients, single uploads as matrices, and what a method declares."""

import re
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor import method
from fedtailor.messages.store import Store
from fedtailor.method import Server, Total, Uploads, room
from fedtailor.server.setup import describe_uploads
from fedtailor.training.layout import Layout
from fedtailor.training.optimizer import server_step

LAYOUT = Layout(4, slice(0, 4), slice(4, 4))


def seen(tensors: dict[int, Tensor]) -> Total:
    """What the server sees of a round in which each of these clients uploaded one tensor, seen singly."""
    return Total(sorted(tensors), torch.ones(len(tensors)), {}, {}, {"t": dict(sorted(tensors.items()))})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.arange(3),
        torch.tensor([True, False]),
        torch.rand(2, 3, dtype=torch.float64),
        torch.rand(5).bfloat16(),
        torch.rand(2, 0),
        torch.rand(4, 6).T,
    ],
)
def test_single_uploads_are_rows_in_the_order_of_clients(tensor: Tensor) -> None:
    total = seen({2: tensor, 0: ~tensor if tensor.dtype == torch.bool else tensor * 2})
    rows = total.rows("t")
    expected = torch.stack([total.each("t")[0], tensor])
    assert rows.dtype == expected.dtype
    assert torch.equal(rows, expected)
    assert rows.data_ptr() % 64 == 0  # as PyTorch's own memory
    assert rows.is_contiguous()
    assert total.index.tolist() == [0, 2]


def test_a_single_upload_has_a_mean_by_samples() -> None:
    total = Total([1, 3], torch.tensor([1, 3]), {}, {}, {"t": {1: torch.tensor([1.0]), 3: torch.tensor([5.0])}})
    assert total["t"].tolist() == [4.0]
    with pytest.raises(KeyError):
        total["u"]
    with pytest.raises(KeyError):
        Total([1], torch.tensor([1]), {"t": torch.ones(1)}, {}, {}).each("t")  # a mean is not seen singly


def test_memory_for_rows_is_aligned_and_of_its_own() -> None:
    like = torch.rand(3, 5, dtype=torch.float64)
    one, other = room(4, like), room(4, like)
    assert one.shape == (4, 3, 5)
    assert one.dtype == like.dtype
    assert one.data_ptr() % 64 == 0
    assert one.fill_(1.0).sum() == 60
    assert one.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("block", [1, 8, 1000])  # numbers
def test_what_is_kept_of_clients_is_mixed_in_blocks_of_any_size(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method, "BLOCK", block)
    models, initial = torch.rand(5, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    server = Server(initial, LAYOUT, torch.ones(5), 2.0, store=Store(None, "server"))
    for client in (0, 2, 4):
        server.keep(client, {"w": models[client]})
    models[[1, 3]] = initial  # of these nothing is kept
    assert torch.equal(torch.cat([rows.clone() for _, rows in server.kept("w")]), models)
    assert torch.equal(torch.stack(server.kept_of([3, 0], "w")), models[[3, 0]])
    weights = torch.rand(2, 5, dtype=torch.float64)
    torch.testing.assert_close(server.mixed(weights, "w"), weights @ models)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_the_servers_step_is_the_shared_one(optimizer: Any) -> None:
    server = Server(torch.zeros(4), LAYOUT, torch.ones(3), 3.0, {"theta": torch.ones(4)})
    state = dict(server.state)
    for gradient in torch.rand(3, 4, generator=torch.Generator().manual_seed(0)):
        server.step("theta", gradient, 0.1, optimizer)
        server_step(state, "theta", gradient, 0.1, optimizer)
    assert server.state.keys() == state.keys()
    assert torch.equal(server.state["theta"], state["theta"])


def test_the_server_warns_once_of_each_subject() -> None:
    server = Server(torch.zeros(4), LAYOUT, torch.ones(2), 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        server.warn("divergence", "It grows.")
        server.warn("divergence", "It grows still.")
        server.warn("data", "There are none.")
    assert [str(warning.message) for warning in said] == ["It grows.", "There are none."]
    assert said[0].filename == __file__  # where the method warns
    assert server.warnings == {"divergence": "It grows.", "data": "There are none."}


class Declaring(ft.Method):
    """A method with every kind of upload."""

    uploads: ClassVar[Uploads] = {
        "theta": ft.Mean("samples"),
        "step": ft.Mean("equal"),
        "branches": ft.Mean("weights"),
        "gradient": ft.Each(),
    }


def test_a_method_says_what_leaves_a_client_and_who_sees_it() -> None:
    assert describe_uploads(Declaring()) == {
        "theta": "mean by samples",
        "step": "plain mean",
        "branches": "mean by weights",
        "weights": "sum",
        "gradient": "each client's own",
    }
    assert Declaring().uploaded == {"theta", "step", "branches", "weights", "gradient"}
    assert Declaring().means == ["theta", "step", "branches"]


def test_a_message_for_each_participant_and_for_nobody_else() -> None:
    class Forgetting(ft.Method):
        def send_all(self, server: ft.Server) -> dict[int, ft.Message]:
            return {client: self.broadcast(server) for client in server.participants[1:]}

        def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
            return message

    with pytest.raises(ft.FedtailorError, match="send_all must return one message for each"):
        ft.run(Forgetting(), data="digits", clients=2, rounds=1, model="mlp:4", engine="in-process")


# --- shapes and types ---


class Raw(ft.Method):
    """FedAvg whose client 1 uploads its training data under a name that the method declares."""

    uploads: ClassVar[Uploads] = {"theta": ft.Mean("weight"), "own": ft.Each(), "loss": ft.Each()}
    where: str = "own"

    def upload_like(self, server: Server, client: int) -> ft.Message:
        return {"loss": server.initial[0]}

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        theta = client.descend(message["theta"])
        upload = {
            "theta": theta,
            "own": theta,
            "loss": client.loss(theta),
            "weight": theta.new_tensor(client.n_samples),
        }
        return {**upload, self.where: client.train_data[0]} if client.id == 1 else upload


@pytest.mark.parametrize("engine", ["in-process", "processes"])
@pytest.mark.parametrize(
    ("where", "declared"),
    [("theta", "of shape 310"), ("own", "of shape 310"), ("loss", "(one number)"), ("weight", "(one number)")],
)
def test_raw_data_under_a_declared_name_are_refused(where: str, declared: str, engine: str) -> None:
    settings = {"data": "digits", "clients": 3, "rounds": 1, "model": "mlp:4", "max_train": 20, "engine": engine}
    said = f"Raw, round 1: client 1 left out: its upload {where!r} is float32 of shape 20×1×8×8, where Raw declares "
    with pytest.warns(ft.ClientFailure, match=re.escape(f"{said}float32 {declared} (see `upload_like`).")):
        result = ft.run(Raw(where=where), **settings)
    assert result.rounds[0].failed == [1]


class Typed(ft.Method):
    """FedAvg whose clients upload numbers of a type."""

    kind: str = "float64"
    declared: bool = False

    def upload_like(self, server: Server, client: int) -> ft.Message:
        return {"theta": server.initial.to(getattr(torch, self.kind))} if self.declared else {}

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": client.descend(message["theta"].float()).to(getattr(torch, self.kind))}


@pytest.mark.parametrize("kind", ["float64", "float16", "int64"])
def test_another_type_must_be_declared(kind: str) -> None:
    settings = {"data": "digits", "clients": 2, "rounds": 1, "model": "mlp:4", "engine": "in-process"}
    said = rf"its upload 'theta' is {kind} of shape 310, where Typed declares float32 of shape 310"
    with pytest.raises(ft.FedtailorError, match=said):
        ft.run(Typed(kind=kind), on_failure="stop", **settings)
    assert ft.run(Typed(kind=kind, declared=True), **settings).finished


def test_a_fault_in_the_declaration_is_told() -> None:
    class Faulty(Typed):
        def upload_like(self, server: Server, client: int) -> ft.Message:
            return {"theta": server.state["thteta"]}

    with pytest.raises(ft.FedtailorError, match=r"^Faulty, upload_like: KeyError: 'thteta' \(test_method\.py, line"):
        ft.run(Faulty(), data="digits", clients=2, rounds=1, model="mlp:4", engine="in-process")


PAIRWISE = ["pgfed", "pgfedmo", "pgfed-ce", "fedamp", "fedfomo", "fedacs", "pfedsim", "pfedgraph", "fedcac", "fedpac"]


@pytest.mark.parametrize("name", PAIRWISE)
def test_a_number_for_each_pair_of_many_clients_is_refused_before_there_is_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(method, "half_of_memory", lambda: 4 * 5.0**2)
    settings: dict[str, Any] = {"clients": 5, "model": "mlp:4", "rounds": 1, "engine": "in-process"}
    if name in ("fedacs", "pfedsim", "pfedgraph", "fedcac", "fedpac"):  # double precision
        settings["clients"] = 3
    ft.run(name, **settings, out=tmp_path / "run")
    said = "has a number for each pair of clients: for 6 of them it would take 0 GB of memory, so choose another"
    with pytest.raises(ft.FedtailorError, match=said):
        ft.run(name, **{**settings, "clients": 6}, out=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_matrix_over_pairs_of_clients() -> None:
    server = Server(torch.zeros(4), LAYOUT, torch.ones(3), 3.0)
    assert torch.equal(server.pairs(0.5), torch.full((3, 3), 0.5))
    assert torch.equal(server.pairs(1.0, double=True), torch.ones(3, 3, dtype=torch.float64))
    assert server.pairs().data_ptr() != server.pairs().data_ptr()
