"""FedRoD against its slow reference, its limit cases, its errors, and what the personal head is worth."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from tests.helpers import digits
from tests.methods.parts import SMALL, absent, close, normed, personal, server, state
from tests.methods.problems import MOMENTUM
from tests.reference.fedrod import FedRoD

FEATURES, HIDDEN, CLASSES = 6, 4, 3


def skewed(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Clients with classes in different numbers, one without the class 2, one with the class 1 alone."""
    generator = torch.Generator().manual_seed(seed)
    counts = [[5, 1, 2], [4, 6, 0], [0, 3, 0], [2, 2, 2]]
    labels = [torch.arange(CLASSES).repeat_interleave(torch.tensor(count)) for count in counts]
    return [(torch.randn(len(y), FEATURES, generator=generator, dtype=torch.float64), y) for y in labels]


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES, bias=bias))


def run_skewed(method: str, data: list[Any], **settings: Any) -> ft.RunResult:
    defaults = {
        "model": network(),
        "dtype": "float64",
        "test": 0.0,
        "validation": 0.0,
        "batch": "full",
        "lr": 0.3,
        "evaluation": {"every": 0},
    }
    return ft.run(method, data=data, engine="in-process", **{**defaults, **settings})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.parametrize("keep", [True, False])
def test_follows_its_formulas(bias: bool, gamma: float, keep: bool) -> None:
    data = skewed()
    more = {"momentum": 0.9, "weight_decay": 0.01, "keep_momentum": keep, "steps": 4, "gamma": gamma}
    result = run_skewed("fedrod", data, model=network(bias), rounds=5, participation=2, seed=4, **more)
    sgd = {"steps": 4, "lr": 0.3, "momentum": 0.9, "weight_decay": 0.01, "keep_momentum": keep}
    slow = FedRoD(FEATURES, HIDDEN, CLASSES, bias, gamma, **sgd)
    rounds = [record.participants for record in result.rounds]
    theta, phis = slow.run(data, rounds, result.simulation.server.initial)
    size = CLASSES * HIDDEN + (CLASSES if bias else 0)
    participated = [client for client in range(4) if client not in absent(result)]
    assert {1, 2} <= set(participated)
    close(server(result, "theta"), theta)
    for client in participated:
        close(state(result, client)["phi"], phis[client])
        close(personal(result, client)[-size:], theta[-size:] + phis[client])
        close(personal(result, client)[:-size], theta[:-size])


def test_the_personal_model_is_one_head_with_the_logits_of_both() -> None:
    data = skewed()
    result = run_skewed("fedrod", data, rounds=3)
    for client in range(4):
        x, phi = data[client][0], state(result, client)["phi"]
        one, generic = network().double(), network().double()
        one.load_state_dict(result.personal(client))
        nn.utils.vector_to_parameters(server(result, "theta"), generic.parameters())
        extra = generic[:2](x) @ phi[: CLASSES * HIDDEN].view(CLASSES, HIDDEN).T + phi[CLASSES * HIDDEN :]  # type: ignore[index]
        assert extra.abs().max() > 0.01
        close(one(x).detach(), (generic(x) + extra).detach(), 1e-12)


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_without_balancing_the_generic_model_is_fedavgs(more: dict[str, Any]) -> None:
    mine, average = ft.run("fedrod", **{**SMALL, **more}, gamma=0.0), ft.run("fedavg", **{**SMALL, **more})
    assert torch.equal(server(mine, "theta"), server(average, "theta"))


def test_with_balanced_clients_the_generic_model_is_fedavgs() -> None:
    """A constant that is added to all logits changes no gradient; it does change last bits."""
    data = [skewed(seed)[3] for seed in range(3)]
    mine, average = run_skewed("fedrod", data, rounds=5), run_skewed("fedavg", data, rounds=5)
    close(server(mine, "theta"), server(average, "theta"), 1e-12)
    unbalanced = run_skewed("fedrod", skewed(), rounds=5), run_skewed("fedavg", skewed(), rounds=5)
    assert (server(unbalanced[0], "theta") - server(unbalanced[1], "theta")).abs().max() > 0.01


def test_classes_that_a_client_lacks_are_left_alone() -> None:
    """A client with one class has nothing to tell the generic model, but much to its personal head."""
    result = run_skewed("fedrod", [skewed()[2]], rounds=2, model=network())
    assert torch.equal(server(result, "theta"), result.simulation.server.initial)
    phi = state(result, 0)["phi"][: CLASSES * HIDDEN].view(CLASSES, HIDDEN)
    assert phi.abs().min() > 0


def softmaxed() -> nn.Module:
    return nn.Sequential(*network(), nn.LogSoftmax(1))


@pytest.mark.parametrize("settings", [{"head": 2}, {"head": 0}, {"model": softmaxed()}])
@pytest.mark.filterwarnings("ignore::fedtailor.ClientFailure")
def test_a_head_that_is_not_one_linear_layer_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ft.FedtailorError, match="FedRoD needs a head that is one linear layer"):
        run_skewed("fedrod", skewed(), rounds=1, **settings)


@pytest.mark.filterwarnings("ignore::fedtailor.ClientFailure")
def test_targets_without_classes_are_refused() -> None:
    data = [(x, x[:, :CLASSES]) for x, _ in skewed()]
    with pytest.raises(ft.FedtailorError, match="its targets must be one class label per sample"):
        run_skewed("fedrod", data, rounds=1, loss="mse")


def test_a_network_that_is_one_linear_layer_will_do() -> None:
    result = ft.run("fedrod", data=digits([60, 60]), model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), rounds=2)
    assert state(result, 0)["phi"].shape == result.simulation.server.initial.shape


def test_the_personal_head_helps_where_classes_are_few() -> None:
    """Two classes a client: the personal models beat the generic one, which has to tell all ten apart."""
    settings = {"data": "digits", "clients": 10, "partition": "classes:2", "model": "mlp:32", "max_train": 60}
    settings |= {"rounds": 4, "epochs": 2, "engine": "in-process"}
    own = ft.run("fedrod", **settings).accuracy
    generic = ft.run("fedrod", **settings, evaluation={"model": "global"}).accuracy
    assert own is not None
    assert generic is not None
    assert own > 0.8  # measured: 0.90
    assert own > generic + 0.3  # measured: 0.35
