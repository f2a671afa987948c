"""The guard of the mean: who is left out, that nobody else is, and that no bit changes where nobody is."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.experiment.aggregation_rule import Rule
from fedtailor.method import Each, Mean
from fedtailor.methods import all_methods
from fedtailor.methods.fedavg import FedAvg
from fedtailor.server.aggregation import Aggregator
from fedtailor.server.aggregation.robust import GuardedAggregator
from fedtailor.training.layout import Layout
from tests.helpers import assert_same, digits, final, numbers

SIZE = 6
LAYOUT = Layout(SIZE, slice(0, 4), slice(4, SIZE))
INITIAL = torch.full((SIZE,), 2.0)  # of length 4.9: changes below 0.49 are short
SAMPLES = torch.arange(1, 13)


class Several(FedAvg):
    uploads = {"theta": Mean(), "rows": Each(), "weight": Each(record=True), "one": Each()}  # noqa: RUF012


def change(length: float) -> Tensor:
    return torch.tensor([length, 0, 0, 0, 0, 0])


def left_out(
    lengths: list[float], order: list[int] | None = None, name: str = "theta", times: float = 100.0, failed: int = -1
) -> list[int]:
    """Which of the clients with changes of these lengths are left out; `name` is the upload that they are of."""
    messages = {client: {"theta": INITIAL + client} for client in range(len(lengths))}
    method, clients = Several(), list(messages)
    guarded = GuardedAggregator(
        method.uploads, clients, SAMPLES, LAYOUT, times=times, method=method, messages=messages, initial=INITIAL
    )
    refused: dict[int, str] = {}
    for client in order or clients:
        upload = {"theta": messages[client]["theta"], "rows": change(1.0)}
        upload |= {"weight": change(1.0), "one": torch.tensor(1.0)}
        moved = change(lengths[client])
        upload[name] = upload["theta"] + moved if name == "theta" else moved if name != "one" else moved[0]
        refused |= guarded.put(client, None if client == failed else upload)
    total = guarded.total()
    assert total.clients == [client for client in clients if client not in {*refused, failed}]
    assert list(total.each("rows")) == total.clients
    assert all(f"its upload '{name}' is more than 100 times as long" in why for why in refused.values())
    return sorted(refused)


def test_a_change_far_longer_than_usual_is_left_out_wherever_its_client_stands() -> None:
    for place in range(8):
        lengths = [1.0, 0.8, 1.2, 3.0, 0.9, 1.1, 0.7, 2.0]
        lengths[place] = 150.0
        assert left_out(lengths) == [place]
        lengths[place] = 90.0
        assert left_out(lengths) == []


def test_two_of_the_first_five_are_left_out_and_the_order_of_arrival_does_not_matter() -> None:
    lengths = [1e3, 1e4, 1.0, 1.0, 1.0, 1.0, 1e6]
    assert left_out(lengths) == [0, 1, 6]
    for order in itertools.islice(itertools.permutations(range(7)), 0, None, 501):
        assert left_out(lengths, list(order)) == [0, 1, 6]


@pytest.mark.parametrize("name", ["rows", "theta"])
def test_means_and_single_uploads_are_guarded(name: str) -> None:
    assert left_out([1.0, 1.0, 1e5, 1.0], name=name) == [2]


@pytest.mark.parametrize("name", ["weight", "one"])
def test_single_numbers_and_what_is_for_the_record_are_not(name: str) -> None:
    assert left_out([1.0, 1.0, 1e5, 1.0], name=name) == []


def test_short_changes_are_not_told_from_each_other() -> None:
    """One client that still learns where the others have nothing left to learn."""
    tenth = float(INITIAL.norm()) / 10
    assert left_out([1e-6, 1e-6, 1e-6, 99 * tenth, 0.0]) == []
    assert left_out([1e-6, 1e-6, 1e-6, 101 * tenth, 0.0]) == [3]


def test_what_counts_is_the_change_and_not_the_model() -> None:
    """Every client was sent a model of its own, the last one a huge one."""
    messages = {client: {"theta": torch.full((SIZE,), 1.0 if client < 3 else 1e6)} for client in range(4)}
    method: Any = FedAvg()
    guarded = GuardedAggregator(
        method.uploads, list(messages), SAMPLES, LAYOUT, times=100.0, method=method, messages=messages, initial=INITIAL
    )
    assert not any(guarded.put(client, {"theta": message["theta"] + 1}) for client, message in messages.items())
    assert guarded.total().clients == [0, 1, 2, 3]


@pytest.mark.parametrize(("start", "size"), [(0, SIZE), (1, 4)])
def test_buffers_of_models_and_bodies_do_not_count(start: int, size: int) -> None:
    """A client with many samples counts many batches."""
    layout = Layout(SIZE, slice(1, 5), slice(5, SIZE), buffers=(slice(2, 3),))
    method: Any = FedAvg()
    sent = {"theta": torch.zeros(size)}
    for place, out in ((2, False), (3, True)):
        guarded = GuardedAggregator(
            method.uploads, [0, 1, 2], SAMPLES, layout,
            times=100.0, method=method, messages=dict.fromkeys((0, 1, 2), sent), initial=INITIAL,
        )  # fmt: skip
        far = torch.ones(size)
        far[place - start] = 1e6
        refused = [guarded.put(client, {"theta": x}) for client, x in enumerate((torch.ones(size), far, far * 0))]
        assert any(refused) == out
        assert far[place - start] == 1e6  # what is measured stays as it is


def test_of_two_nobody_knows_which_is_wrong() -> None:
    assert left_out([1.0, 1e6]) == []
    assert left_out([1.0, 1e6, 1.0], failed=2) == []
    assert left_out([1.0, 1e6, 1.0]) == [1]


def test_numbers_of_which_the_square_is_infinite() -> None:
    assert left_out([1.0, 1.0, 3e38, 1.0]) == [2]


def test_few_uploads_wait_for_each_other() -> None:
    messages = {client: {"theta": INITIAL} for client in range(12)}
    method: Any = FedAvg()
    guarded = GuardedAggregator(
        method.uploads, list(messages), SAMPLES, LAYOUT, times=100.0, method=method, messages=messages, initial=INITIAL
    )
    added = []
    for client in messages:
        guarded.put(client, {"theta": INITIAL})
        added.append(len(guarded.clients))
    assert added == [0, 0, 0, 0, 5, 6, 7, 8, 9, 10, 11, 12]


def test_the_sum_has_the_bits_of_the_mean() -> None:
    method: Any = FedAvg()
    stream = torch.Generator().manual_seed(0)
    found = {client: {"theta": torch.randn(SIZE, generator=stream)} for client in range(12)}
    plain = Aggregator(method.uploads, list(found), SAMPLES, LAYOUT)
    guarded = GuardedAggregator(
        method.uploads, list(found), SAMPLES, LAYOUT, times=100.0, method=method, messages=found, initial=INITIAL
    )
    for client, upload in found.items():
        plain.put(client, upload)
        guarded.put(client, upload)
    assert torch.equal(plain.total()["theta"], guarded.total()["theta"])


# --- runs ---

COMMON: dict[str, Any] = {
    "data": digits([40, 31, 28, 40, 27, 32, 35]), "model": "mlp:8", "rounds": 3, "epochs": 1, "engine": "in-process",
}  # fmt: skip
ONE = "scaling, clients=0, factor=10000"


@pytest.mark.parametrize("method", [name for name in all_methods() if name != "local"])
def test_one_absurd_client_is_left_out_of_every_method_and_named(method: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = ft.run(method, attack=ONE, **COMMON)
    assert [record.failed for record in result.rounds] == [[0]] * 3
    assert result.rounds[-1].misled == []
    said = [text for warning in caught if "left out" in (text := str(warning.message))]
    assert len(said) == 1
    assert "client 0 left out: the change of its upload" in said[0]
    assert "--aggregation mean:inf" in said[0]


@pytest.mark.parametrize("method", ["fedavg", "pgfed"])
def test_the_same_bits_on_every_engine_and_after_a_resume(method: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        here = ft.run(method, attack=ONE, **COMMON)
        for engine in ("processes", "sites-in-memory"):
            other = ft.run(method, attack=ONE, workers=2, **{**COMMON, "engine": engine})
            assert numbers(other.rounds) == numbers(here.rounds)
            assert_same(final(other), final(here))
        ft.run(method, attack=ONE, out=tmp_path / "run", **{**COMMON, "rounds": 1})
        resumed = ft.resume(tmp_path / "run", data=COMMON["data"], rounds=3)
    assert_same(final(resumed), final(here))


@pytest.mark.parametrize("method", all_methods())
def test_without_hostile_clients_it_changes_no_bit(method: str) -> None:
    assert_same(final(ft.run(method, **COMMON)), final(ft.run(method, aggregation="mean:inf", **COMMON)))


def test_it_can_be_turned_off() -> None:
    result = ft.run("fedavg", attack=ONE, aggregation="mean:inf", **COMMON)
    assert [record.failed for record in result.rounds] == [[]] * 3
    assert float(result.server_state["theta"].norm()) > 100


def test_how_it_is_written() -> None:
    assert (str(Rule.parse("mean")), Rule.parse("mean").amount) == ("mean", 100)
    assert str(Rule.parse("mean:100")) == "mean"
    assert str(Rule.parse("mean:INF")) == "mean:inf"
    assert str(Rule.parse(str(Rule.parse("mean:1e3")))) == "mean:1000.0"
    for wrong in ("mean:0.5", "mean:nan", "mean:", "mean:-inf", "mean:x"):
        with pytest.raises(ValueError, match="mean:inf"):
            Rule.parse(wrong)
