"""FedNTD against its slow reference, its limit cases, its errors, and what it keeps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.methods.fedntd import FedNTD
from tests.helpers import assert_same, digits, final
from tests.methods.parts import SMALL, normed, server
from tests.methods.problems import BODY, EXACT, MOMENTUM, close, features, on_a_network, who
from tests.reference.fedntd import SlowFedNTD


@pytest.mark.parametrize(("beta", "temperature"), [(1.0, 1.0), (2.5, 3.0)])
def test_follows_its_formula(beta: float, temperature: float) -> None:
    result, problem = on_a_network(FedNTD(beta=beta, temperature=temperature))
    samples = [result.data.client(client).train for client in range(6)]

    def logits(client: int, theta: Tensor) -> Tensor:
        return features(samples[client][0], theta) @ theta[BODY : BODY + 60].view(10, 6).T + theta[BODY + 60 :]

    slow = SlowFedNTD(problem, logits, [y.tolist() for _, y in samples], beta, temperature, 0.2)
    close(server(result), slow.run(who(result)))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}, {"label_smoothing": 0.1}])
def test_without_distillation_it_is_fedavg(more: dict[str, Any]) -> None:
    none, average = ft.run("fedntd", **{**SMALL, **more}, beta=0.0), ft.run("fedavg", **{**SMALL, **more})
    assert_same(final(none), final(average))


def away_from_fedavg(data: list[tuple[Tensor, Tensor]], **settings: Any) -> float:
    how: dict[str, Any] = {**EXACT, "data": data, "model": "mlp:6", "rounds": 3, **settings}
    one, average = (ft.run(method, **how) for method in ("fedntd", "fedavg"))
    return float((server(one) - server(average)).abs().max())


def test_one_step_on_all_samples_is_fedavgs() -> None:
    data = digits([40, 30])
    assert away_from_fedavg(data, steps=1, batch="full") < 1e-12
    assert away_from_fedavg(data, steps=2, batch="full") > 1e-6


def test_two_classes_leave_nothing_to_keep() -> None:
    x, y = digits([400])[0]
    of = [(x[y < classes][:60], y[y < classes][:60]) for classes in (2, 3)]
    assert away_from_fedavg([of[0], of[0]]) < 1e-12
    assert away_from_fedavg([of[1], of[1]]) > 1e-6


def test_classes_that_a_client_lacks_are_forgotten_less() -> None:
    """After training on other classes alone, from a model that knew them all."""
    x, y = digits([1200])[0]
    knew = ft.run("fedavg", **EXACT, data=[(x[:600], y[:600])], model="mlp:16", rounds=15, seed=3)
    few = y[600:] < 3
    losses = {}
    for beta in (0.0, 0.3, 3.0):
        run = ft.run(FedNTD(beta=beta), **EXACT, data=[(x[600:][few], y[600:][few])] * 2, model=trained(knew), rounds=1,
                     epochs=5, lr=0.01).simulation  # fmt: skip
        scores = run.predict(0, x[600:][~few].double()).log_softmax(1)
        losses[beta] = -float(scores[torch.arange(len(scores)), y[600:][~few]].mean())
    assert losses[0.0] > 1.1 * losses[0.3] > 1.1 * losses[3.0]


def trained(result: ft.RunResult) -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).double()
    with torch.no_grad():
        for parameter, values in zip(module.parameters(), server(result).split([1024, 16, 160, 10]), strict=True):
            parameter.copy_(values.view_as(parameter))
    return module


def test_targets_that_are_no_classes_are_refused() -> None:
    data = [(x, x.flatten(1)[:, :2]) for x, _ in digits([20, 30])]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with pytest.raises(ft.FedtailorError, match="its targets must be one class label per sample"):
        ft.run("fedntd", data=data, model=model, loss="mse", rounds=1, engine="in-process", on_failure="stop")
