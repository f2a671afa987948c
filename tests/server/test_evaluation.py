"""The evaluation protocol: every option against numbers computed by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.local.metrics import measure, outputs
from fedtailor.server.evaluation import Evaluator, chosen_round, summary
from fedtailor.transport import Bench
from tests.helpers import digits

SMALL: dict[str, Any] = {
    "data": "digits",
    "clients": 6,
    "model": "mlp:16",
    "rounds": 4,
    "participation": 2,
    "engine": "in-process",
    "seed": 2,
}


def accuracy(result: ft.RunResult, theta: Tensor, client: int) -> float:
    run = result._federation
    x, y = run.data.test(client)
    found = measure(outputs(run.bench.network, theta, x), y, run.bench.loss)["accuracy"]
    assert found is not None
    return found


def test_the_default_is_personal_all_clients_per_client_last_round() -> None:
    assert ft.Evaluation() == ft.Evaluation(
        model="personal", fine_tune=0, clients="all", average="client", choose="last", every=1
    )


@pytest.mark.parametrize("method", ["local", "fedavg", "fedper", "ditto"])
def test_personal_models_are_evaluated_as_they_are_at_the_end_of_the_round(method: str) -> None:
    """Also those of clients that did not take part, whose numbers may come from an earlier round."""
    result = ft.run(method, **SMALL)
    run = result._federation
    for client in range(6):
        assert result.per_client[client]["accuracy"] == pytest.approx(
            accuracy(result, run.personal(client), client), abs=1e-12
        )
    values = [result.per_client[client]["accuracy"] for client in range(6)]
    assert result.accuracy == pytest.approx(np.mean(values))
    assert result.rounds[-1]["accuracy_std"] == pytest.approx(np.std(values))
    assert result.rounds[-1]["accuracy_worst_decile"] == pytest.approx(min(values))


def test_an_unchanged_model_is_not_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[tuple[int, ...]] = []
    visit = Bench._visit

    def counting(bench: Bench, task: Any) -> Any:
        if task.kind == "evaluate":
            evaluated.append(task.clients)
        return visit(bench, task)

    monkeypatch.setattr(Bench, "_visit", counting)
    ft.run("local", **SMALL)
    assert len(evaluated) == 6 + 3 * 2  # all after round 1, then the two participants
    evaluated.clear()
    ft.run("fedper", **SMALL)  # the body changes for everybody
    assert len(evaluated) == 4 * 6


def test_the_global_model() -> None:
    result = ft.run("ditto", **SMALL, evaluation={"model": "global"})
    theta = result._federation.server.state["theta"]
    for client in range(6):
        assert result.per_client[client]["accuracy"] == pytest.approx(accuracy(result, theta, client), abs=1e-12)


def test_a_method_without_a_global_model_says_so() -> None:
    with pytest.raises(ft.FedtailorError, match="fedper has no global model: evaluate the personal ones"):
        ft.run("fedper", **SMALL, evaluation={"model": "global"})


def test_local_models_are_those_right_after_the_local_work() -> None:
    """As in the PFLEGO paper: what a participant holds before the server averages; others keep their last number."""
    result = ft.run("fedavg", **{**SMALL, "participation": 3}, evaluation={"model": "local"})
    alone = ft.run("local", **{**SMALL, "participation": 3, "rounds": 1})
    first = result.rounds[0]["participants"]
    assert set(result.clients[0]["results"]) == {str(client) for client in first}
    for client in first:
        theta = alone._federation.states.get(f"client-{client}")[
            "theta"
        ]  # one round from the same start is the same work
        found = result.clients[0]["results"][str(client)]["test"]["accuracy"]
        assert found == pytest.approx(accuracy(alone, theta, client), abs=1e-12)
    seen = {client for record in result.rounds for client in record["participants"]}
    assert {int(client) for client in result.clients[-1]["results"]} == seen


def test_participants_only() -> None:
    result = ft.run("fedavg", **SMALL, evaluation={"clients": "participants"})
    for record, clients in zip(result.rounds, result.clients, strict=True):
        assert {int(client) for client in clients["results"]} == set(record["participants"])


def test_new_clients_get_the_shared_part_and_never_train() -> None:
    result = ft.run("fedper", **{**SMALL, "participation": "all"}, new_clients=2, evaluation={"clients": "new"})
    run = result._federation
    assert set(result.per_client) == run.data.new
    assert len(run.data.new) == 2
    for client in run.data.new:
        assert run.states.get(f"client-{client}") == {}
        theta = torch.cat([run.server.state["body"], run.server.initial[run.server.head]])
        assert result.per_client[client]["accuracy"] == pytest.approx(accuracy(result, theta, client), abs=1e-12)


def test_fine_tuning_is_a_descent_on_the_clients_own_data() -> None:
    result = ft.run("fedavg", **SMALL, evaluation={"fine_tune": 2})
    run = result._federation
    client = run.bench.client(3, 0, {})
    tuned = client.descend(run.server.state["theta"], epochs=2, purpose="fine-tuning")
    assert result.per_client[3]["accuracy"] == pytest.approx(accuracy(result, tuned, 3), abs=1e-12)
    assert torch.equal(run.personal(3), tuned)


def test_the_mean_over_samples_weighs_clients_by_their_test_samples() -> None:
    result = ft.run("local", **SMALL, evaluation={"average": "sample"})
    run = result._federation
    hits = tests = 0.0
    for client in range(6):
        count = len(run.data.test(client)[1])
        hits += count * result.per_client[client]["accuracy"]
        tests += count
    assert result.accuracy == pytest.approx(hits / tests)
    assert result.accuracy != pytest.approx(float(np.mean([m["accuracy"] for m in result.per_client.values()])))


def test_shared_models_are_evaluated_in_one_pass_with_the_same_result() -> None:
    """FedAvg's clients are evaluated together, Ditto's global model is the same and shows it one by one."""
    together = ft.run("fedavg", **SMALL)
    theta = together._federation.server.state["theta"]
    for client in range(6):
        assert together.per_client[client]["accuracy"] == accuracy(together, theta, client)


def test_every_so_many_rounds_and_the_last() -> None:
    result = ft.run("fedavg", **{**SMALL, "rounds": 5}, evaluation={"every": 2})
    assert [record["accuracy"] is not None for record in result.rounds] == [False, True, False, True, True]


def test_how_the_round_that_counts_is_chosen() -> None:
    keys = ("accuracy_std", "accuracy_worst_decile", "balanced_accuracy", "auc")
    rounds = [
        {
            "round": n,
            "accuracy": a,
            "loss": loss,
            "validation_accuracy": v,
            "validation_loss": 1 - v,
            "evaluated": 1,
            **dict.fromkeys(keys),
        }
        for n, (a, loss, v) in enumerate([(0.1, 3.0, 0.2), (0.9, 2.0, 0.5), (0.7, 1.0, 0.8), (0.6, 1.5, 0.8)], start=1)
    ]
    assert chosen_round(rounds, "last") == rounds[3]
    assert chosen_round(rounds, "best-validation") == rounds[2]  # the first of equals
    assert chosen_round(rounds, "best-test") == rounds[1]
    mean = chosen_round(rounds, "last-10")
    assert mean is not None
    assert mean["accuracy"] == pytest.approx(0.575)
    assert chosen_round(rounds * 5, "last-10")["accuracy"] == pytest.approx(
        np.mean([r["accuracy"] for r in (rounds * 5)[-10:]])
    )
    by_loss = [{**record, "accuracy": None, "validation_accuracy": None} for record in rounds]
    assert chosen_round(by_loss, "best-test") == by_loss[2]
    assert chosen_round(by_loss, "best-validation") == by_loss[2]
    assert chosen_round([], "last") is None


def test_the_result_follows_the_protocol() -> None:
    result = ft.run("local", **{**SMALL, "rounds": 6}, evaluation={"choose": "best-test"})
    assert result.accuracy == max(record["accuracy"] for record in result.rounds)
    best = next(record["round"] for record in result.rounds if record["accuracy"] == result.accuracy)
    assert result.per_client[0] == result.clients[best - 1]["results"]["0"]["test"]


def test_the_worst_decile_is_the_mean_of_the_worst_tenth() -> None:
    def client(value: float | None) -> Any:
        metrics = {"accuracy": value, "loss": value, "balanced_accuracy": value, "auc": value}
        return {"test": metrics, "validation": metrics}

    measured = {number: client(number / 100) for number in range(20)} | {20: client(None)}
    figures = summary(measured, "client", [1] * 21, [1] * 21)
    assert figures["accuracy_worst_decile"] == pytest.approx((0.0 + 0.01) / 2)
    assert figures["accuracy"] == pytest.approx(np.mean(np.arange(20) / 100))
    assert figures["evaluated"] == 20


@pytest.mark.parametrize(
    ("evaluation", "says"),
    [
        ({"model": "persnal"}, "evaluation.model"),
        ({"fine_tune": -1}, "evaluation.fine_tune"),
        ({"clients": "new"}, "hold some out with --new-clients"),
        ({"chose": "last"}, "did you mean 'evaluation.choose'"),
    ],
)
def test_protocols_that_make_no_sense_are_refused(evaluation: dict[str, Any], says: str) -> None:
    with pytest.raises(ft.FedtailorError, match=says):
        ft.run("fedavg", **SMALL, evaluation=evaluation)


def test_the_training_loss_is_the_objective() -> None:
    """Eq. 1 of PFLEGO: the clients' mean training losses at their personal models, weighted by samples."""
    data = digits([20, 60, 40])
    result = ft.run(
        "fedper", data=data, model="mlp:16", rounds=2, dtype="float64", evaluation={"train": True}, engine="in-process"
    )
    run = result._federation
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    total = 0.0
    for client in range(3):
        module.double().load_state_dict(result.personal(client))
        x, y = run.data.train(client)
        total += torch.nn.functional.cross_entropy(module(x), y, reduction="sum").item()
    assert result.rounds[-1]["train_loss"] == pytest.approx(total / int(run.data.samples.sum()), rel=1e-12)
    assert 0 <= result.rounds[-1]["train_accuracy"] <= 1
    assert "train_loss" not in ft.run("fedper", data=data, model="mlp:16", rounds=1, engine="in-process").rounds[-1]


