"""FedFomo against its slow reference, the rule by which models are sent, and its limit case."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.messages.store import Store
from fedtailor.method import Server, State
from fedtailor.methods.fedfomo import FedFomo
from fedtailor.training.layout import Layout
from tests.helpers import Quadratic, digits, final, mean_output, quadratic_clients, run_quadratic
from tests.methods.problems import EXACT, SMALL, Log, close, on_a_network, on_both, watched, who
from tests.reference.fedfomo import fedfomo
from tests.reference.problem import Problem
from tests.training.parts import client


def check_by_hand(
    result: ft.RunResult, problem: Problem, log: Log, risk: Callable[[int, Tensor], float], momentum: float = 0.0
) -> int:
    """Compare every message, weight, model and P of a run; count how often others' models had a part in a mix."""
    rounds, models, mixed = who(result), result.simulation.terms.method.models, 0

    def sent(number: int, i: int) -> list[int]:
        found: list[int] = log.down[number, i]["clients"].tolist()
        return found

    uploaded: dict[int, Tensor] = {}
    slow_rounds = fedfomo(problem, rounds, sent, risk, lr=result.experiment.lr, momentum=momentum)
    for number, (participants, slow) in enumerate(zip(rounds, slow_rounds, strict=True), 1):
        for i in participants:
            others = sent(number, i)
            assert len(set(others)) == len(others) == min(models, len(uploaded.keys() - {i}))
            assert set(others) <= uploaded.keys() - {i}
            for j, model in zip(others, log.down[number, i]["models"], strict=True):
                assert torch.equal(model, uploaded[j])
            assert log.up[number, i]["clients"].tolist() == others
            close(log.up[number, i]["weights"], torch.tensor(slow.weights[i], dtype=torch.float64))
            close(log.up[number, i]["theta"], slow.last[i])
            mixed += any(weight > 0 for weight in slow.weights[i][1:])
        uploaded |= {i: log.up[number, i]["theta"] for i in participants}
        close(log.server[number]["P"], slow.P)
    states = final(result)
    for i, theta in slow.last.items():
        close(states[f"{i}/theta"], theta)
        close(states[f"{i}/start"], slow.start[i])
        close(result.personal_vector(i), theta)
    return mixed


