"""The evaluation protocol: every option against numbers computed by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.client.sites import Sites
from fedtailor.messages import Evaluate, EvaluateShared, Metrics
from fedtailor.server.evaluation import Evaluator, averages, chosen_round
from fedtailor.server.records import ClientsRecord, RoundRecord
from fedtailor.training.predictions import measure, outputs
from tests.helpers import digits, numbers

SMALL: dict[str, Any] = {"data": "digits", "clients": 6, "model": "mlp:16", "rounds": 4, "participation": 2,
                         "engine": "in-process", "seed": 2}  # fmt: skip


def accuracy(result: ft.RunResult, theta: Tensor, client: int) -> float:
    run = result.simulation
    x, y = run.data.test(client)
    found = measure(outputs(run.terms.network, theta, x), y, run.terms.loss).accuracy
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
    run = result.simulation
    for client in range(6):
        assert result.per_client[client].accuracy == pytest.approx(
            accuracy(result, run.personal_model(client), client), abs=1e-12
        )
    values = [result.per_client[client].accuracy for client in range(6)]
    assert result.accuracy == pytest.approx(np.mean(values))
    assert result.rounds[-1].accuracy_std == pytest.approx(np.std(values))
    assert result.rounds[-1].accuracy_worst_decile == pytest.approx(min(values))


def test_an_unchanged_model_is_not_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[tuple[int, ...]] = []
    work = Sites.work

    def counting(sites: Sites, request: Any, state: Any) -> Any:
        if isinstance(request, Evaluate | EvaluateShared):
            evaluated.append(request.clients)
        return work(sites, request, state)

    monkeypatch.setattr(Sites, "work", counting)
    ft.run("local", **SMALL)
    assert len(evaluated) == 6 + 3 * 2  # all after round 1, then the two participants
    evaluated.clear()
    ft.run("fedper", **SMALL)  # the body changes for everybody
    assert len(evaluated) == 4 * 6


def test_the_global_model() -> None:
    result = ft.run("ditto", **SMALL, evaluation={"model": "global"})
    theta = result.server_state["theta"]
    for client in range(6):
        assert result.per_client[client].accuracy == pytest.approx(accuracy(result, theta, client), abs=1e-12)


def test_a_method_without_a_global_model_says_so() -> None:
    with pytest.raises(ft.FedtailorError, match="fedper has no global model: evaluate the personal ones"):
        ft.run("fedper", **SMALL, evaluation={"model": "global"})


def test_local_models_are_those_right_after_the_local_work() -> None:
    """As in the PFLEGO paper: what a participant holds before the server averages; others keep their last number."""
    result = ft.run("fedavg", **{**SMALL, "participation": 3}, evaluation={"model": "local"})
    alone = ft.run("local", **{**SMALL, "participation": 3, "rounds": 1})
    first = result.rounds[0].participants
    assert set(result.clients[0].results) == set(first)
    for client in first:
        theta = alone.client_state(client)["theta"]  # one round from the same start is the same work
        found = result.clients[0].results[client]["test"].accuracy
        assert found == pytest.approx(accuracy(alone, theta, client), abs=1e-12)
    seen = {client for record in result.rounds for client in record.participants}
    assert set(result.clients[-1].results) == seen


def test_participants_only() -> None:
    result = ft.run("fedavg", **SMALL, evaluation={"clients": "participants"})
    for record, clients in zip(result.rounds, result.clients, strict=True):
        assert set(clients.results) == set(record.participants)


def test_a_sample_of_the_clients_is_drawn_once_from_the_seed() -> None:
    everybody = ft.run("ditto", **SMALL)
    samples = set()
    for seed in range(6):
        result = ft.run("ditto", **{**SMALL, "seed": seed}, evaluate_clients=3)
        evaluated = {tuple(clients.results) for clients in result.clients}
        (sample,) = evaluated
        assert len(sample) == len(set(sample)) == 3
        assert list(sample) == sorted(sample)
        assert "3 clients drawn at random" in result.experiment.evaluation.in_words()
        if seed == SMALL["seed"]:
            assert result.per_client == {client: everybody.per_client[client] for client in sample}
        samples.add(sample)
    assert len(samples) > 1


def test_a_sample_stays_when_clients_join(tmp_path: Path) -> None:
    parts = digits([30, 40, 50, 60, 45], seed=2)
    settings: dict[str, Any] = {"model": "mlp:8", "evaluate_clients": 2, "engine": "in-process"}
    settings["out"] = tmp_path / "run"
    before = ft.run("fedavg", data=parts[:4], rounds=2, **settings)
    after = ft.resume(tmp_path / "run", data=parts[:4], rounds=4, add_clients={"late": parts[4]})
    assert len(after.names) == 5
    assert {tuple(clients.results) for clients in after.clients} == {tuple(before.per_client)}


def test_a_sample_that_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ft.FedtailorError, match="7 clients cannot be evaluated: there are only 6"):
        ft.run("fedavg", **SMALL, evaluate_clients=7)
    for wrong in (0, -1, 2.5, "some", True):
        with pytest.raises(ft.FedtailorError, match="all, participants, new, or a number of clients"):
            ft.run("fedavg", **SMALL, evaluate_clients=wrong)  # type: ignore[arg-type]


def test_new_clients_get_the_shared_part_and_never_train() -> None:
    result = ft.run("fedper", **{**SMALL, "participation": "all"}, new_clients=2, evaluation={"clients": "new"})
    run = result.simulation
    assert set(result.per_client) == run.data.new
    assert len(run.data.new) == 2
    for client in run.data.new:
        assert run.state_of(client) == {}
        theta = torch.cat([run.server.state["body"], run.server.initial[run.server.head]])
        assert result.per_client[client].accuracy == pytest.approx(accuracy(result, theta, client), abs=1e-12)


def test_fine_tuning_is_a_descent_on_the_clients_own_data() -> None:
    result = ft.run("fedavg", **SMALL, evaluation={"fine_tune": 2})
    run = result.simulation
    client = run.sites.site(3).client(0, {})
    tuned = client.descend(run.server.state["theta"], epochs=2, purpose="fine-tuning")
    assert result.per_client[3].accuracy == pytest.approx(accuracy(result, tuned, 3), abs=1e-12)
    assert torch.equal(run.personal_model(3), tuned)


def test_the_mean_over_samples_weighs_clients_by_their_test_samples() -> None:
    result = ft.run("local", **SMALL, evaluation={"average": "sample"})
    run = result.simulation
    hits = tests = 0.0
    for client in range(6):
        count = len(run.data.test(client)[1])
        hits += count * result.per_client[client].accuracy
        tests += count
    assert result.accuracy == pytest.approx(hits / tests)
    assert result.accuracy != pytest.approx(float(np.mean([m.accuracy for m in result.per_client.values()])))


def test_shared_models_are_evaluated_in_one_pass_with_the_same_result() -> None:
    """FedAvg's clients are evaluated together, Ditto's global model is the same and shows it one by one."""
    together = ft.run("fedavg", **SMALL)
    theta = together.server_state["theta"]
    for client in range(6):
        assert together.per_client[client].accuracy == accuracy(together, theta, client)


def test_every_so_many_rounds_and_the_last() -> None:
    result = ft.run("fedavg", **{**SMALL, "rounds": 5}, evaluation={"every": 2})
    assert [record.accuracy is not None for record in result.rounds] == [False, True, False, True, True]


def record(number: int, **metrics: float | None) -> RoundRecord:
    """A round that was evaluated."""
    given: dict[str, Any] = {"participants": [0], "bytes_down": 0, "bytes_up": 0, "seconds": 0.0, "evaluated": 1}
    return RoundRecord(round=number, **given, **metrics)


def test_how_the_round_that_counts_is_chosen() -> None:
    rounds = [
        record(n, accuracy=a, loss=loss, validation_accuracy=v, validation_loss=1 - v)
        for n, (a, loss, v) in enumerate([(0.1, 3.0, 0.2), (0.9, 2.0, 0.5), (0.7, 1.0, 0.8), (0.6, 1.5, 0.8)], start=1)
    ]
    assert chosen_round(rounds, "last") == rounds[3]
    assert chosen_round(rounds, "best-validation") == rounds[2]  # the first of equals
    assert chosen_round(rounds, "best-test") == rounds[1]
    mean = chosen_round(rounds, "last-10")
    assert mean is not None
    assert mean.accuracy == pytest.approx(0.575)
    mean = chosen_round(rounds * 5, "last-10")
    assert mean is not None
    assert mean.accuracy == pytest.approx(np.mean([r.accuracy for r in (rounds * 5)[-10:]]))
    by_loss = [replace(record, accuracy=None, validation_accuracy=None) for record in rounds]
    assert chosen_round(by_loss, "best-test") == by_loss[2]
    assert chosen_round(by_loss, "best-validation") == by_loss[2]
    assert chosen_round([], "last") is None


def test_the_result_follows_the_protocol() -> None:
    result = ft.run("local", **{**SMALL, "rounds": 6}, evaluation={"choose": "best-test"})
    assert result.accuracy == max(record.accuracy for record in result.rounds)
    best = next(record.round for record in result.rounds if record.accuracy == result.accuracy)
    assert result.per_client[0] == result.clients[best - 1].results[0]["test"]


def test_the_worst_decile_is_the_mean_of_the_worst_tenth() -> None:
    def client(value: float | None) -> Any:
        metrics = Metrics(value, value, value, value, n_samples=1)
        return {"test": metrics, "validation": metrics}

    measured = {number: client(number / 100) for number in range(20)} | {20: client(None)}
    found = averages(measured, "client")
    assert found.accuracy_worst_decile == pytest.approx((0.0 + 0.01) / 2)
    assert found.accuracy == pytest.approx(np.mean(np.arange(20) / 100))
    assert found.evaluated == 20


@pytest.mark.parametrize(
    ("clients", "worst"), [(1, 1), (9, 1), (10, 1), (15, 1), (19, 1), (20, 2), (25, 2), (29, 2), (100, 10), (109, 10)]
)
def test_a_tenth_of_the_clients_is_rounded_down_to_at_least_one(clients: int, worst: int) -> None:
    values = np.random.default_rng(0).permutation(clients) / 1000
    measured = {number: measurement(accuracy=value) for number, value in enumerate(values)}
    assert averages(measured, "client").accuracy_worst_decile == pytest.approx(
        np.sort(values)[:worst].mean(), abs=1e-12
    )


def measurement(n_samples: int = 1, **metrics: float | None) -> Any:
    """What was measured of a client: the same on all splits."""
    return dict.fromkeys(("test", "validation"), Metrics(n_samples=n_samples, **metrics))


def test_weights_that_sum_to_zero_are_left_out() -> None:
    """Metrics of no known number of samples have no weights: they are then averaged over clients."""
    nothing = Metrics()
    measured = {
        client: {"test": nothing, "validation": Metrics(loss=value, accuracy=value, n_samples=5), "train": nothing}
        for client, value in enumerate((0.25, 0.75))
    }
    found = averages(measured, "sample")
    assert (found.validation_accuracy, found.validation_loss) == (0.5, 0.5)
    assert (found.accuracy, found.train_loss, found.evaluated) == (None, None, 0)
    of_training = {c: {**m, "train": Metrics(loss=1.0 + c, n_samples=0)} for c, m in measured.items()}
    assert averages(of_training, "client").train_loss == 1.5
    assert averages({}, "sample").accuracy is None


@pytest.mark.parametrize("settings", [{"validation": 0.3}, {"validation": 0.3, "evaluation": {"train": True}}, {}])
def test_a_run_without_test_samples_is_refused_before_any_work(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(
        ft.FedtailorError, match=r"^No client has test samples, so nothing could be measured: give --test"
    ):
        ft.run("fedavg", **SMALL, test=0.0, **settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_measures_nothing_needs_no_test_samples() -> None:
    result = ft.run("fedavg", **SMALL, test=0.0, evaluation={"every": 0})
    assert all(record.evaluated == 0 and record.loss is None for record in result.rounds)
    assert result.chosen() is None
    assert result.personal(0)


@pytest.mark.parametrize("new_clients", [0, 2])
def test_the_best_round_on_validation_data_needs_some(new_clients: int) -> None:
    evaluation = {"choose": "best-validation", "clients": "new" if new_clients else "all"}
    with pytest.raises(
        ft.FedtailorError, match="No client has validation samples to choose the best round by: give --v"
    ):
        ft.run("fedavg", **SMALL, validation=0.0, new_clients=new_clients, evaluation=evaluation)


def test_the_mean_over_samples_is_by_the_samples_of_the_split_that_was_measured() -> None:
    def client(value: float, test: int, train: int, validation: int) -> Any:
        return {
            "test": Metrics(value, value, value, value, n_samples=test),
            "validation": Metrics(value, value, n_samples=validation),
            "train": Metrics(value, value, n_samples=train),
        }

    measured = {0: client(0.0, 1, 9, 3), 1: client(1.0, 3, 1, 2)}
    by_sample, by_client = averages(measured, "sample"), averages(measured, "client")
    assert (by_sample.accuracy, by_sample.loss) == (0.75, 0.75)
    assert (by_sample.validation_accuracy, by_sample.validation_loss) == (0.4, 0.4)
    assert (by_client.accuracy, by_client.loss, by_client.validation_accuracy) == (0.5, 0.5, 0.5)
    assert by_sample.train_loss == by_client.train_loss == by_client.train_accuracy == pytest.approx(0.1)
    assert by_client.accuracy_std == 0.5


def test_in_a_regression_the_best_round_on_validation_data_is_the_one_with_the_lowest_validation_loss() -> None:
    rounds = [
        record(1, loss=3.0, validation_loss=1.0),
        record(2, loss=1.0, validation_loss=3.0),
        record(3, loss=2.0, validation_loss=0.5),
        record(4, loss=9.0, validation_loss=0.5),
    ]
    assert chosen_round(rounds, "best-validation") == rounds[2]
    assert chosen_round(rounds, "best-test") == rounds[1]
    assert chosen_round([record(1, loss=1.0), *rounds], "best-validation") == rounds[2]  # one without validation data
    assert chosen_round([record(1, loss=1.0)], "best-validation") is None


def test_a_round_that_was_not_evaluated_is_never_chosen() -> None:
    rounds = [record(1, accuracy=0.2), replace(record(2), evaluated=0)]
    for choose in ("last", "best-test", "last-10"):
        found = chosen_round(rounds, choose)
        assert found is not None
        assert (found.round, found.accuracy) == (1, 0.2)
    assert chosen_round([replace(record(1), evaluated=0)], "last") is None


def test_a_regression_is_chosen_by_validation_loss_in_a_run() -> None:
    x = torch.rand(80, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True) + 0.5 * torch.randn(80, 1, generator=torch.Generator().manual_seed(1))
    data = [(x[:40], y[:40]), (x[40:], y[40:])]
    evaluation = {"choose": "best-validation"}
    settings = {"model": "mlp:32", "loss": "mse", "rounds": 15, "lr": 0.3, "validation": 0.3, "engine": "in-process"}
    result = ft.run("local", data=data, evaluation=evaluation, **settings)
    best = min(result.rounds, key=lambda record: record.validation_loss)
    assert result.chosen() == best
    assert best != min(result.rounds, key=lambda record: record.loss)


# --- local models: measured when they are there ---


def test_local_models_are_measured_in_every_round_whatever_the_stride() -> None:
    """They are gone after the round: what is not measured then cannot be measured later."""
    settings = {**SMALL, "participation": 1, "rounds": 5}
    strided = ft.run("fedavg", **settings, evaluation={"model": "local", "every": 2})
    every = ft.run("fedavg", **settings, evaluation={"model": "local"})
    assert all(record.evaluated > 0 for record in strided.rounds)
    assert strided.clients == every.clients
    assert numbers(strided.rounds) == numbers(every.rounds)


class Lost(ft.Method):
    """FedAvg whose client 0 predicts nothing but NaN."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": client.descend(message["theta"])}

    def personal_model(self, client: ft.Client, message: ft.Message) -> Tensor:
        return message["theta"] * (float("nan") if client.id == 0 else 1.0)


