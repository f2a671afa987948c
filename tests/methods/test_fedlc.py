"""FedLC against its slow reference, its limit cases, its errors, and what the printed loss comes to."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.methods.fedlc import FedLC
from tests.helpers import assert_same, digits, final
from tests.methods.parts import SMALL, normed, server
from tests.methods.problems import EXACT, MOMENTUM, close, on_a_network, who
from tests.reference.fedlc import SlowFedLC


@pytest.mark.parametrize(("tau", "least"), [(1.0, 1.0), (2.5, 0.3), (1.0, 0.0)])
def test_follows_its_formula(tau: float, least: float) -> None:
    result, problem = on_a_network(FedLC(tau=tau, least=least))
    samples = [result.data.client(client).train for client in range(6)]
    assert any(len(y.unique()) < 10 for _, y in samples)

    def logits(client: int, theta: Tensor) -> Tensor:
        w, b, v, c = theta.split([6 * 64, 6, 10 * 6, 10])
        return (samples[client][0] @ w.view(6, 64).T + b).relu() @ v.view(10, 6).T + c

    slow = SlowFedLC(problem, logits, [y for _, y in samples], tau, least, 0.2)
    close(server(result), slow.run(who(result)))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}, {"label_smoothing": 0.1}])
def test_without_calibration_it_is_fedavg(more: dict[str, Any]) -> None:
    none, average = ft.run("fedlc", **{**SMALL, **more}, tau=0.0, least=0.0), ft.run("fedavg", **{**SMALL, **more})
    assert_same(final(none), final(average))


def of_classes(*counts: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Clients with so many digits of each class."""
    x, y = digits([1000])[0]
    places = [
        torch.cat([(y == c).nonzero()[i * 9 :][:n, 0] for c, n in enumerate(n_c)]) for i, n_c in enumerate(counts)
    ]
    return [(x[chosen].double(), y[chosen]) for chosen in places]


def dense() -> nn.Module:
    """A network with an output for each digit, also for those that nobody has."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))


def test_with_balanced_clients_it_is_fedavg() -> None:
    """A constant that is taken from all logits changes no gradient; it does change last bits."""
    how: dict[str, Any] = {**EXACT, "model": "mlp:6", "rounds": 4}
    for counts, same in (([[4] * 10, [6] * 10, [9] * 10], True), ([[4] * 5 + [9] * 5, [6] * 10, [9] * 10], False)):
        data = of_classes(*counts)
        one, average = ft.run("fedlc", data=data, **how), ft.run("fedavg", data=data, **how)
        distance = (server(one) - server(average)).abs().max()
        assert (distance < 1e-12) == same


def test_classes_that_a_client_lacks() -> None:
    """By the formula as it is, their outputs stay where they are; counting as one sample, they are kept down a bit."""
    how: dict[str, Any] = {**EXACT, "data": of_classes([9, 9] + [0] * 8), "model": dense(), "rounds": 2}
    moved = {}
    for least in (0.0, 1.0):
        result = ft.run("fedlc", **how, least=least)
        away = (server(result) - result.simulation.server.initial)[-10:]
        moved[least] = (away != 0).tolist()
    assert moved == {0.0: [True, True] + [False] * 8, 1.0: [True] * 10}


def test_by_the_formula_a_client_with_one_class_changes_nothing() -> None:
    result = ft.run("fedlc", **EXACT, data=of_classes([9] + [0] * 9), model=dense(), rounds=2, least=0.0)
    assert torch.equal(server(result), result.simulation.server.initial)


def test_a_larger_strength_asks_for_a_larger_margin_of_the_rare_class() -> None:
    data = of_classes([8, 2] + [0] * 8)

    def margin(tau: float) -> float:
        """How far the logit of the rare class is above the other's, on its own samples."""
        result = ft.run("fedlc", **EXACT, data=data, model=dense(), rounds=20, tau=tau)
        x, y = result.data.client(0).train
        w, b, v, c = server(result).split([6 * 64, 6, 10 * 6, 10])
        scores = ((x @ w.view(6, 64).T + b).relu() @ v.view(10, 6).T + c)[y == 1]
        return float((scores[:, 1] - scores[:, 0]).mean())

    assert margin(0.0) < margin(2.0) < margin(5.0)


class Printed(FedLC):
    """The loss as the paper prints it: the true class is not in the sum."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        n = client.train_data[1].bincount(minlength=10).clamp(min=1)

        def objective(batch: ft.method.Batch) -> Tensor:
            f = batch.outputs - self.tau * n**-0.25
            own = nn.functional.one_hot(batch.y, 10).bool()
            return (f.masked_fill(own, -torch.inf).logsumexp(1) - f[own]).mean()

        return {"theta": client.descend(message["theta"], objective=objective)}


def test_the_printed_loss_collapses_where_this_one_learns() -> None:
    """Its gradient does not end where samples are right: the model grows without end."""
    how: dict[str, Any] = {
        "data": "digits",
        "clients": 5,
        "rounds": 3,
        "engine": "in-process",
        "aggregation": "mean:inf",
    }
    printed, softmax = ft.run(Printed(), **how), ft.run("fedlc", **how)
    assert softmax.accuracy is not None
    assert printed.accuracy is not None
    assert softmax.accuracy > printed.accuracy + 0.2  # measured: 0.61 against 0.14
    assert server(printed).abs().max() > 1000 * server(softmax).abs().max()


def test_what_it_cannot_train_with_is_refused() -> None:
    with pytest.raises(ft.FedtailorError, match=r"FedLC cannot train with label_smoothing 0\.1"):
        ft.run("fedlc", **SMALL, least=0.0, label_smoothing=0.1)
    data = [(x, x.flatten(1)[:, :2]) for x, _ in digits([20, 30])]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with pytest.raises(ft.FedtailorError, match="its targets must be one class label per sample"):
        ft.run("fedlc", data=data, model=model, loss="mse", rounds=1, engine="in-process", on_failure="stop")
