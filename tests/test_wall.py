"""The wall: whatever a method tries at the server, it gets nothing of a client but what the client uploaded.

A spy puts a secret into its clients' states. Then, in each of its functions at the server, it looks at all that can be
reached from `server`, and from the loop that holds it, for these numbers.
"""

import functools
import gc
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import PrivateAttr
from torch import Tensor

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor.messages import Reply
from fedtailor.method import Uploads
from fedtailor.server.aggregation import Aggregator
from fedtailor.server.loop import Loop
from tests.spy import find, reachable

CLIENTS, ROUNDS = 3, 3
SETTINGS: dict[str, Any] = {
    "data": "digits",
    "clients": CLIENTS,
    "rounds": ROUNDS,
    "epochs": 1,
    "model": "mlp:4",
    "checkpoint_every": 1,
}
looked: list[tuple[str, int]] = []  # where and in which round the spy looked
found: list[tuple[str, int, str]] = []  # and what it found


@functools.cache
def secret(client: int) -> Tensor:
    return torch.rand(64, generator=torch.Generator().manual_seed(4711 + client))


SECRETS = [secret(client) for client in range(CLIENTS)]


def loops(server: ft.Server) -> list[Loop]:
    """The loops that hold this server, by attribute."""
    referrers = gc.get_referrers(server)
    behind = [thing for held in referrers if isinstance(held, dict) for thing in gc.get_referrers(held)]
    return [thing for thing in [*referrers, *behind] if isinstance(thing, Loop)]


def attempts(server: ft.Server) -> list[object]:
    """What the server's own functions give for every client and every round."""
    results: list[object] = [server.kept_of(range(server.n_clients), "secret"), server.initial_for(1)]
    assert server.initialise is not None
    results += [server.initialise(number) for number in range(1, 3)]
    results += [(clients, rows.clone()) for clients, rows in server.kept("secret")]
    for client in range(server.n_clients):
        results.append(server.store.get(client))
        for version in range(server.round + 2):
            try:
                results.append(server.store.at(client, version))
            except FedtailorError as error:
                results.append(str(error))
    return results


def files(directory: Path | None) -> list[bytes]:
    """All that is written in the server's own directory."""
    return [path.read_bytes() for path in directory.rglob("*") if path.is_file()] if directory is not None else []


class Spy(ft.Method):
    """FedAvg that looks around at the server, wherever it can."""

    def _look(self, where: str, server: ft.Server, *more: object) -> None:
        holding = loops(server)
        assert holding or server.round == 0  # the search from there is meant to take place
        mine = attempts(server)
        ways = find(SECRETS, server, *holding, *more, *mine, files(server.store.directory))
        looked.append((where, server.round))
        found.extend((where, server.round, way) for way in ways)

    def start(self, server: ft.Server) -> None:
        super().start(server)
        self._look("start", server)

    def broadcast(self, server: ft.Server) -> ft.Message:
        self._look("broadcast", server)
        return super().broadcast(server)

    def send_all(self, server: ft.Server) -> dict[int, ft.Message]:
        self._look("send_all", server)
        return dict(super().send_all(server))

    def send(self, server: ft.Server, client: int) -> ft.Message:
        self._look("send", server)
        return {"theta": server.state["theta"]}

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        client.state["secret"] = secret(client.id).clone()
        client.state[f"round {client.round}"] = secret(client.id) + 0.0
        return {"theta": client.descend(message["theta"])}

    def receive(self, server: ft.Server, total: ft.Total) -> None:
        self._look("receive", server, total)
        super().receive(server, total)

    def observe(self, server: ft.Server) -> ft.Message:
        self._look("observe", server)
        return {"n": torch.tensor(server.round)}

    def global_model(self, server: ft.Server) -> Tensor | None:
        self._look("global_model", server)
        return super().global_model(server)


class Uploading(Spy):
    """The same, but the clients upload the secret and the server sees it singly: the search must find it."""

    uploads: ClassVar[Uploads] = {"theta": ft.Mean("samples"), "secret": ft.Each()}

    def upload_like(self, server: ft.Server, client: int) -> ft.Message:
        return {"secret": torch.zeros(64)}

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {**super().train(client, message), "secret": client.state["secret"]}