@pytest.mark.parametrize("regression", [False, True])
def test_a_loss_that_was_nan_is_nan_again_after_a_resume(regression: bool, tmp_path: Path) -> None:
    """In JSON it is null, as is a loss that there is none of: the mean over clients must not take one for the other."""
    x = torch.rand(90, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True) if regression else (x[:, 0] > 0.5).long()
    data: Any = [(x[i : i + 30], y[i : i + 30]) for i in (0, 30, 60)]
    settings: dict[str, Any] = {"model": "mlp:8", "loss": "mse" if regression else "cross-entropy", "rounds": 6}
    settings |= {"participation": 1, "engine": "in-process", "seed": 1, "evaluation": {"model": "local"}}

    def stop(record: RoundRecord) -> None:
        if record.round == 5:
            raise KeyboardInterrupt

    whole = ft.run(Lost(), data=data, **settings)
    with pytest.raises(KeyboardInterrupt):
        ft.run(Lost(), data=data, out=tmp_path / "run", on_round=stop, **settings)
    resumed = ft.resume(tmp_path / "run", method=Lost(), data=data)
    assert numbers(resumed.rounds) == numbers(whole.rounds)
    assert 0 not in whole.rounds[-1].participants  # it is remembered, not measured anew
    assert 0 in whole.clients[-1].results
    assert whole.rounds[-1].loss is None  # a mean with NaN in it
    assert whole.rounds[-1].evaluated == len(whole.clients[-1].results)


