"""Clients that are not measured in a round: silent ones, those whose evaluation fails, and those that tell nothing."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.simulation import Simulation, create, reopen
from fedtailor.experiment import make_experiment
from fedtailor.messages import Evaluate, Measured, Metrics, Reply, Request, Train
from fedtailor.methods import all_methods
from fedtailor.server.evaluation import chosen_round
from fedtailor.server.records import RoundRecord
from tests.helpers import digits, make_simulation, numbers
from tests.server.changing import SMALL, Change, Changed, is_evaluation, recorded, silent, without


def replaced(client: int, measured: Any) -> Change:
    """Put something else in the place of a client's metrics."""

    def change(request: Request, reply: Reply) -> Reply | None:
        if is_evaluation(request) and client in reply.clients:
            reply.measured[reply.clients.index(client)] = measured
        return reply

    return change


def run(method: str, change: Change | None = None, **settings: Any) -> tuple[Simulation, list[RoundRecord], list[str]]:
    """Run a method over a transport that changes replies: the simulation, its rounds, and what was said."""
    simulation = make_simulation(method, **{**SMALL, **settings})
    transport = Changed(simulation, change or (lambda request, reply: reply))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = list(simulation.loop.run(transport))
    return simulation, records, [str(warning.message) for warning in caught]


def results(simulation: Simulation, but: int | None = None) -> list[dict[int, Measured]]:
    """Each round's metrics, without those of a client."""
    of_rounds = [record.results for record in simulation.loop.clients]
    return [{client: measured for client, measured in of.items() if client != but} for of in of_rounds]


# --- a client that is silent ---


@pytest.mark.parametrize("method", all_methods())
def test_a_client_that_is_silent_in_one_evaluation_changes_nothing_else(method: str) -> None:
    whole, expected, _ = run(method)
    simulation, records, said = run(method, silent(1, [2]))
    assert [record.missing for record in records] == [[], [1], []]
    assert [record.evaluated for record in records] == [4, 3, 4]
    assert results(simulation, but=1) == results(whole, but=1)
    assert [set(of) for of in results(simulation)] == [{0, 1, 2, 3}, {0, 2, 3}, {0, 1, 2, 3}]
    assert numbers([records[0]]) == numbers([expected[0]])
    assert records[2].accuracy == expected[2].accuracy
    others = [of["test"].accuracy for of in results(whole, but=1)[1].values()]
    assert records[1].accuracy == float(np.average(others))
    assert simulation.server.state.keys() == whole.server.state.keys()
    for name, tensor in simulation.server.state.items():
        assert torch.equal(tensor, whole.server.state[name]), name
    title = type(whole.loop.method).__name__
    told = [text for text in said if "client 1 " in text]
    assert told == [
        f"{title}, round 2: client 1 not measured: it did not answer.",
        f"{title}, round 3: client 1 is back.",
    ]
    assert [text for record in records for text in record.warnings.values() if "client 1 " in text] == told


@pytest.mark.parametrize("method", ["local", "ditto", "fedavg", "fedper"])
def test_only_a_measurement_of_the_present_model_may_stand(method: str) -> None:
    """Local's and Ditto's models change by training alone; FedAvg's and FedPer's with every round."""
    settings: dict[str, Any] = {"clients": 6, "participation": 2, "rounds": 8, "seed": 2}
    whole, expected, _ = run(method, **settings)
    called = {client: [record.round for record in expected if client in record.participants] for client in range(6)}
    client, (trained, again, *_) = next((c, r) for c, r in called.items() if len(r) > 1 and r[1] > r[0] + 2)
    simulation, records, _ = run(method, silent(client, range(trained + 1, 9)), **settings)
    for record, of, before in zip(records, results(simulation), results(whole), strict=True):
        stands = record.round <= trained or (method in ("local", "ditto") and record.round < again)
        assert (client in record.missing) == (not stands)
        assert of.keys() == before.keys() - set(record.missing)
        assert all(of[other] == before[other] for other in of)


def test_a_run_without_any_measurement_goes_on() -> None:
    def nobody(request: Request, reply: Reply) -> Reply | None:
        return None if is_evaluation(request) and request.round >= 2 else reply

    simulation, records, said = run("ditto", nobody, rounds=6, patience=2, validation=0.2)
    assert len(records) == 6
    assert [record.evaluated for record in records] == [4, 0, 0, 0, 0, 0]
    assert all(record.missing == [0, 1, 2, 3] for record in records[1:])
    assert all(record.loss is None and record.std is None for record in records[1:])
    assert said == ["Ditto, round 2: clients 0, 1, 2, 3 not measured: it did not answer."]
    for choose in ("last", "best-validation", "best-test", "last-5"):
        assert [found.round for found in [chosen_round(simulation.loop.rounds, choose)] if found] == [1]