class Averaging(Spy):
    """The same, but the server sees the mean of the secrets alone."""

    uploads: ClassVar[Uploads] = {"theta": ft.Mean("samples"), "secret": ft.Mean("equal")}

    def start(self, server: ft.Server) -> None:
        server.state["secret"] = torch.zeros(64)
        super().start(server)

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {**super().train(client, message), "secret": client.state["secret"]}


def spy_on(method: ft.Method, **settings: Any) -> ft.RunResult:
    looked.clear()
    found.clear()
    return ft.run(method, **SETTINGS, **settings)


ENGINES = pytest.mark.parametrize("engine", [{"engine": "in-process"}, {"engine": "processes", "workers": 2}])


@ENGINES
@pytest.mark.parametrize("states", ["memory", "disk", "not recorded"])
def test_a_spy_at_the_server_gets_nothing(states: str, engine: dict[str, Any], tmp_path: Path) -> None:
    where = {} if states == "not recorded" else {"out": tmp_path / "run", "states": states}
    result = spy_on(Spy(), **where, **engine)
    assert found == []
    for function in ("broadcast", "send_all", "send", "receive", "observe"):
        assert {round for name, round in looked if name == function} == {1, 2, 3}, function
    for client in range(CLIENTS):  # there was something to be found
        assert torch.equal(result.client_state(client)["secret"], secret(client))
    if states != "not recorded":
        written = [path.read_bytes() for path in (tmp_path / "run/checkpoint/sites").iterdir()]
        assert any(secret(0).numpy().tobytes() in content for content in written)