# --- tasks of a model that all clients share: whole clients, whatever the number of workers ---


def groups(samples: list[int], fine_tune: int = 0) -> list[tuple[int, ...]]:
    evaluator: Any = SimpleNamespace(protocol=SimpleNamespace(fine_tune=fine_tune), held_out_samples=samples)
    return list(Evaluator._groups(evaluator, list(range(len(samples)))))


@pytest.mark.parametrize(
    ("samples", "most"),
    [
        ([30] * 20, 64),  # few samples: small tasks, but not tiny ones
        ([100] * 160, 1000),  # a sixteenth of them
        ([100] * 1000, 1024),  # many: no task is too large
        ([0, 5, 3000, 0, 7], 187),  # a client is never divided
    ],
)
def test_tasks_are_of_like_size(samples: list[int], most: int) -> None:
    found = groups(samples)
    assert [client for group in found for client in group] == list(range(len(samples)))
    sizes = [sum(samples[client] for client in group) for group in found]
    assert all(size <= most or len(group) == 1 for size, group in zip(sizes, found, strict=True))
    following = zip(sizes, found[1:], strict=False)
    assert all(size + samples[group[0]] > most for size, group in following)  # none is smaller than it need be


def test_clients_that_fine_tune_come_one_by_one() -> None:
    assert groups([1, 2, 3], fine_tune=1) == [(0,), (1,), (2,)]
