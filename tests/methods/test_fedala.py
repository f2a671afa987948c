"""FedALA against its slow reference, its limit cases, and what its weights are worth."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.methods.fedala import FedALA
from tests.helpers import digits
from tests.methods.parts import SMALL, normed, personal, server, state
from tests.methods.problems import MOMENTUM, close, on_a_network, on_quadratics, watched, who
from tests.reference.batches import batches, stream
from tests.reference.fedala import SlowFedALA


@pytest.mark.parametrize(("threshold", "most_passes", "passes"), [(0, 3, {1, 3}), (0.1, 50, {1, 11, 12, 15})])
def test_follows_its_formula_on_quadratics(threshold: float, most_passes: int, passes: set[int]) -> None:
    """One layer, mixed as a whole. Weights learn until the last ten losses are alike or the bound is reached, and from
    then on in one pass."""
    result, problem = on_quadratics(FedALA(eta=0.2, threshold=threshold, most_passes=most_passes))
    slow = SlowFedALA(problem, 0, 0.2, threshold, most_passes, lambda number, client: [None], 0.1)
    close(server(result), slow.run(who(result)))
    assert set(slow.passes) == passes
    compare(result, slow)


def compare(result: ft.RunResult, slow: SlowFedALA) -> None:
    assert len(slow.weights) > 2
    assert any((W < 1).any() for W in slow.weights.values())
    for client, theta in slow.own.items():
        close(personal(result, client), theta)
        assert ("W" in state(result, client)) == (client in slow.weights)
        if client in slow.weights:
            close(state(result, client)["W"], slow.weights[client])


@pytest.mark.parametrize(("p", "cut"), [(1, 6 * 64 + 6), (2, 0), (9, 0)])
def test_follows_its_formula_on_a_network(p: int, cut: int) -> None:
    """With batches of some of the samples, drawn in a round and seen in the same order in all its passes."""
    result, problem = on_a_network(FedALA(p=p, s=0.6, eta=2.0), rounds=6)

    def sampled(number: int, client: int) -> list[Tensor | None]:
        n = problem.samples[client]
        part = torch.randperm(n, generator=stream(29, "sample", number, client))[: round(0.6 * n)]
        drawn = batches(len(part), 29, number, client, purpose="weights", batch=5, epochs=1, drop_last=True)
        return [part if chosen is None else part[chosen] for chosen in drawn]

    slow = SlowFedALA(problem, cut, 2.0, 0.1, 50, sampled, 0.2)
    close(server(result), slow.run(who(result)))
    compare(result, slow)


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
@pytest.mark.parametrize("off", [{"p": 0}, {"eta": 0.0}])
def test_without_weights_it_trains_as_fedavg(off: dict[str, Any], more: dict[str, Any]) -> None:
    mine, average = ft.run("fedala", **{**SMALL, **more}, **off), ft.run("fedavg", **{**SMALL, **more})
    assert torch.equal(server(mine), server(average))
    learned = ft.run("fedala", **{**SMALL, **more})
    assert not torch.equal(server(learned), server(average))


def test_a_highest_layer_is_its_weight_and_its_bias() -> None:
    """Not its bias alone, which is the last tensor."""
    result = ft.run("fedala", **{**SMALL, "participation": "all"})
    W = state(result, 0)["W"]
    assert len(W) == 16 * 10 + 10
    assert (W[:160] < 1).any()
    assert (W[160:] < 1).any()
    assert ((W >= 0) & (W <= 1)).all()


def test_a_client_predicts_with_its_own_last_model() -> None:
    method, log = watched(FedALA)
    result = ft.run(method, **SMALL)
    last = {client: upload["theta"] for (_, client), upload in sorted(log.up.items())}
    assert len(last) > 3
    for client in range(5):
        assert torch.equal(personal(result, client), last.get(client, server(result)))


def test_buffers_come_from_the_global_model() -> None:
    """Two layers are mixed, the normalisation and the head: no weight of a buffer ever learns."""
    result = ft.run("fedala", **{**SMALL, "model": normed(), "participation": "all"}, p=2)
    layout, W = result.simulation.server.layout, state(result, 0)["W"]
    first = layout.size - len(W)
    assert first == layout.norm_layers[0].start
    assert len(layout.buffers) > 1
    for place in layout.buffers:
        assert (W[place.start - first : place.stop - first] == 1).all()


def test_other_samples_are_drawn_in_each_round_and_all_of_them_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, Tensor]] = []
    sampled = FedALA.sampled

    def remembered(self: FedALA, client: ft.Client) -> ft.Client:
        found = sampled(self, client)
        drawn.append((client.n_samples, found.train_data[1]))
        return found

    monkeypatch.setattr(FedALA, "sampled", remembered)
    how = {**SMALL, "participation": "all"}
    for s in (0.5, 1.0):
        drawn.clear()
        ft.run("fedala", **how, s=s)
        assert [len(y) for _, y in drawn] == [round(s * n) for n, _ in drawn]
        assert not torch.equal(drawn[0][1], drawn[5][1])  # of one client, in two rounds


def test_one_sample_and_a_share_that_rounds_to_none() -> None:
    data = digits([1, 3, 30])
    result = ft.run("fedala", data=data, model="mlp:8", s=0.1, rounds=3, test=0.0, engine="in-process",
                    evaluation={"every": 0}, on_failure="stop")  # fmt: skip
    assert all(tensor.isfinite().all() for client in range(3) for tensor in state(result, client).values())


def test_targets_that_are_no_classes_will_do() -> None:
    data = [(x, x.flatten(1)[:, :2]) for x, _ in digits([20, 30])]
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 2))
    result = ft.run("fedala", data=data, model=module, loss="mse", rounds=3, engine="in-process", on_failure="stop")
    assert (state(result, 0)["W"] < 1).any()