@ENGINES
def test_no_reply_brings_more_than_the_upload(engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[tuple[int, list[str]]] = []
    take = Loop._take

    def looking(loop: Loop, total: Aggregator, client: int, of_all: dict[int, Reply], received: Any) -> None:
        replies.append((loop.server.round, find(SECRETS, of_all[client])))
        assert vars(of_all[client]).keys() == {field.name for field in fields(Reply)}
        take(loop, total, client, of_all, received)

    monkeypatch.setattr(Loop, "_take", looking)
    spy_on(Spy(), evaluation={"model": "local"}, **engine)
    assert replies == [(round, []) for round in (1, 2, 3) for _ in range(CLIENTS)]


@ENGINES
def test_the_global_model_and_its_evaluation_are_no_way_either(engine: dict[str, Any]) -> None:
    spy_on(Spy(), evaluation={"model": "global"}, **engine)
    assert found == []
    assert {round for name, round in looked if name == "global_model"} >= {1, 2, 3}


@ENGINES
def test_local_models_and_half_of_the_clients(engine: dict[str, Any]) -> None:
    spy_on(Spy(), evaluation={"model": "local"}, participation=2, **engine)
    assert found == []


@ENGINES
def test_what_is_uploaded_singly_is_found_where_it_arrives(engine: dict[str, Any]) -> None:
    """The control: the search works, and finds nothing before the uploads came or after they were let go."""
    spy_on(Uploading(), **engine)
    assert {(where, round) for where, round, _ in found} == {("receive", round) for round in range(1, ROUNDS + 1)}
    assert len(found) >= CLIENTS * ROUNDS


@ENGINES
def test_of_a_mean_no_single_upload_is_seen(engine: dict[str, Any]) -> None:
    result = spy_on(Averaging(), **engine)
    assert found == []
    torch.testing.assert_close(result.server_state["secret"], torch.stack(SECRETS).mean(0))


def test_a_resumed_run_keeps_the_wall(tmp_path: Path) -> None:
    spy_on(Spy(), out=tmp_path / "run", engine="in-process")
    looked.clear()
    ft.resume(tmp_path / "run", rounds=ROUNDS + 1, method=Spy())
    assert found == []
    assert {round for _, round in looked} == {ROUNDS + 1}


def test_failing_clients_leave_nothing_behind(tmp_path: Path) -> None:
    """In process an exception holds the frames of the client's work, and with them its state."""

    class Failing(Spy):
        def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
            upload = super().train(client, message)
            if client.id == 1 and client.round >= 2:
                raise ValueError("a client's own matter")
            return upload

    with pytest.warns(ft.ClientFailure):
        spy_on(Failing(), engine="in-process")
    assert found == []
    assert {round for name, round in looked if name == "receive"} == {1, 2, 3}


def test_the_simulation_itself_holds_the_secrets() -> None:
    """Another control: from the sites, which only the simulation has, there is a way."""
    result = spy_on(Spy(), engine="in-process")
    assert find(SECRETS, result.simulation.sites)
    assert find(SECRETS, result.simulation)
    assert not find(SECRETS, result.simulation.loop)
    assert not find(SECRETS, result.simulation.server)


# --- nothing is on both sides ---


UNCHANGING = (str, bytes, int, float, bool, slice, tuple, frozenset, type(None), torch.dtype, torch.device)


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedper", "pgfed", "fedacs", "ifca", "pfedmb"])
def test_server_and_sites_share_nothing_that_can_change(method: str) -> None:
    """In process, what one side writes into an object that the other has too would cross without a message."""
    simulation = ft.run(method, **SETTINGS, engine="in-process").simulation
    here, there = (
        {id(thing): (thing, way) for thing, way in reachable(root)} for root in (simulation.loop, simulation.sites)
    )
    shared = [
        (here[number][1], there[number][1])
        for number in here.keys() & there.keys()
        if not isinstance(here[number][0], UNCHANGING)
    ]
    assert shared == []
    memory = [
        {thing.untyped_storage().data_ptr() for thing, _ in side.values() if isinstance(thing, Tensor)} - {0}
        for side in (here, there)
    ]
    assert not memory[0] & memory[1]
    assert all(memory)


class Pocket(Spy):
    """A spy whose clients put their secrets wherever they can reach."""

    _pocket: dict[str, Tensor] = PrivateAttr(default_factory=dict)

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        upload = super().train(client, message)
        self._pocket[f"{client.id}"] = secret(client.id)
        with torch.no_grad():
            client.network.vector[:64] = secret(client.id)
            client.network.module.pocket = secret(client.id)  # type: ignore[assignment]
            message["theta"][:64] = secret(client.id)
        client.layout.layers["pocket"] = secret(client.id)  # type: ignore[assignment]
        return upload

    def _look(self, where: str, server: ft.Server, *more: object) -> None:
        super()._look(where, server, *more, self)


@ENGINES
def test_a_methods_own_attributes_do_not_cross(engine: dict[str, Any]) -> None:
    """Neither do the network, the message or the layout: they are the client's own."""
    spy_on(Pocket(), **engine)
    assert found == []
    assert {round for name, round in looked if name == "receive"} == {1, 2, 3}


# --- the search finds what is hidden ---


class Slots:
    __slots__ = ("inside",)

    def __init__(self, inside: object) -> None:
        self.inside = inside

    def method(self) -> object:
        return self.inside


def closure(inside: Tensor) -> Any:
    return lambda: inside


def default(inside: Tensor) -> Any:
    def function(held: Tensor = inside) -> Tensor:
        return held

    return function


class WithGradient(torch.nn.Module):
    def __init__(self, inside: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(64))
        self.weight.grad = inside.clone()


HIDDEN: dict[str, Any] = {
    "itself": lambda s: s,
    "attribute": lambda s: type("Thing", (), {"__init__": lambda self: setattr(self, "x", s)})(),
    "slots": Slots,
    "bound method": lambda s: Slots(s).method,
    "containers": lambda s: {"a": [({1: (s,)},)]},
    "closure": closure,
    "default": default,
    "partial": lambda s: functools.partial(print, 1, here=s),
    "part of a larger tensor": lambda s: torch.cat([torch.zeros(100), s, torch.zeros(3)]),
    "memory behind a view": lambda s: torch.cat([s, torch.zeros(3)])[-2:],
    "parameter": lambda s: torch.nn.Parameter(s.clone()),
    "gradient": WithGradient,
    "NumPy": lambda s: {"a": np.array([s.numpy(), s.numpy()])},
    "bytes": lambda s: [b"head" + s.numpy().tobytes() + b"tail"],
    "server": lambda s: ft.Server(torch.zeros(1), None, torch.ones(2), 1.0, {"theta": s}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("where", HIDDEN)
def test_the_search_finds_what_is_hidden(where: str) -> None:
    assert find(SECRETS, HIDDEN[where](secret(1)))
    assert not find(SECRETS, HIDDEN[where](torch.rand(64)))


def test_the_search_stays_out_of_modules_types_and_globals() -> None:
    def function() -> list[Tensor]:
        return SECRETS

    assert not find(SECRETS, function, Spy(), torch, Spy, type(None))
    assert sum(1 for _ in reachable(Spy())) < 1000
