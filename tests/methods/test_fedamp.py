"""FedAMP against its slow reference, its closed forms, its limit cases and clients in two groups."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor import method as foundation
from fedtailor.method import Server
from fedtailor.methods.fedamp import FedAMP
from fedtailor.server.aggregation import Aggregator
from fedtailor.training.layout import Layout
from tests.helpers import Quadratic, assert_same, digits, final, mean_output, quadratic_clients
from tests.methods.problems import EXACT, MOMENTUM, SMALL, close, on_both, watched, who
from tests.reference.fedamp import attention, fedamp


def served(models: list[Tensor], method: FedAMP, buffers: tuple[slice, ...] = ()) -> Server:
    """A server that has received these models from all clients."""
    size, clients = len(models[0]), list(range(len(models)))
    layout = Layout(size, slice(0, size - 1), slice(size - 1, size), buffers=buffers)
    server = Server(torch.ones_like(models[0]), layout, torch.arange(1, len(models) + 1), len(models))
    method.start(server)
    called(server, 1, clients)
    total = Aggregator(method.uploads, clients, server.n_samples, layout)
    for client, model in enumerate(models):
        total.put(client, {"w": model})
    method.receive(server, total.total())
    return server


def called(server: Server, number: int, participants: list[int]) -> None:
    server.round, server.participants = number, participants


def some_models(count: int = 5, size: int = 7, seed: int = 0) -> list[Tensor]:
    return list(torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:FedAMP")
@pytest.mark.parametrize(("step", "sigma"), [(1.0, 10.0), (0.3, 3.0), (7.0, 1e3), (0.1, 0.5), (40.0, 9.0)])
def test_the_weights_are_the_formulas(step: float, sigma: float) -> None:
    models = some_models()
    method = FedAMP(server_step=step, sigma=sigma)
    server = served(models, method)
    found = method.observe(server)["weights"]
    for i in range(5):
        close(found[i], torch.tensor(attention(models, i, step, sigma), dtype=torch.float64))
    called(server, 2, [1, 4])
    sent = method.send_all(server)
    assert list(sent) == [1, 4]
    for i in (1, 4):
        close(sent[i]["u"], sum(w * model for w, model in zip(found[i], models, strict=True)))


@pytest.mark.parametrize("clients", [2, 5, 9])
def test_a_step_up_to_sigma_over_the_other_clients_gives_the_formula_as_it_is(clients: int) -> None:
    """Σ_{j≠i} ξ_ij is largest where all models are equal: then it is (N−1) α_k / σ."""
    models = [some_models(1)[0]] * (clients - 1) + some_models(1, seed=1)
    method = FedAMP(server_step=3.0 / (clients - 1), sigma=3.0)
    weights = method.weights(served(models, method), [*range(len(models))])
    others = weights - weights.diag().diag()
    plain = 1 / (clients - 1) * torch.exp(-served(models, method).state["D"] / 3.0)
    close(others, plain - plain.diag().diag())
    assert (weights >= 0).all()


@pytest.mark.parametrize("clients", [2, 22, 100])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0])
def test_by_default_every_client_has_a_say_in_its_own_mix(clients: int, spread: float) -> None:
    """ξ_ii ≥ 1/N whatever the models are, and ξ_ij = ξ_ii where all are equal. (A warning would be an error here.)"""
    method = FedAMP()
    models = [spread * model for model in some_models(clients)]
    weights = method.weights(served(models, method), [*range(clients)])
    assert (weights.diag() >= 1 / clients - 1e-12).all()
    close(weights.sum(1), torch.ones(clients, dtype=torch.float64))
    if not spread:
        close(weights, torch.full((clients, clients), 1 / clients, dtype=torch.float64))


@pytest.mark.parametrize("clients", [2, 22, 100])
def test_the_default_pull_does_not_depend_on_the_number_of_clients(clients: int) -> None:
    for method in (FedAMP(), FedAMP(sigma=3.0), FedAMP(server_step=0.01)):
        server = served(some_models(clients), method)
        called(server, 2, [1])
        assert method.send_all(server)[1]["pull"].item() == 0.05
    method = FedAMP(lam=0.7)  # α_k = 10/N
    server = served(some_models(clients), method)
    called(server, 2, [0])
    assert method.send_all(server)[0]["pull"].item() == pytest.approx(0.7 * clients / 10)


def test_a_step_that_leaves_clients_without_a_weight_of_their_own_is_named_once() -> None:
    how: dict[str, Any] = {**SMALL, "participation": "all", "rounds": 4, "sigma": 1e3}
    with pytest.warns(UserWarning, match=r"own model counts.*server_step 300 is too large for 6 clients") as found:
        result = ft.run("fedamp", server_step=300.0, **how)
    assert len([one for one in found if "own model" in str(one.message)]) == 1
    assert result.observed(4)["weights"].diag().max() < 1e-6
    ft.run("fedamp", server_step=200.0, **how)  # σ/(N−1)


@pytest.mark.filterwarnings("ignore:FedAMP")
def test_a_larger_step_still_makes_a_mean_of_models() -> None:
    """Beyond, ξ_ii would be negative, and u_i outside what the models span."""
    for step in (1.0, 5.0, 1e3, 1e6):
        method = FedAMP(server_step=step, sigma=10.0)
        for dtype in (torch.float32, torch.float64):
            server = served([model.to(dtype) for model in some_models(30)], method)
            weights = method.weights(server, [*range(30)])
            assert (weights >= 0).all()
            torch.testing.assert_close(weights.sum(1), torch.ones(30, dtype=dtype))


def test_the_weights_of_some_clients_are_rows_of_those_of_all() -> None:
    method = FedAMP(sigma=1.0)
    server = served(some_models(9), method)
    assert torch.equal(method.weights(server, [1, 4, 8]), method.weights(server, [*range(9)])[[1, 4, 8]])


def test_equal_models_stay_equal_whatever_the_step() -> None:
    method = FedAMP(server_step=100.0)
    server = served(some_models(1) * 4, method)
    called(server, 2, [0])
    close(method.send_all(server)[0]["u"], some_models(1)[0])


@pytest.mark.filterwarnings("ignore:FedAMP")
@on_both
@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        ({}, {"participation": 3}),
        ({"lam": 0.6, "server_step": 1.5, "sigma": 4.0}, {}),
        ({"lam": 0.5, "server_step": 6.0, "sigma": 8.0}, {"momentum": 0.6, "keep_momentum": True, "participation": 4}),
    ],
)
def test_a_slow_version_comes_to_the_same_vectors(
    run_on: Any, parameters: dict[str, Any], settings: dict[str, Any]
) -> None:
    method, log = watched(FedAMP, **parameters)
    result, problem = run_on(method, **settings)
    momentum, attracted = settings.get("momentum", 0.0), 0
    known = {"lam": 0.05 * 10 / 6, "server_step": 10 / 6, "sigma": 10.0, **parameters}
    for number, slow in enumerate(fedamp(problem, who(result), lr=result.experiment.lr, momentum=momentum, **known), 1):
        for i, u in slow.u.items():
            close(log.down[number, i]["u"], u)
            close(log.up[number, i]["w"], slow.models[i])
            attracted += int((u - slow.before[i]).abs().max() > 1e-3)
        close(log.server[number]["mean"], torch.stack(slow.models).mean(0))
    assert attracted >= 2
    participated = {client for clients in who(result) for client in clients}
    for client in participated:
        close(result.personal_vector(client), slow.models[client])
    if settings == {}:
        assert participated < set(range(6))


@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_without_attraction_it_is_local(more: dict[str, Any]) -> None:
    ours, local = ft.run("fedamp", lam=0.0, **SMALL, **more), ft.run("local", **SMALL, **more)
    for client in {client for clients in who(ours) for client in clients}:
        assert torch.equal(ours.personal_vector(client), local.personal_vector(client))


@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_one_client_alone_is_fedprox(more: dict[str, Any]) -> None:
    how: dict[str, Any] = {**SMALL, "clients": None, "data": digits([40]), "participation": "all", **more}
    ours, prox = ft.run("fedamp", lam=0.6, server_step=2.0, **how), ft.run("fedprox", mu=0.3, **how)
    assert torch.equal(final(ours)["0/w"], final(prox)["server/theta"])


def test_clients_too_far_from_each_other_are_alone() -> None:
    """With so small a σ each client does what it would do as the only one, bit for bit."""
    how: dict[str, Any] = {**SMALL, "participation": "all", "rounds": 3, "lam": 0.6, "server_step": 2.0}
    method, log = watched(FedAMP, lam=0.6, server_step=2.0, sigma=1e-4)
    result = ft.run(method, **{name: how[name] for name in how if name not in ("lam", "server_step")})
    assert torch.equal(result.observed(1)["weights"], torch.eye(6))
    for number in (2, 3):
        for client in range(6):
            assert torch.equal(log.down[number, client]["u"], log.up[number - 1, client]["w"])
    assert_same(final(result), final(ft.run("fedamp", sigma=1e-5, **how)))


def test_a_far_larger_sigma_is_the_plain_mean() -> None:
    """exp(−‖w_i − w_j‖²/σ) is 1 up to 1e-8 of it here, so u_i is the mean up to that."""
    models = some_models(5)
    method = FedAMP(sigma=1e10)
    server = served(models, method)
    called(server, 2, [3])
    torch.testing.assert_close(method.send_all(server)[3]["u"], torch.stack(models).mean(0), rtol=0, atol=1e-8)


def test_many_local_steps_end_at_the_prox_point_and_a_smaller_step_keeps_clients_where_they_are() -> None:
    """argmin f(w) + λ/(2α)‖w − u‖² = (H + λ/α)⁻¹(Hc + λ/α u), which is u for α → 0."""
    data, centres, curvatures = quadratic_clients(2, 4, seed=1)
    eye = torch.eye(4, dtype=torch.float64)
    moved = []
    for step, lr in ((1.0, 0.2), (0.01, 0.01), (0.0001, 0.0001)):
        method, log = watched(FedAMP, lam=1.0, server_step=step, sigma=5.0)
        how = {"rounds": 2, "steps": 80, "batch": "full", "lr": lr, **EXACT}
        ft.run(method, data=data, model=Quadratic(4), loss=mean_output, **how)
        for i in range(2):
            H, u = curvatures[i], log.down[2, i]["u"]
            close(log.up[2, i]["w"], torch.linalg.solve(H + eye / step, H @ centres[i] + u / step))
        moved.append(max(float(log.up[2, i]["w"].norm()) for i in range(2)))
    assert moved[0] > 0.5
    assert moved[1] < 0.1
    assert moved[2] < 0.002


def test_where_it_settles_each_client_balances_its_loss_and_the_others_attraction() -> None:
    """A fixed point of the two steps has ∇f_i(w_i) + λ Σ_j A'(‖w_i − w_j‖²)(w_i − w_j) = 0, whatever α is."""
    data, centres, curvatures = quadratic_clients(3, 3, seed=4)
    ends = []
    for step in (2.0, 4.0):
        method = FedAMP(lam=1.5, server_step=step, sigma=12.0)
        how = {"rounds": 60, "steps": 6, "batch": "full", "lr": 0.15, **EXACT, "evaluation": {"every": 0}}
        run = ft.run(method, data=data, model=Quadratic(3), loss=mean_output, **how)
        w = [run.personal_vector(i) for i in range(3)]
        for i in range(3):
            slope = curvatures[i] @ (w[i] - centres[i])
            for j in range(3):
                away = w[i] - w[j]
                slope = slope + 1.5 * math.exp(-float(away @ away) / 12.0) / 12.0 * away
            assert slope.abs().max() < 1e-9
        ends.append(torch.stack(w))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-8)
    assert (ends[0] - centres).abs().max() > 0.05  # the attraction is felt


