"""FedCAC against its slow reference, its closed forms, its limit cases, and whose parameters are critical."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.method import Server
from fedtailor.methods.fedcac import FedCAC
from fedtailor.server.aggregation import Aggregator
from fedtailor.training.layout import Layout
from tests.helpers import digits
from tests.methods.parts import SMALL, absent, normed, personal, server
from tests.methods.problems import MOMENTUM, close, on_a_network, on_quadratics, watched, who
from tests.reference.fedcac import SlowFedCAC

BODY, SIZE = 6 * 64 + 6, 6 * 64 + 6 + 60 + 10


@pytest.mark.parametrize(("tau", "beta"), [(0.5, 100.0), (0.3, 6.0), (0.9, 2.0)])
@pytest.mark.parametrize("problem", ["quadratics", "network"])
def test_follows_its_formulas(problem: str, tau: float, beta: float) -> None:
    """With thresholds that rise slowly, and fast; with clients that come late or never."""
    method, log = watched(FedCAC, tau=tau, beta=beta)
    result, given = {"quadratics": on_quadratics, "network": on_a_network}[problem](method, rounds=7, participation=3)
    layers = [slice(0, 4)] if problem == "quadratics" else [slice(0, BODY), slice(BODY, SIZE)]
    slow = SlowFedCAC(given, layers, tau, beta, result.experiment.lr)
    close(server(result), slow.run(who(result)))
    for at, start in slow.begun.items():
        close(log.down[at]["theta"], start)
    last = {i: t for t, participants in enumerate(who(result), 1) for i in participants}
    for i, t in last.items():
        assert set(log.up[t, i]["mask"].nonzero()[:, 0].tolist()) == slow.masks[i]
        close(personal(result, i), slow.models[i])
    assert slow.helped
    weights = result.observed(7)["weights"]
    for i in last:
        helpers = {i, *slow.helpers(i, 7)}
        expected = [1 / len(helpers) if j in helpers else 0.0 for j in range(6)]
        close(weights[i], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_without_critical_parameters_it_trains_as_fedavg(more: dict[str, Any]) -> None:
    """Buffers aside, which stay the client's own."""
    shared, average = ft.run("fedcac", tau=0.0, **{**SMALL, **more}), ft.run("fedavg", **{**SMALL, **more})
    without = shared.simulation.server.layout.without_buffers
    assert torch.equal(without(server(shared)), without(server(average)))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_after_beta_rounds_critical_parameters_are_the_clients_own(more: dict[str, Any]) -> None:
    method, log = watched(FedCAC, beta=0.5)
    result = ft.run(method, **{**SMALL, **more, "participation": "all"})
    layout = result.simulation.server.layout
    for client in range(5):
        end, mask = log.up[2, client]["theta"], log.up[2, client]["mask"]
        assert 0.4 < mask.float().mean() <= 0.5
        own = layout.copy_buffers(torch.where(mask, end, log.server[2]["theta"]), end)
        assert torch.equal(log.down[3, client]["theta"], own)


def served(masks: Tensor, models: Tensor, round: int, tau: float = 0.5, beta: float = 100.0) -> tuple[FedCAC, Server]:
    """A server of the next round, that has got these models and masks from its first clients."""
    size, clients = models.shape[1], [*range(len(models))]
    layout = Layout(size, slice(0, size - 1), slice(size - 1, size), buffers=(slice(size - 1, size),))
    n = torch.ones(len(models) + 1, dtype=torch.int64)
    side = Server(torch.zeros(size), layout, n, 2.0, round=round, participants=clients)
    method = FedCAC(tau=tau, beta=beta)
    method.start(side)
    total = Aggregator(method.uploads, clients, side.n_samples, layout)
    for client in clients:
        total.put(client, {"theta": models[client], "mask": masks[client]})
    method.receive(side, total.total())
    side.round += 1
    side.participants = [*range(len(models) + 1)]
    return method, side


MASKS = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()


