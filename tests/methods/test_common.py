"""The common suite: what every method in the catalogue must do, now and later."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import fedtailor as ft
from fedtailor.methods import CATALOGUE, VARIANTS, find_method
from fedtailor.transport import Bench, Result, Task
from tests.helpers import assert_same, digits, files, final, make_federation, numbers

SMALL: dict[str, Any] = {
    "data": "digits",
    "clients": 6,
    "model": "mlp:16",
    "rounds": 4,
    "participation": 0.5,
    "max_train": 40,
    "seed": 3,
}

every_method = pytest.mark.parametrize("method", [*CATALOGUE, *VARIANTS])


@every_method
def test_same_bits_on_every_engine(method: str) -> None:
    reference = ft.run(method, engine="in-process", **SMALL)
    for workers in (1, 2, 3):
        other = ft.run(method, engine="processes", workers=workers, **SMALL)
        assert numbers(other.rounds) == numbers(reference.rounds)
        assert other.clients == reference.clients
        assert_same(final(other), final(reference))


@every_method
@pytest.mark.parametrize("states", ["memory", "disk"])
def test_resumes_with_the_same_bits(method: str, states: str, tmp_path: Path) -> None:
    settings = {**SMALL, "states": states, "momentum": 0.5, "keep_momentum": True, "engine": "in-process"}
    whole = ft.run(method, out=tmp_path / "whole", **settings)

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.run(method, out=tmp_path / "halves", on_round=stop, **settings)
    assert len(ft.load(tmp_path / "halves").rounds) == 2
    resumed = ft.resume(tmp_path / "halves")
    assert numbers(resumed.rounds) == numbers(whole.rounds)
    assert resumed.clients == whole.clients
    assert files(tmp_path / "halves/checkpoint") == files(tmp_path / "whole/checkpoint")


@every_method
def test_messages_are_named_tensors_and_their_bytes_are_counted_exactly(method: str) -> None:
    federation = make_federation(method, **SMALL)
    for number in (1, 2):
        participants = federation._call(number)
        down = {client: federation.method.send(federation.server, client) for client in participants}
        up = {client: federation.bench.do(_task(number, client, down[client])) for client in participants}
        federation.round(number)
        record = federation.clients[-1]
        for client in participants:
            assert not up[client].error
            assert record["bytes_down"][str(client)] == _payload(down[client])
            assert record["bytes_up"][str(client)] == _payload(up[client].reply)
        sums = federation.rounds[-1]
        assert sums["bytes_up"] == sum(record["bytes_up"].values())
        assert sums["bytes_down"] == sum(record["bytes_down"].values())


def _task(number: int, client: int, message: ft.Message) -> Task:
    return Task("train", number, (client,), {name: tensor.clone() for name, tensor in message.items()})


def _payload(message: ft.Message) -> int:
    """The bytes of a really serialised message, without the 8 bytes and the header that name its tensors."""
    serialised = save({name: tensor.clone() for name, tensor in message.items()})
    return len(serialised) - 8 - int.from_bytes(serialised[:8], "little")


@every_method
def test_client_state_holds_only_tensors_and_nobody_else_changes_it(method: str) -> None:
    federation = make_federation(method, **SMALL)
    federation.round(1)
    absent = [client for client in range(6) if client not in federation.server.participants]
    assert absent
    for client in range(6):
        state = federation.states.get(f"client-{client}")
        assert all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items())
        assert not state or client not in absent


@every_method
def test_work_leaves_the_message_and_the_old_state_alone(method: str) -> None:
    """A method that changes what it was given in place would corrupt the server, or a failed client's state."""
    federation = make_federation(method, **{**SMALL, "participation": "all"})
    federation.round(1)
    before = {name: tensor.clone() for name, tensor in federation.server.state.items()}
    states = {c: {n: t.clone() for n, t in federation.states.get(f"client-{c}").items()} for c in range(6)}
    message = federation.method.send(federation.server, 0)
    list(federation.engine.run([Task("train", 2, (0,), message, partial(federation.states.get, "client-0"))]))
    assert_same(before, federation.server.state)
    for client in range(6):
        assert_same(states[client], federation.states.get(f"client-{client}"))