def test_a_client_without_samples_has_no_loss_after_a_resume_either() -> None:
    evaluator = Evaluator(ft.Evaluation(model="local"), Lost(), [0, 1, 2])
    results = {
        0: {"test": Metrics(loss=None, accuracy=0.1, n_samples=4), "validation": Metrics()},
        1: {"test": Metrics(loss=None, n_samples=4), "validation": Metrics(loss=0.5, n_samples=1)},
        2: {"test": Metrics(), "validation": Metrics()},
    }
    evaluator.remember([ClientsRecord(round=1, results=results)])
    losses = {client: measured["test"].loss for client, (_, measured) in evaluator.known.items()}
    assert str(losses) == str({0: float("nan"), 1: float("nan"), 2: None})
    assert evaluator.known[1][1]["validation"].loss == 0.5
    assert evaluator.known[0][1]["validation"].loss is None


def test_other_models_are_measured_anew_after_a_resume() -> None:
    evaluator = Evaluator(ft.Evaluation(), Lost(), [0])
    evaluator.remember([ClientsRecord(round=1, results={0: {"test": Metrics(), "validation": Metrics()}})])
    assert evaluator.known == {}


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
    run = result.simulation
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    total = 0.0
    for client in range(3):
        module.double().load_state_dict(result.personal(client))
        x, y = run.data.train(client)
        total += torch.nn.functional.cross_entropy(module(x), y, reduction="sum").item()
    assert result.rounds[-1].train_loss == pytest.approx(total / int(run.data.n_samples.sum()), rel=1e-12)
    assert 0 <= result.rounds[-1].train_accuracy <= 1
    without = ft.run("fedper", data=data, model="mlp:16", rounds=1, engine="in-process")
    assert without.rounds[-1].train_loss is None