def test_a_run_that_is_never_measured_has_no_result(tmp_path: Path) -> None:
    def nobody(request: Request, reply: Reply) -> Reply | None:
        return None if is_evaluation(request) else reply

    result = recorded("fedavg", nobody, tmp_path / "run")
    assert (result.value, result.chosen(), result.per_client, result.missing) == (None, None, {}, [])
    assert result.measured_for == "No client was measured in any round."
    assert "not evaluated" in repr(result)
    with pytest.raises(ft.FedtailorError, match=r"^There is nothing to report"):
        ft.report(tmp_path / "run", to=tmp_path / "page.html")


def test_stopping_on_failure_stops_on_silence_too() -> None:
    simulation = make_simulation("fedper", **SMALL, on_failure="stop")
    with pytest.raises(ft.FedtailorError, match=r"^The evaluation of client 1 failed: it did not answer\.$"):
        list(simulation.loop.run(Changed(simulation, silent(1, [2]))))


# --- clients that fail ---


class Blind(ft.Method):
    """FedAvg in which some clients cannot be evaluated."""

    who: tuple[int, ...] = (2,)

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": client.descend(message["theta"])}

    def personal_model(self, client: ft.Client, message: ft.Message) -> Tensor:
        if client.id in self.who:
            raise MemoryError("no room")
        return message["theta"]


def test_an_evaluation_that_fails_is_told_once_with_its_place() -> None:
    with pytest.warns(ft.ClientFailure) as caught:
        result = ft.run(Blind(), **SMALL, engine="in-process")
    assert len(caught) == 1
    assert str(caught[0].message).startswith("Blind, round 1: client 2 not measured: MemoryError: no room (test_mis")
    assert [record.missing for record in result.rounds] == [[2]] * 3
    assert result.missing == ["2"]
    assert result.measured_for == (
        "The metrics are of 3 of 4 clients: client 2 was not measured in round 3. In 3 of 3 rounds not all clients "
        "were measured."
    )


def test_a_method_that_can_evaluate_nobody_ends_in_one_sentence() -> None:
    expected = r"^Blind: no client could be evaluated in 3 rounds in a row: MemoryError: no room"
    with pytest.warns(ft.ClientFailure, match="round 1"), pytest.raises(ft.FedtailorError, match=expected) as caught:
        ft.run(Blind(who=(0, 1, 2, 3)), **{**SMALL, "rounds": 9}, engine="in-process")
    assert isinstance(caught.value.__cause__, MemoryError)


def test_of_clients_that_are_evaluated_together_only_the_one_that_fails_is_missing() -> None:
    data = digits([30, 30, 30, 30])
    plain = ft.run("fedavg", data=data, model="mlp:8", rounds=2, engine="in-process")
    strange = plain.data.test(2)[1]

    def unlucky(outputs: Tensor, targets: Tensor) -> float:
        if torch.equal(targets, strange):
            raise ValueError("not on the 13th")
        return 0.0

    with pytest.warns(ft.ClientFailure, match="round 1: client 2 not measured: ValueError: not on the 13th"):
        result = ft.run("fedavg", data=data, model="mlp:8", rounds=2, engine="in-process", metric=unlucky)
    assert [record.missing for record in result.rounds] == [[2], [2]]
    for client in (0, 1, 3):
        assert result.per_client[client].accuracy == plain.per_client[client].accuracy


GOOD = Metrics(loss=1.0, accuracy=0.5, n_samples=3)


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        (None, "its metrics are not those of its test samples"),
        ({}, "withheld"),
        ("text", "its metrics are not those of its test samples"),
        ([1], "its metrics are not those of its test samples"),
        ({"validation": GOOD}, "its metrics are not those of its test samples"),
        ({"test": GOOD, "secret": GOOD}, "its metrics on 'secret' were not asked for, or are none"),
        ({"test": GOOD, "train": GOOD}, "its metrics on 'train' were not asked for, or are none"),
        ({"test": {"accuracy": 0.5}}, "its metrics on 'test' were not asked for, or are none"),
        ({"test": Metrics(accuracy="0.5")}, "its accuracy on test samples is '0.5'"),  # type: ignore[arg-type]
        ({"test": Metrics(balanced_accuracy=7.0)}, "its balanced accuracy on test samples is 7.0"),
        ({"test": Metrics(loss=True)}, "its loss on test samples is True"),
        ({"test": Metrics(loss=[1.0] * 99)}, "its loss on test samples is [1.0, 1.0"),  # type: ignore[arg-type]
        ({"test": GOOD, "validation": Metrics(n_samples=-1)}, "its number of validation samples is -1"),
        ({"test": Metrics(n_samples=1.5)}, "its number of test samples is 1.5"),  # type: ignore[arg-type]
        ({"test": Metrics(n_samples=10**30)}, "its number of test samples is 1000"),
    ],
)
@pytest.mark.parametrize("method", ["fedavg", "fedper"])  # evaluated together, and one by one
def test_metrics_that_are_none_count_as_a_failure(method: str, measured: Any, why: str) -> None:
    whole, _, _ = run(method)
    simulation, records, said = run(method, replaced(1, measured))
    assert [record.missing for record in records] == [[1]] * 3
    assert results(simulation) == results(whole, but=1)
    assert len(said) == 1
    if why == "withheld":
        assert said == ["Client 1 tells no metrics: averages are of the others."]
    else:
        assert said[0].startswith(f"{type(whole.loop.method).__name__}, round 1: client 1 not measured: {why}")
        assert len(said[0]) < 200