def test_overlaps_are_the_share_of_common_critical_parameters_where_all_have_as_many() -> None:
    method, side = served(MASKS, torch.randn(4, 5), 1)
    expected = torch.tensor([[1, 1, 0.5, 0], [1, 1, 0.5, 0], [0.5, 0.5, 1, 0], [0, 0, 0, 0]]).double()
    assert torch.equal(method.overlaps(side)[:4, :4], expected)
    assert not method.overlaps(side)[4].any()  # has not trained


def test_critical_parameters_come_from_helpers_others_from_all_and_buffers_are_ones_own() -> None:
    models = torch.arange(20.0).view(4, 5)
    method, side = served(MASKS, models, 1, beta=2.0)
    down = {client: message["theta"] for client, message in method.send_all(side).items()}
    mean = models.mean(0)
    pair = models[:2].mean(0)
    expected = torch.stack([pair[0], pair[1], mean[2], mean[3], models[0, 4]])
    torch.testing.assert_close(down[0], expected)  # the threshold is in the middle between 1/3 and 1
    assert torch.equal(down[3], torch.cat([mean[:4], models[3, 4:]]))  # it has no critical ones
    assert torch.equal(down[4], mean)  # it comes for the first time


def test_the_threshold_rises_to_the_highest_overlap_and_above_it() -> None:
    masks = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]).bool()
    for t, helped in ((1, 2), (9, 2), (10, 2), (11, 1)):
        method, side = served(masks, torch.randn(3, 5), t, beta=10.0)
        assert (method.weights(side, [0], t) > 0).sum() == helped, t


def test_equal_overlaps_all_count() -> None:
    """Whatever rounding makes of their mean."""
    masks = torch.eye(7).bool().repeat(1, 2) | torch.ones(1, 14).bool() & (torch.arange(14) < 1)
    method, side = served(masks[1:], torch.randn(6, 14), 1)
    assert (method.weights(side, [*range(6)], 1) > 0).sum() == 36


def test_what_has_not_moved_and_buffers_are_not_critical() -> None:
    layout = Layout(7, slice(0, 5), slice(5, 7), layers={"a": slice(0, 5), "b": slice(5, 7)}, buffers=(slice(4, 5),))
    theta = torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0, 5.0, 5.0])
    change = torch.tensor([4.0, 0.1, 0.5, 0.0, 9.0, 1.0, 2.0])
    assert FedCAC(tau=0.5).critical(layout, theta, change).nonzero()[:, 0].tolist() == [0, 2, 6]
    assert FedCAC(tau=1.0).critical(layout, theta, change).nonzero()[:, 0].tolist() == [0, 1, 2, 5, 6]
    assert not FedCAC(tau=0.0).critical(layout, theta, change).any()


def test_clients_with_the_same_classes_have_the_same_critical_parameters() -> None:
    x, y = digits([1200])[0]
    data = []
    for i in range(6):
        chosen = ((y < 5) == (i < 3)).nonzero()[:, 0][i % 3 :: 3][:60]
        data.append((x[chosen], y[chosen]))
    result = ft.run("fedcac", data=data, model="mlp:16", rounds=4, engine="in-process", stratify=False)
    group = torch.tensor([int(name) < 3 for name in result.names])
    same = (group[:, None] == group).fill_diagonal_(False)
    overlaps = result.observed(4)["overlaps"]
    assert overlaps[same].min() > overlaps[group[:, None] != group].max()


def test_a_mask_costs_a_byte_a_parameter() -> None:
    for record in ft.run("fedcac", **SMALL).rounds:
        n = len(record.participants) * 1210
        assert (record.bytes_down, record.bytes_up) == (4 * n, 5 * n)


def test_a_new_client_predicts_with_the_global_model() -> None:
    result = ft.run("fedcac", **{**SMALL, "new_clients": 1})
    assert torch.equal(personal(result, 4), server(result))
    assert 4 in absent(result)
