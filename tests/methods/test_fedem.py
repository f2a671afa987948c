"""FedEM against its slow reference, its limit cases, its predictions, and what its proportions find."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedtailor as ft
from fedtailor.methods.fedem import FedEM
from tests.helpers import digits
from tests.methods.parts import SMALL, normed, server, state
from tests.methods.problems import BODY, MOMENTUM, close, features, on_a_network, who
from tests.reference.fedem import SlowFedEM


def logits(theta: Tensor, x: Tensor) -> Tensor:
    return features(x, theta) @ theta[BODY : BODY + 60].view(10, 6).T + theta[BODY + 60 :]


@pytest.mark.parametrize("more", [{}, {"label_smoothing": 0.2}])
def test_follows_its_formulas(more: dict[str, Any]) -> None:
    result, problem = on_a_network(FedEM(components=2), rounds=4, **more)
    samples = [result.data.client(client).train for client in range(6)]
    side = result.simulation.server

    def loss(i: int, k: int, theta: Tensor) -> Tensor:
        (x, y), smooth = samples[i], more.get("label_smoothing", 0.0)
        scores = logits(theta, x[k : k + 1]).log_softmax(1)[0]
        return -(1 - smooth) * scores[y[k]] - smooth * scores.mean()

    slow = SlowFedEM(problem, loss, [side.initial_for(m) for m in range(2)], 0.2)
    slow.run(who(result))
    close(server(result), torch.stack(slow.theta))
    assert len(slow.pi) > 3
    for i in range(6):
        assert ("pi" in state(result, i)) == (i in slow.pi)
        if i in slow.pi:
            close(state(result, i)["pi"], torch.tensor(slow.pi[i], dtype=torch.float64))


def test_a_prediction_is_the_mixture_of_probabilities() -> None:
    """Not of logits, and in the proportions of the client, not in equal ones."""
    result, _ = on_a_network(FedEM(components=3))
    x = result.data.client(2).train[0]
    for i in (i for i in range(6) if "pi" in state(result, i)):
        pi, theta = state(result, i)["pi"], server(result)
        expected = sum(share * logits(vector, x).softmax(1) for share, vector in zip(pi, theta, strict=True))
        found = result.simulation.predict(i, x).exp()
        close(found, expected)
        assert (pi - 1 / 3).abs().max() > 1e-3
        assert torch.equal(result.simulation.personal_model(i), theta[pi.argmax()])


def test_a_new_client_fits_its_proportions_to_its_samples() -> None:
    """They are the fixed point of expectation-maximisation, which raises the likelihood in each step."""
    likelihoods = []
    for fitting in (1, 3, 200):
        how = {**SMALL, "new_clients": 1, "participation": "all", "dtype": "float64"}
        run = ft.run("fedem", **how, fitting=fitting).simulation
        new = run.data.n_clients - 1
        x, y = run.data.client(new).train
        assert not state_of(run, new)
        likelihoods.append(-float(functional.nll_loss(run.predict(new, x), y)))
    assert likelihoods[0] < likelihoods[1] < likelihoods[2]


def state_of(run: Any, number: int) -> Any:
    return run.sites.store.get(number)


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_one_component_is_fedavg(more: dict[str, Any]) -> None:
    one, average = ft.run("fedem", **{**SMALL, **more}, components=1), ft.run("fedavg", **{**SMALL, **more})
    if "keep_momentum" not in more:  # the velocities have other names
        assert torch.equal(server(one)[0], server(average))
    else:
        close(server(one)[0], server(average))
    assert one.accuracy == average.accuracy


def test_clients_of_two_kinds_are_told_apart() -> None:
    """Half of the clients count their digits from the other end: no one model serves both."""
    data = [(x, y if i % 2 else 9 - y) for i, (x, y) in enumerate(digits([150] * 6))]
    how: dict[str, Any] = {"data": data, "model": "mlp:16", "rounds": 15, "engine": "in-process", "seed": 1}
    mixture, average = ft.run("fedem", **how, components=2), ft.run("fedavg", **how)
    pi = torch.stack([state(mixture, i)["pi"] for i in range(6)])
    assert (pi.max(1).values > 0.7).all()
    assert len(set(pi.argmax(1)[::2].tolist())) == len(set(pi.argmax(1)[1::2].tolist())) == 1
    assert pi[0].argmax() != pi[1].argmax()
    assert mixture.accuracy is not None
    assert average.accuracy is not None
    assert mixture.accuracy > average.accuracy + 0.2


def test_components_that_begin_equal_are_refused() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(10, 64))

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1) @ self.weight.T

    with pytest.raises(ft.FedtailorError, match="The components begin equal"):
        ft.run("fedem", **{**SMALL, "model": Fixed()})


def test_targets_that_are_no_classes_and_class_weights_are_refused() -> None:
    data = [(x, x.flatten(1)[:, :2]) for x, _ in digits([20, 30])]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with pytest.raises(ft.FedtailorError, match="its targets must be one class label per sample"):
        ft.run("fedem", data=data, model=model, loss="mse", rounds=1, engine="in-process", on_failure="stop")
    with pytest.raises(ft.FedtailorError, match="FedEM cannot train with class_weights"):
        ft.run("fedem", **SMALL, class_weights="balanced")