def test_metrics_that_are_not_finite_are_those_of_a_training_that_diverged() -> None:
    _, records, said = run("fedper", replaced(1, {"test": Metrics(loss=float("nan"), accuracy=0.5, n_samples=3)}))
    assert said == []
    assert all(record.missing == [] and record.loss is None and record.evaluated == 4 for record in records)


@pytest.mark.parametrize("count", [0, 2, 3])
def test_a_reply_with_another_number_of_measurements_counts_as_a_failure(count: int) -> None:
    def change(request: Request, reply: Reply) -> Reply | None:
        if isinstance(request, Evaluate) and request.client == 1:
            reply.measured = reply.measured * count
        return reply

    _, records, said = run("fedper", change)
    assert [record.missing for record in records] == [[1]] * 3
    why = f"FedPer, round 1: client 1 not measured: it was asked for 1 measurements and sent {count}."
    assert said == ([why] if count else ["Client 1 tells no metrics: averages are of the others."])


def test_replies_count_once_and_only_if_they_were_asked_for() -> None:
    class Confused(Changed):
        def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
            for reply in super().ask(requests):
                yield reply
                if is_evaluation(requests[0]):
                    yield Reply(reply.clients, measured=[{"test": GOOD}] * len(reply.clients))
                    yield Reply((99,), measured=[{"test": GOOD}])

    whole, _, _ = run("fedper")
    simulation = make_simulation("fedper", **SMALL)
    records = list(simulation.loop.run(Confused(simulation, lambda request, reply: reply)))
    assert results(simulation) == results(whole)
    assert all(record.missing == [] for record in records)


# --- a client that tells no metrics ---


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_metrics_that_are_withheld_are_told_once_and_stop_nothing(method: str) -> None:
    def withheld(request: Request, reply: Reply) -> Reply | None:
        if is_evaluation(request) and 2 in reply.clients:
            reply.measured[reply.clients.index(2)] = {}
        return reply

    _, records, said = run(method, withheld, on_failure="stop", rounds=4)
    assert said == ["Client 2 tells no metrics: averages are of the others."]
    assert [record.missing for record in records] == [[2]] * 4
    assert [record.warnings for record in records] == [{"metrics of client 2": said[0]}, {}, {}, {}]
    assert [record.failed for record in records] == [[]] * 4


# --- local models, measured with the training ---


def no_metrics(client: int, rounds: Sequence[int], measured: Any = ()) -> Change:
    """Take the metrics out of a training's reply."""

    def change(request: Request, reply: Reply) -> Reply | None:
        if isinstance(request, Train) and request.client == client and request.round in rounds:
            reply.measured = list(measured)
        return reply

    return change


LOCAL: dict[str, Any] = {"clients": 6, "participation": 2, "rounds": 8, "seed": 2, "evaluation": {"model": "local"}}


@pytest.mark.parametrize("measured", [(), ("text",), ({"test": GOOD}, {"test": GOOD})])
def test_a_local_model_without_metrics_is_missing_until_it_is_measured_again(measured: Any) -> None:
    whole, expected, _ = run("fedavg", **LOCAL)
    client = next(c for c in range(6) if sum(c in record.participants for record in expected) >= 3)
    called = [record.round for record in expected if client in record.participants]
    simulation, records, said = run("fedavg", no_metrics(client, [called[1]], measured), **LOCAL)
    missing = [record.round for record in records if client in record.missing]
    assert missing == list(range(called[1], called[2]))
    assert results(simulation, but=client) == results(whole, but=client)
    assert all((client in of) == (client in was and number not in missing)
               for number, of, was in zip(range(1, 9), results(simulation), results(whole), strict=True))  # fmt: skip
    assert [record.failed for record in records] == [[]] * 8  # its training counts
    assert len([text for text in said if f"lient {client} " in text and "back" not in text]) == 1


