"""Compositions: a correction of gradients on the part that another method shares."""

from typing import Any

import pytest
import torch

import fedtailor as ft
from fedtailor.methods import find_method, method_class, method_title
from fedtailor.testing import CHECKS
from tests.methods.parts import SMALL, close, first, normed, run_parts, unequal_clients
from tests.methods.problems import MOMENTUM
from tests.reference import composition

INNER = ["fedavg", "fedper", "fedrep", "fedrod", "fedbabu", "lg-fedavg", "apfl", "ditto"]
SOME = [*INNER[1:3], pytest.param("fedrod", marks=pytest.mark.slow), "apfl", "lg-fedavg"]


def own_tensors(result: ft.RunResult) -> dict[str, torch.Tensor]:
    """The tensors at the server and at the clients that are not a correction's."""
    tensors = {f"server/{name}": tensor for name, tensor in result.server_state.items()}
    for client in range(len(result.names)):
        tensors |= {f"{client}/{name}": tensor for name, tensor in result.client_state(client).items()}
        tensors[f"{client} predicts"] = result.personal_vector(client)
    return {name: tensor for name, tensor in tensors.items() if name.count("/") < 2 or "momentum" in name}


def test_pgfed_on_fedpers_body_follows_its_formulas() -> None:
    data, centres, curvatures, n_samples = unequal_clients(4, 5)
    settings = {"rounds": 5, "participation": 2, "steps": 3, "lr": 0.05, "seed": 2}
    result = run_parts("pgfed+fedper", data, 3, 2, **settings, parameters={"mu": 0.3, "alpha_lr": 0.2})
    rounds = [record.participants for record in result.rounds]
    shared, heads, alpha = composition.run(
        centres, curvatures, n_samples, first(3, 2), 3, rounds, mu=0.3, alpha_lr=0.2, lr=0.05, steps=3
    )
    close(result.server_state["body"], shared)
    close(result.server_state["pgfed/A"], torch.tensor(alpha, dtype=torch.float64))
    for client, head in heads.items():
        close(result.client_state(client)["head"], head)
    plain = run_parts("fedper", data, 3, 2, **settings)
    assert (plain.server_state["body"] - shared).abs().max() > 1e-3


@pytest.mark.parametrize("outer", ["pgfed", "fedprox", pytest.param("pgfedmo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("inner", SOME)
@pytest.mark.parametrize("more", [{}, pytest.param({**MOMENTUM, "model": normed()}, marks=pytest.mark.slow)])
def test_without_mu_it_is_the_second_method_to_the_bit(outer: str, inner: str, more: dict[str, Any]) -> None:
    settings = {**SMALL, **more}
    mine = own_tensors(ft.run(f"{outer}+{inner}", **settings, parameters={"mu": 0.0}))
    other = own_tensors(ft.run(inner, **settings))
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    moved = own_tensors(ft.run(f"{outer}+{inner}", **settings, parameters={"mu": 0.1}))
    assert not all(torch.equal(moved[name], other[name]) for name in moved)


@pytest.mark.parametrize("outer", ["pgfed", "pgfedmo", "fedprox"])
@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_on_fedavg_it_is_the_first_method_to_the_bit(outer: str, more: dict[str, Any]) -> None:
    settings = {**SMALL, **more, "parameters": {"mu": 0.05}}
    mine, alone = ft.run(f"{outer}+fedavg", **settings), ft.run(outer, **settings)
    for name, tensor in alone.server_state.items():
        assert torch.equal(mine.server_state[name if name == "theta" else f"{outer}/{name}"], tensor), name


@pytest.mark.parametrize("outer", ["scaffold", "feddyn"])
@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_with_equal_clients_it_is_the_first_method_on_fedavg(outer: str, more: dict[str, Any]) -> None:
    """These two weigh all clients alike, and FedAvg by their samples."""
    data = [(torch.randn(20, 4, generator=torch.Generator().manual_seed(k)), torch.arange(20) % 3) for k in range(4)]
    settings = {**SMALL, **more, "data": data, "test": 0.0, "validation": 0.0, "evaluation": {"every": 0}}
    settings |= {"dtype": "float64", "model": "mlp:5"}
    del settings["clients"]
    mine, alone = ft.run(f"{outer}+fedavg", **settings), ft.run(outer, **settings)
    close(mine.server_state["theta"], alone.server_state["theta"], 1e-12)


def test_a_composition_sends_what_both_send_and_the_model_once() -> None:
    settings = {**SMALL, "participation": "all"}
    both, body = ft.run("pgfed+fedper", **settings).rounds[-1], ft.run("fedper", **settings).rounds[-1]
    M = len(both.participants)
    vector, scalars = body.bytes_up // M, 4 * M
    assert both.bytes_up // M == 2 * vector + scalars + 4  # the body, its gradient, α_ij and g⁽¹⁾
    assert both.bytes_down // M == 3 * vector + 2 * scalars  # the body, ḡ and g̃, α_ij and g⁽¹⁾_j


def test_a_composition_has_a_name_a_title_and_the_parameters_of_both() -> None:
    method = find_method("pgfed+fedrep", {"mu": 0.02, "head_epochs": 3})
    assert (type(method).name, type(method).title) == ("pgfed+fedrep", "PGFed + FedRep")
    assert method_title("pgfed+fedrep") == "PGFed + FedRep"
    assert method_class("pgfed+fedrep") is type(method)
    assert {"mu", "alpha_lr", "head_epochs", "refit"} <= set(type(method).model_fields)
    assert {"mu", "head_epochs"} <= set(type(method).search)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fedper+pgfed", "fedper+pgfed: FedPer does more than to correct gradients"),
        ("pgfed-ce+fedper", "PGFed-CE does more than to correct gradients"),
        ("pgfed+fedacs", "pgfed+fedacs: FedACS does not average one slice of the model for PGFed to correct"),
        ("pgfed+ifca", "IFCA does not average one slice"),
        ("pgfed+fedbn", "FedBN does not average one slice"),
        ("feddyn+apfl", "feddyn+apfl: both methods have a parameter 'alpha'"),
        ("pgfed+fedpr", "There is no method 'fedpr': did you mean 'fedper'"),
    ],
)
def test_what_does_not_go_together_is_refused(name: str, said: str) -> None:
    with pytest.raises(ft.FedtailorError, match=said.replace("+", r"\+")):
        ft.run(name, **SMALL)


@pytest.mark.filterwarnings("ignore::fedtailor.ClientFailure")
def test_a_path_of_another_descent_is_refused() -> None:
    with pytest.raises(ft.FedtailorError, match="gradients from the path of a descent with the experiment's settings"):
        ft.run("scaffold+fedrep", **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "name", ["pgfed+fedper", "pgfedmo+fedrod", "scaffold+apfl", "feddyn+fedrep", "fedprox+lg-fedavg"]
)
def test_compositions_pass_the_common_suite(name: str, check: Any) -> None:
    check(find_method(name))