def test_clients_of_one_group_attract_each_other() -> None:
    """Half the clients call each digit y by the name 9 − y. (The mean weight within groups and across them.)"""
    data = [(x, y if i < 3 else 9 - y) for i, (x, y) in enumerate(digits([80] * 6))]
    result = ft.run("fedamp", data=data, model="mlp:32", rounds=6, lr=0.2, engine="in-process")
    weights = result.observed(6)["weights"]
    within = [weights[i, j] for i in range(6) for j in range(6) if i != j and (i < 3) == (j < 3)]
    across = [weights[i, j] for i in range(6) for j in range(6) if (i < 3) != (j < 3)]
    assert min(within) > 1.5 * max(across)


def test_new_clients_get_the_mean_of_all_models() -> None:
    result = ft.run("fedamp", **SMALL, new_clients=2, evaluation={"clients": "new"})
    run = result.simulation
    models = [run.state_of(client).get("w", run.server.initial) for client in range(4)]
    for client in (4, 5):
        torch.testing.assert_close(run.personal_model(client), torch.stack(models).mean(0), rtol=0, atol=1e-6)
        assert run.state_of(client) == {}


def test_buffers_count_in_no_distance() -> None:
    models = some_models(3)
    changed = [model.clone() for model in models]
    for number, model in enumerate(changed):
        model[2:4] = 100.0 * number
    for model in models:
        model[2:4] = 1.0
    method = FedAMP()
    plain, other = served(models, method), served(changed, method, buffers=(slice(2, 4),))
    close(other.state["D"], plain.state["D"])


def test_models_in_several_blocks_are_models_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ft.run("fedamp", **SMALL, dtype="float64")
    monkeypatch.setattr(foundation, "BLOCK", 2 * len(whole.simulation.server.initial))
    blocks = final(ft.run("fedamp", **SMALL, dtype="float64"))
    for name, tensor in final(whole).items():
        torch.testing.assert_close(blocks[name], tensor, rtol=0, atol=1e-12)