def _survives(method: str, data: list[Any], **settings: Any) -> ft.RunResult:
    result = ft.run(method, data=data, model="mlp:16", rounds=3, engine="in-process", **settings)
    assert all(record["failed"] == [] for record in result.rounds)
    assert all(tensor.isfinite().all() for tensor in final(result).values())
    assert result.rounds[-1]["loss"] is not None
    return result


@every_method
def test_survives_a_client_with_one_sample(method: str) -> None:
    result = _survives(method, digits([1, 30, 30]))
    assert result.per_client[0]["accuracy"] is None  # its only sample trains
    assert result.per_client[1]["accuracy"] is not None


@every_method
def test_survives_a_client_with_one_class(method: str) -> None:
    data = digits([30, 30, 30])
    data[0] = (data[0][0], torch.zeros_like(data[0][1]))
    result = _survives(method, data)
    assert result.per_client[0]["auc"] is None


@every_method
def test_survives_one_participant_and_nobody(method: str) -> None:
    _survives(method, digits([30, 30, 30]), participation=1)
    result = _survives(method, digits([30, 30]), participation="independent:0.3", seed=1)
    assert [] in [record["participants"] for record in result.rounds]


@every_method
def test_survives_a_missing_reply(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    do: Callable[[Bench, Task], Result] = Bench.do

    def fails_once(bench: Bench, task: Task) -> Result:
        if task.kind == "train" and task.round == 2 and task.clients == (1,):
            return Result(task.clients, error="the power went off")
        return do(bench, task)

    monkeypatch.setattr(Bench, "do", fails_once)
    with pytest.warns(ft.ClientFailure, match=r"round 2: client 1 left out: the power went off\."):
        result = ft.run(method, data=digits([30, 30, 30]), model="mlp:16", rounds=3, engine="in-process")
    assert [record["failed"] for record in result.rounds] == [[], [1], []]
    assert "1" not in result.clients[1]["bytes_up"]


@every_method
def test_runs_with_batch_norm_and_momentum_and_new_clients(method: str) -> None:
    result = ft.run(
        method,
        **{**SMALL, "model": "resnet", "max_train": 12, "rounds": 2},
        momentum=0.9,
        keep_momentum=True,
        new_clients=2,
        evaluation={"clients": "new"},
        engine="in-process",
    )
    new = result._federation.data.new
    assert set(result.per_client) == new
    assert all(tensor.isfinite().all() for tensor in final(result).values())
    assert not any(set(record["participants"]) & new for record in result.rounds)


@every_method
def test_learns(method: str) -> None:
    """Ten rounds on digits bring every method far above the most frequent class of each client."""
    result = ft.run(method, data="digits", clients=8, rounds=10, epochs=2, max_train=80, seed=0, engine="in-process")
    counts = result._federation.data.counts("test")
    chance = float((counts.max(1).values / counts.sum(1)).mean())
    assert result.accuracy is not None
    assert result.accuracy > chance + 0.25
    assert result.rounds[-1]["loss"] < result.rounds[0]["loss"]


@every_method
def test_personal_model_is_a_state_dict_of_the_network(method: str) -> None:
    """What is handed out predicts exactly what the run measured."""
    result = ft.run(method, engine="in-process", **SMALL)
    run = result._federation
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    for client in (0, 5):
        module.load_state_dict(result.personal(client))
        x, y = run.data.test(client)
        accuracy = (module(x).argmax(1) == y).double().mean().item()
        assert accuracy == pytest.approx(result.per_client[client]["accuracy"], abs=1e-12)


@every_method
def test_every_parameter_is_described(method: str) -> None:
    kind = type(find_method(method))
    assert (kind.__doc__ or "").split("\n")[0].endswith((".", ")."))
    assert kind.paper or method == "local"
    assert "new clients" in (kind.__doc__ or "").lower()  # what one gets that never took part
    assert all(field.description for field in kind.model_fields.values())
    assert not set(kind.model_fields) & set(ft.Experiment.model_fields)  # one name, one meaning
    json.dumps(kind().model_dump())