@on_both
@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        ({"models": 2}, {"participation": 3}),
        ({"models": 5, "exploration": 1.0}, {"momentum": 0.6, "keep_momentum": True}),
        ({"models": 1, "exploration": 0.0}, {"lr": 0.6}),
    ],
)
def test_a_slow_version_comes_to_the_same_vectors(
    run_on: Callable[..., tuple[ft.RunResult, Problem]], parameters: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Without validation samples, the loss is that of the training samples."""
    method, log = watched(FedFomo, **parameters)
    result, problem = run_on(method, **settings)
    momentum = settings.get("momentum", 0.0)
    mixed = check_by_hand(result, problem, log, lambda i, point: float(problem.risk(i, point, None)), momentum)
    assert mixed > 0


def test_models_are_weighed_on_the_validation_samples() -> None:
    method, log = watched(FedFomo, models=2)
    result, problem = on_a_network(method, validation=0.4, participation=3)
    run = result.simulation
    held = [run.data.client(i).validation for i in range(6)]
    assert all(len(y) for _, y in held)

    def risk(i: int, point: Tensor) -> float:
        w, b, v, c = point.split([6 * 64, 6, 10 * 6, 10])
        x, y = held[i]
        scores = ((x @ w.view(6, 64).T + b).relu() @ v.view(10, 6).T + c).log_softmax(1)
        return float(-scores[range(len(y)), y].mean())

    assert check_by_hand(result, problem, log, risk) > 0


def server_with(P: Tensor, uploaded: list[int], participants: list[int], round: int, seed: int = 0) -> Server:
    server = Server(torch.zeros(2), Layout(2, slice(0, 2), slice(2, 2)), torch.ones(len(P)), 1.0)
    server.state = {"P": P, "uploaded": torch.tensor([i in uploaded for i in range(len(P))])}
    server.round, server.participants, server.random = round, participants, torch.Generator().manual_seed(seed)
    return server


P = torch.tensor([[9.0, 0.3, -0.2, 0.5, 0.1, 0.4], *[[0.0] * 6] * 5])


def test_without_exploration_the_best_are_sent() -> None:
    """Those with the largest affinity, never one's own, and only of clients that have uploaded."""
    method = FedFomo(models=3, exploration=0.0)
    assert method._choose(server_with(P, [0, 1, 2, 3, 4, 5], [0], 1)) == {0: [3, 5, 1]}
    assert method._choose(server_with(P, [0, 2, 4, 5], [0], 1)) == {0: [5, 4, 2]}
    assert method._choose(server_with(P, [0, 2], [0, 1], 1))[0] == [2]
    assert method._choose(server_with(P, [], [0], 1)) == {0: []}


def test_only_models_that_are_sent_are_read_and_each_once() -> None:
    class Counting(Store):
        reads: ClassVar[list[int]] = []

        def get(self, number: int) -> State:
            self.reads.append(number)
            return super().get(number)

    server = server_with(P, [0, 1, 2, 3, 4], [0, 5], 1)
    server.store = Counting(None, "server")
    method = FedFomo(models=2, exploration=0.0)
    for number in range(6):
        server.keep(number, {"theta": torch.full((2,), float(number))})
    sent = list(method.send_all(server).values())
    assert sent[0]["clients"].tolist() == [3, 1]
    for message in sent:
        assert message["models"].tolist() == [[other, other] for other in message["clients"].tolist()]
    needed = {other for message in sent for other in message["clients"].tolist()}
    assert sorted(Counting.reads) == sorted(needed)


def test_equal_affinities_are_told_apart_by_chance() -> None:
    method = FedFomo(models=1, exploration=0.0)
    picks = [method._choose(server_with(P, list(range(6)), [1], 1, seed))[1][0] for seed in range(60)]
    assert set(picks) == {0, 2, 3, 4, 5}


@pytest.mark.parametrize(("round", "epsilon"), [(1, 0.5), (3, 0.3), (6, 0.0), (50, 0.0)])
def test_exploration_replaces_the_best_and_decays(round: int, epsilon: float) -> None:
    """The best of five is sent with probability 1 − ε + ε/5."""
    method = FedFomo(models=1, exploration=0.5, exploration_decay=0.1)
    picks = [method._choose(server_with(P, list(range(6)), [0], round, seed))[0][0] for seed in range(400)]
    share, expected = picks.count(3) / 400, 1 - epsilon * 4 / 5
    assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 400) ** 0.5 + 1e-12)


def test_clients_find_those_who_are_like_them() -> None:
    """Two groups of three with the same minimum: the affinity within is the larger one."""
    data, _, _ = quadratic_clients(6, 3)
    for i in range(6):
        data[i][0][:, :3] = 1.0 if i < 3 else -1.0
        data[i][0][:, 3:] = torch.eye(3).flatten()
    result = run_quadratic("fedfomo", data, 3, models=5, rounds=4, steps=2)
    shown = result.observed(4)["P"].fill_diagonal_(0)
    assert shown[:3, :3].sum(1).min() > 0
    assert shown[:3, 3:].max() < 0
    assert shown[3:, 3:].sum(1).min() > 0
    assert shown[3:, :3].max() < 0


def test_without_others_models_it_is_local_if_every_round_lowers_the_loss() -> None:
    data, _, _ = quadratic_clients(4, 3)
    settings = {"rounds": 5, "participation": 2, "steps": 3}
    ours = final(run_quadratic("fedfomo", data, 3, models=0, **settings))
    local = final(run_quadratic("local", data, 3, **settings))
    assert local
    for name in local:
        assert torch.equal(ours[name], local[name])