def test_among_participants_one_that_fails_is_missing_with_its_local_model() -> None:
    def change(request: Request, reply: Reply) -> Reply | None:
        lost = isinstance(request, Train) and request.round == 5
        return Reply(reply.clients, error="it is asleep") if lost and request.client == first else reply

    settings = {**LOCAL, "evaluation": {"model": "local", "clients": "participants"}}
    _, expected, _ = run("fedavg", **settings)
    first = expected[4].participants[0]
    simulation, records, _ = run("fedavg", change, **settings)
    assert [record.missing for record in records] == [[]] * 4 + [[first]] + [[]] * 3
    assert set(results(simulation)[4]) == {expected[4].participants[1]}


@pytest.mark.parametrize("evaluation", [{"model": "local"}, {}])
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6, 7])
def test_a_resumed_run_knows_who_is_missing(evaluation: dict[str, Any], stop: int, tmp_path: Path) -> None:
    settings = {**SMALL, **LOCAL, "evaluation": evaluation, "engine": "in-process", "checkpoint_every": 1}

    def change(request: Request, reply: Reply) -> Reply | None:
        return no_metrics(3, [3, 4, 5])(request, reply) if evaluation else silent(3, [3, 4, 5])(request, reply)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, expected, _ = run("ditto", change, **settings)
        experiment = make_experiment({"method": "ditto", **settings})
        first = create(tmp_path / "run", prepare(experiment, Objects()))
        first.start()
        rounds = first.loop.run(Changed(first, change))
        for _ in range(stop):
            next(rounds)
        rounds.close()
        first.close()
        again = reopen(tmp_path / "run", experiment, Objects())
        again.restore()
        list(again.loop.run(Changed(again, change)))
        again.close()
    assert any(3 in record.missing for record in expected)
    dropped = ("warnings", "seconds")
    assert [{n: v for n, v in r.items() if n not in dropped} for r in numbers(again.loop.rounds)] == [
        {n: v for n, v in r.items() if n not in dropped} for r in numbers(expected)
    ]


# --- comings and goings ---


def test_a_client_that_comes_and_goes_is_named_each_time_and_no_more() -> None:
    def flaky(request: Request, reply: Reply) -> Reply | None:
        if request.round in (2, 3, 6) and 1 in reply.clients:
            return without(reply, 1) if is_evaluation(request) else None
        return reply

    _, records, said = run("fedavg", flaky, rounds=8)
    assert [record.failed for record in records] == [[], [1], [1], [], [], [1], [], []]
    assert [record.missing for record in records] == [record.failed for record in records]
    assert said == [
        "FedAvg, round 2: client 1 left out: it did not answer.",
        "FedAvg, round 4: client 1 is back.",
        "FedAvg, round 6: client 1 left out: it did not answer.",
        "FedAvg, round 7: client 1 is back.",
        "FedAvg: 1 of 4 clients failed in some rounds.",
    ]
    assert [text for record in records for text in record.warnings.values()] == said[:4]


def test_a_client_that_is_left_out_is_not_named_again_as_not_measured() -> None:
    def change(request: Request, reply: Reply) -> Reply | None:
        why = "it is asleep" if isinstance(request, Train) else "it is gone"
        return Reply((1,), error=why) if request.round == 2 and request.client == 1 else reply

    _, records, said = run("fedper", change)
    assert [record.missing for record in records] == [[], [1], []]
    assert said == ["FedPer, round 2: client 1 left out: it is asleep.", "FedPer, round 3: client 1 is back."]


def test_another_client_that_goes_silent_for_the_same_reason_is_named_too() -> None:
    def change(request: Request, reply: Reply) -> Reply | None:
        gone = {1: request.round >= 2, 3: request.round >= 3}
        return None if gone.get(request.client) and isinstance(request, Train) else reply

    _, _, said = run("fedper", change, rounds=5)
    assert said[:2] == [
        "FedPer, round 2: client 1 left out: it did not answer.",
        "FedPer, round 3: client 3 left out: it did not answer.",
    ]
    assert len(said) == 3


def test_what_stands_from_before_is_no_sign_of_life() -> None:
    """Local's models need no new evaluation while a client is silent: it is not back by that."""

    def change(request: Request, reply: Reply) -> Reply | None:
        return None if request.round >= 2 and request.client == 1 else reply

    _, _, said = run("local", change, clients=6, participation=2, rounds=8, seed=2)
    assert [text for text in said if "back" in text] == []
    assert len([text for text in said if "client 1 " in text]) == 1