def test_a_round_that_raises_the_loss_is_taken_back() -> None:
    data, _, _ = quadratic_clients(2, 3)
    result = run_quadratic("fedfomo", data, 3, models=0, lr=50.0, rounds=4)
    once = final(run_quadratic("fedfomo", data, 3, models=0, lr=50.0, rounds=1))
    for i in range(2):
        states = final(result)
        assert torch.equal(states[f"{i}/start"], torch.zeros(3, dtype=torch.float64))
        assert torch.equal(states[f"{i}/theta"], once[f"{i}/theta"])


def test_a_model_at_no_distance_has_no_weight() -> None:
    one = client()
    candidates = torch.stack([one.initial, one.initial + 0.1])
    weights = FedFomo().weights(one, one.initial, candidates)
    assert weights[0] == 0
    assert weights[1] != 0


def test_batch_norm_buffers_have_no_part_in_distances() -> None:
    one = client(batch_norm=True)
    generator = torch.Generator().manual_seed(0)
    other = one.initial + 0.1 * torch.rand(len(one.initial), generator=generator, dtype=torch.float64)
    weights = FedFomo().weights(one, one.initial, other[None])
    squares = (other - one.initial) ** 2
    kept = torch.ones(len(squares), dtype=torch.bool)
    for place in one.layout.buffers:
        kept[place] = False
    assert squares[~kept].sum() > 0.001
    expected = (one.loss(one.initial) - one.loss(other)) / squares[kept].sum().sqrt()
    torch.testing.assert_close(weights, expected[None], rtol=1e-12, atol=0)


def test_new_clients_get_the_mean_of_all_last_models() -> None:
    """The plain one, of those who have uploaded."""
    data = [(x.double(), y) for x, y in digits([20, 40, 20, 30, 20, 20])]
    settings = {"model": "mlp:6", "participation": 2, "seed": 4, "new_clients": 2, **EXACT}
    method, log = watched(FedFomo)
    result = ft.run(method, data=data, rounds=3, **settings)
    last = {i: log.up[number, i]["theta"] for number, called in enumerate(who(result), 1) for i in called}
    assert 2 < len(last) < 6
    new = result.data.new
    assert len(new) == 2
    for i in new:
        close(result.personal_vector(i), torch.stack(list(last.values())).mean(0))
    absent = set(range(6)) - last.keys() - new
    for i in absent:
        close(result.personal_vector(i), torch.stack(list(last.values())).mean(0))


def test_before_anyone_uploaded_everyone_has_the_first_vector() -> None:
    result = ft.run(FedFomo(), data=digits([9, 9]), participation="independent:0.01", rounds=1, seed=1)
    run = result.simulation
    assert who(result) == [[]]
    assert torch.equal(run.personal_model(0), run.server.initial)


def test_the_models_sent_are_counted_in_the_bytes() -> None:
    size = 64 * 16 + 16 + 16 * 10 + 10
    records = ft.run("fedfomo", models=2, **{**SMALL, "participation": "all"}).rounds
    assert records[0].bytes_down == 0  # nobody has uploaded
    assert records[0].bytes_up == 6 * 4 * (size + 1)
    for record in records[1:]:
        assert record.bytes_down == 6 * 2 * (4 * size + 8)  # two models, and whose they are
        assert record.bytes_up == 6 * (4 * (size + 3) + 2 * 8)  # one model, three weights


def test_one_client_alone_trains_on() -> None:
    module = Quadratic(2)
    data, _, _ = quadratic_clients(1, 2)
    how = {"rounds": 3, "steps": 1, "batch": "full", "lr": 0.1, **EXACT}
    ours = ft.run("fedfomo", data=data, model=module, loss=mean_output, **how)
    local = ft.run("local", data=data, model=module, loss=mean_output, **how)
    assert torch.equal(ours.personal_vector(0), local.personal_vector(0))
