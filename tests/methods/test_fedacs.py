"""FedACS against a second, slow implementation, its closed forms, its limit cases and Theorem 1's schedule.

The slow version is written from the paper: loops over i and j, float64, plain autograd.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.method import Server
from fedtailor.methods.fedacs import FedACS
from fedtailor.server.aggregation import Aggregator
from fedtailor.training.layout import Layout
from tests.helpers import Quadratic, assert_same, digits, final, mean_output, quadratic_clients
from tests.methods.problems import EXACT, MOMENTUM, SMALL, Problem, close, on_a_network, on_both, watched, who
from tests.reference.fedacs import SlowFedACS, mix, p_quantile, similarities


@on_both
@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        ({"quantile": 0.5}, {}),
        ({"quantile": 0.3, "server_step": 0.4}, {}),
        ({"quantile": 0.1}, {"participation": 3}),
        ({"quantile": 0.7}, {"momentum": 0.6, "keep_momentum": True, "participation": 4}),
        ({"quantile": 0.3, "trained_only": True}, {}),
    ],
)
def test_a_slow_version_comes_to_the_same_vectors(
    run_on: Callable[..., tuple[ft.RunResult, Problem]], parameters: dict[str, Any], settings: dict[str, Any]
) -> None:
    method, log = watched(FedACS, **parameters)
    assert isinstance(method, FedACS)
    result, problem = run_on(method, **settings)
    momentum = settings.get("momentum", 0.0)
    slow = SlowFedACS(problem, who(result), lr=result.experiment.lr, momentum=momentum, **parameters)
    slow.run()
    mixed = 0
    for (number, client), u in slow.started.items():
        close(log.down[number, client]["u"], u)
        earlier = [t for t in range(1, number) if client in who(result)[t - 1]]
        before = log.up[earlier[-1], client]["w"] if earlier else problem.initial
        mixed += int((u - before).abs().max() > 1e-3)
    assert mixed >= 2
    for number, S, delta in zip(log.server, slow.matrices, slow.thresholds, strict=True):
        close(log.server[number]["S"], S)
        counted = log.server[number]["trained"] | (not method.trained_only)
        found = np.quantile(log.server[number]["S"][counted][:, counted].numpy(), parameters["quantile"])
        assert float(found) == pytest.approx(delta, abs=1e-12)
    assert S.min() < 0.95
    for client in range(6):
        close(result.personal_vector(client), slow.models[client])
    if "participation" not in settings:
        assert set(range(6)) - {client for called in who(result) for client in called}  # somebody was never called


def served(
    vectors: Sequence[Tensor], method: FedACS, later: dict[int, Tensor] | None = None, initial: Tensor | None = None
) -> Server:
    """A server that has received these models from all clients and later, in another round, these from some."""
    size = len(vectors[0])
    server = Server(
        torch.ones_like(vectors[0]) if initial is None else initial,
        Layout(size, body=slice(0, size - 1), head=slice(size - 1, size)),
        n_samples=torch.arange(1, len(vectors) + 1),
        per_round=len(vectors),
    )
    method.start(server)
    for round, models in enumerate((dict(enumerate(vectors)), later or {}), 1):
        if models:
            receive(server, method, round, models)
    return server


def receive(server: Server, method: FedACS, round: int, models: dict[int, Tensor]) -> None:
    server.round, server.participants = round, sorted(models)
    aggregator = Aggregator(method.uploads, server.participants, server.n_samples, server.layout)
    for client, model in models.items():
        aggregator.put(client, {"w": model})
    method.receive(server, aggregator.total())


def start(server: Server, method: FedACS, participants: list[int] | None = None) -> dict[int, Tensor]:
    """The u_i that these participants (or all clients) get next."""
    server.participants = list(range(server.n_clients)) if participants is None else participants
    server.round += 1
    return {client: message["u"] for client, message in method.send_all(server).items()}


def some_models(count: int, size: int, seed: int = 0, shift: float = 0.7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, size, generator=generator, dtype=torch.float64) + shift)


@pytest.mark.parametrize("quantile", [0.0, 0.2, 0.35, 0.5, 0.77, 0.9, 1.0])
@pytest.mark.parametrize("step", [1.0, 0.3, 0.0])
def test_equation_4_and_its_general_step_against_a_loop(quantile: float, step: float) -> None:
    """u_i = w_i − a(w_i − Σ_j ŝ_ij w_j), also for some of the clients alone, and where entries are equal to δ."""
    for seed in range(8):
        models = some_models(6, 9, seed)
        method = FedACS(quantile=quantile, server_step=step)
        server = served(models, method)
        S = similarities(models)
        for participants in ([0, 1, 2, 3, 4, 5], [1, 4]):
            for client, u in start(server, method, participants).items():
                close(u, models[client] - step * (models[client] - mix(models, S, client, quantile)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_who_helps_whom_is_mutual(dtype: torch.dtype) -> None:
    """s_ij = s_ji. Entries come in pairs, so δ often is one of them, and s_ij > δ must not depend on the side."""
    for seed in range(20):
        for quantile in (0.35, 0.5, 0.75):
            method = FedACS(quantile=quantile)
            server = served([model.to(dtype) for model in some_models(6, 7, seed)], method)
            helps = method.weights(server, list(range(6))) > 0
            assert torch.equal(helps, helps.T)
            assert helps.sum() > 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clients_with_the_same_model_count_alike(dtype: torch.dtype) -> None:
    """All that were not called yet have the first vector. Their similarities to a client are the same number, so δ is
    often among them: all of them are above it or none."""
    for seed in range(20):
        models = [model.to(dtype) for model in some_models(4, 203, seed)]
        for quantile in (0.1, 0.2, 0.3, 0.4):
            method = FedACS(quantile=quantile)
            server = served([models[0]] * 11, method, {2: models[1], 5: models[2], 7: models[3]}, initial=models[0])
            idle = method.weights(server, [2, 5, 7])[:, [0, 1, 3, 4, 6, 8, 9, 10]]
            torch.testing.assert_close(idle, idle[:, :1].expand(3, 8), rtol=1e-5, atol=0)


@pytest.mark.parametrize("lr", [0.0005, 0.002])
def test_small_steps_mix_as_many_models_in_single_precision(lr: float) -> None:
    """Similarities of models that have hardly moved differ from 1 by less than single precision shows: what counts is
    by how much. (1.0 and 9.0 models in place of 10 if S is a product of the models themselves.)"""
    how: dict[str, Any] = {"data": "digits", "clients": 20, "model": "mlp:32", "epochs": 1, "max_train": 40, "seed": 1}
    single, double = (
        ft.run("fedacs", rounds=3, lr=lr, dtype=dtype, engine="in-process", **how).observed(3)
        for dtype in ("float32", "float64")
    )
    assert (1 - double["S"]).max() < 1e-4
    assert (double["weights"] > 0).sum() == 200
    assert torch.equal(single["weights"] > 0, double["weights"] > 0)
    torch.testing.assert_close(1 - single["S"], 1 - double["S"], rtol=1e-3, atol=0)


def test_similarities_are_computed_in_double_precision() -> None:
    """Of models in single precision, near each other or not: to the last digits of 1 − s."""
    generator = torch.Generator().manual_seed(0)
    for spread in (1e-5, 1e-3, 1.0):
        models = [torch.ones(5000) + spread * torch.randn(5000, generator=generator) for _ in range(6)]
        S = served(models, FedACS(), {1: models[1] * 1.5}).state["S"]
        models[1] = models[1] * 1.5
        expected = torch.tensor(similarities([model.double() for model in models]), dtype=torch.float64)
        assert S.dtype == torch.float64
        torch.testing.assert_close((1 - S)[[0, 2, 3]], (1 - expected)[[0, 2, 3]], rtol=1e-3, atol=1e-14)


def test_with_few_participants_the_first_rounds_are_local_unless_only_trained_clients_count() -> None:
    """Clients that were not called yet are similar to each other by 1, and soon are most of the clients: δ is 1 as long
    as their pairs are more than half of all entries of S."""
    how: dict[str, Any] = {"data": "digits", "clients": 20, "model": "mlp:16", "max_train": 40, "seed": 1}
    how |= {"rounds": 8, "participation": 2, "engine": "in-process"}
    method, log = watched(FedACS)
    result = ft.run(method, **how)
    trained: set[int] = set()
    for number, participants in enumerate(who(result), 1):
        S = log.server[number - 1]["S"] if number > 1 else torch.ones(20, 20)
        if (20 - len(trained)) ** 2 + len(trained) > 200:
            assert float(np.quantile(S.numpy(), 0.5)) == 1
        trained |= set(participants)
    local = ft.run("local", **{**how, "rounds": 4})
    alone = ft.run("fedacs", **{**how, "rounds": 4})
    early = ft.run("fedacs", trained_only=True, **{**how, "rounds": 4})
    for client in range(20):
        assert torch.equal(alone.personal_vector(client), local.personal_vector(client))
    helped = [not torch.equal(early.personal_vector(client), local.personal_vector(client)) for client in range(20)]
    assert sum(helped) >= 3


def test_ones_own_model_counts_if_any_does() -> None:
    """Models that point the same way have similarity 1, and the own one must not be left out when rounding makes that
    of another more than 1 (the paper: "the similarity of the client model to itself is always one")."""
    for seed in range(20):
        (direction,) = some_models(1, 50, seed)
        models = [factor * direction.float() for factor in (1.0, 1.1, 1.3, 1.7)] + [some_models(1, 50, 99)[0].float()]
        method = FedACS(quantile=0.5)
        weights = method.weights(served(models, method), list(range(5)))
        assert (weights.diagonal() >= weights.max(1).values - 1e-6).all()


def test_a_model_of_zeros_is_similar_to_nothing_else() -> None:
    """Its cosine is 0/0. Clients that were not called yet have the first vector, which may be zero."""
    models = some_models(3, 5)
    zero = torch.zeros(5, dtype=torch.float64)
    method = FedACS(quantile=0.3)
    server = served([*models, zero, zero], method, initial=zero)
    S = server.state["S"]
    assert S.isfinite().all()
    assert torch.equal(S.diagonal(), torch.ones(5, dtype=torch.float64))
    assert (S[:3, 3:] == 0).all()
    u = start(server, method)
    assert (u[0] - models[0]).norm() > 1e-3  # the others still help each other
    assert torch.equal(u[3], zero)


@pytest.mark.parametrize("more", [{}, MOMENTUM])
@pytest.mark.parametrize("parameters", [{"server_step": 0.0, "quantile": 0.2}, {"quantile": 1.0}, {"quantile": 0.9}])
def test_without_collaboration_it_is_local(parameters: dict[str, Any], more: dict[str, Any]) -> None:
    """Bit for bit: with a server step of 0, and with δ at or above every similarity to others. Of 36 entries 30 are
    similarities to others, so the 0.9-quantile lies among the 1s of the diagonal."""
    ours, local = ft.run("fedacs", **parameters, **SMALL, **more), ft.run("local", **SMALL, **more)
    for client in range(6):
        assert torch.equal(ours.personal_vector(client), local.personal_vector(client))
    collaborating = ft.run("fedacs", quantile=0.2, **SMALL, **more)
    assert any(
        not torch.equal(collaborating.personal_vector(client), local.personal_vector(client)) for client in range(6)
    )


def test_a_threshold_between_the_others_and_oneself_is_local() -> None:
    """δ < 1, but above every similarity to others: of 25 entries 20, so at p = 0.8 between the greatest and 1."""
    models, method = some_models(5, 30), FedACS(quantile=0.8)
    server = served(models, method)
    S = server.state["S"]
    others = S - 2 * torch.eye(5, dtype=torch.float64)
    delta = float(np.quantile(S.numpy(), 0.8))
    assert others.max() < delta < 1
    for client, u in start(server, method).items():
        assert torch.equal(u, models[client])
    below = FedACS(quantile=0.7)
    assert any(not torch.equal(u, models[client]) for client, u in start(server, below).items())


def test_ties_at_1_keep_the_own_vector() -> None:
    """Nothing is greater than δ = 1. The models have exact similarities: multiples of one axis by powers of 2."""
    models = [factor * torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64) for factor in (1, 2, 4, 8)]
    for quantile in (0.0, 0.5, 1.0):
        method = FedACS(quantile=quantile)
        server = served(models, method)
        assert torch.equal(server.state["S"], torch.ones(4, 4, dtype=torch.float64))
        for client, u in start(server, method).items():
            assert torch.equal(u, models[client])


def test_equal_similarities_above_the_threshold_give_the_mean() -> None:
    """Three models of one direction and one across: δ = 0, and the three get their plain mean, whatever their samples:
    FedAvg with equal weights."""
    axis, across = torch.eye(2, dtype=torch.float64)
    models = [1 * axis, 2 * axis, 4 * axis, across]
    method = FedACS(quantile=0.2)
    u = start(served(models, method), method)
    for client in range(3):
        close(u[client], 7 / 3 * axis)
    close(u[3], across)


def test_identical_clients_are_fedavg_with_equal_weights() -> None:
    ((x, y),) = digits([30])
    how: dict[str, Any] = {"data": [(x.double(), y)] * 3, "model": "mlp:6", "rounds": 4, "batch": "full", "lr": 0.3}
    average = ft.run("fedavg", **how, **EXACT)
    for quantile in (0.0, 0.5, 1.0):
        ours = ft.run("fedacs", quantile=quantile, **how, **EXACT)
        for client in range(3):
            close(ours.personal_vector(client), average.server_state["theta"])
    assert (average.server_state["theta"] - average.simulation.server.initial).abs().max() > 0.01


def test_models_that_point_the_other_way_never_help() -> None:
    """With p = 0 here δ = −1, so Eq. 4 as it is printed would give client 0 the mix (w_0 − ½ w_2 …) / (1 − ½ …)."""
    angles = torch.tensor([0.0, np.pi, 2 * np.pi / 3, 0.3], dtype=torch.float64)
    models = [scale * torch.stack([a.cos(), a.sin()]) for a, scale in zip(angles, (1.0, 2.0, 3.0, 0.5), strict=True)]
    S = similarities(models)
    method = FedACS(quantile=0.0)
    server = served(models, method)
    assert p_quantile(S, 0.0) == pytest.approx(-1)
    assert S[0][2] == pytest.approx(-0.5)
    u = start(server, method)
    helped = {0: [0, 3], 1: [1, 2], 2: [1, 2], 3: [0, 3]}
    for client, others in helped.items():
        scores = torch.tensor([S[client][j] for j in others], dtype=torch.float64)
        close(u[client], scores / scores.sum() @ torch.stack([models[j] for j in others]))
    assert (method.weights(server, [0, 1, 2, 3]) >= 0).all()


def test_only_the_rows_of_clients_that_changed_are_computed_again() -> None:
    method = FedACS()
    models = some_models(6, 8)
    server = served(models, method)
    marked = server.state["S"].clone()
    unchanged = [0, 2, 4, 5]
    for i in unchanged:
        for j in unchanged:
            marked[i, j] = 0.125 + 0.01 * (i + j) if i != j else 1.0
    server.state["S"] = marked.clone()
    new = {1: -models[1], 3: models[3].flip(0)}
    receive(server, method, 2, new)
    S = server.state["S"]
    assert torch.equal(S[unchanged][:, unchanged], marked[unchanged][:, unchanged])
    expected = torch.tensor(similarities([new.get(i, models[i]) for i in range(6)]), dtype=torch.float64)
    close(S[[1, 3]], expected[[1, 3]])
    close(S[:, [1, 3]], expected[:, [1, 3]])


def test_similarities_after_partial_rounds_equal_the_full_matrix() -> None:
    """From what the server keeps, after every round."""
    method, log = watched(FedACS)
    result, problem = on_a_network(method, participation=3)
    models = [problem.initial] * 6
    for number, participants in enumerate(who(result), 1):
        assert len(participants) == 3
        for client in participants:
            models[client] = log.up[number, client]["w"]
        close(log.server[number]["S"], torch.tensor(similarities(models), dtype=torch.float64))
    ((_, kept),) = result.simulation.server.kept("w")
    assert torch.equal(kept, torch.stack(models))


def test_blocks_of_clients_come_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server keeps is read in blocks of clients: here of two, with one left over."""
    models, method = some_models(5, 40), FedACS(quantile=0.3)
    later = {1: models[1].flip(0), 4: models[4] + 1}
    whole = served(models, method, later)
    mixes = start(whole, method)
    monkeypatch.setattr("fedtailor.method.BLOCK", 2 * 40)
    parts = served(models, method, later)
    assert [len(rows) for _, rows in parts.kept("w")] == [2, 2, 1]
    close(parts.state["S"], whole.state["S"])
    for client, u in start(parts, method).items():
        close(u, mixes[client])


@pytest.mark.parametrize("quantile", [0.2, 0.6])
def test_states_on_disk_come_to_the_same_bits(quantile: float, tmp_path: Path) -> None:
    how = {**SMALL, "quantile": quantile}
    disk, memory = ft.run("fedacs", states="disk", out=tmp_path / "run", **how), ft.run("fedacs", **how)
    assert_same(final(disk), final(memory))
    for client in range(6):
        one, other = (result.simulation.server.store.get(client) for result in (disk, memory))
        assert_same(one, other)


def test_the_personal_model_is_the_clients_own_last_vector() -> None:
    method, log = watched(FedACS)
    result = ft.run(method, **{**SMALL, "rounds": 3, "participation": 2, "seed": 0})
    last = {client: reply["w"] for (_, client), reply in log.up.items()}
    assert 1 < len(last) < 6
    for client in range(6):
        assert torch.equal(result.personal_vector(client), last.get(client, result.simulation.server.initial))
    assert result.global_vector() is None


class Fixed(FedACS):
    """With scores that do not depend on the models, as Theorem 1 has them."""

    def weights(self, server: Server, clients: list[int]) -> Tensor:
        return fixed_scores()[clients]


def fixed_scores() -> Tensor:
    """Symmetric, every row of sum 1: the gradient of R(W) = ¼ Σ s_ij ‖w_i − w_j‖² then is w_i − Σ_j s_ij w_j."""
    rows = [[4, 3, 2, 1], [3, 4, 1, 2], [2, 1, 4, 3], [1, 2, 3, 4]]
    return torch.tensor(rows, dtype=torch.float64) / 10


def test_theorem_1s_schedule_on_quadratics_with_fixed_scores() -> None:
    """Client step 1/√K and server step λ/√K: min_k ‖∇F_λ(W^k)‖² falls like 1/√K or faster. The method's own vectors
    are those of the formulas (K = 10 and 100), which alone go on to K = 1000."""
    lam, s = 0.8, fixed_scores()
    data, centres, curvatures = quadratic_clients(4, 3, seed=1)

    def risks_gradient(W: Tensor) -> Tensor:
        return torch.stack([curvatures[i] @ (W[i] - centres[i]) for i in range(4)])

    def regulariser(W: Tensor) -> Tensor:  # Eq. 2
        return 0.25 * sum(s[i, j] * (W[i] - W[j]).square().sum() for i in range(4) for j in range(4))

    at = centres.clone().requires_grad_()
    close(torch.autograd.grad(regulariser(at), at)[0], centres - s @ centres)

    module = Quadratic(3)
    module.theta.data = torch.tensor([2.0, -1.0, 1.5])
    least = {}
    for K in (10, 100, 1000):
        W = module.theta.detach().double().expand(4, 3).clone()
        norms = []
        for _ in range(K + 1):
            last = W
            norms.append((risks_gradient(W) + lam * (W - s @ W)).square().sum().item())
            U = W - lam / K**0.5 * (W - s @ W)  # Eq. 3
            W = U - 1 / K**0.5 * risks_gradient(U)  # Eq. 5
        least[K] = min(norms)
        assert norms[-1] < norms[0] / 10
        if K < 1000:
            how = {"data": data, "model": module, "loss": mean_output, "steps": 1, "batch": "full", **EXACT}
            method = Fixed(server_step=lam / K**0.5)
            result = ft.run(method, rounds=K, lr=1 / K**0.5, **how)
            for client in range(4):
                close(result.personal_vector(client), last[client])
    assert least[100] < least[10] / 10**0.5
    assert least[1000] < least[100] / 10**0.5


def test_with_steps_of_falling_length_the_gradient_vanishes() -> None:
    """Theorem 1's second half: β_k = α_k/λ with Σα_k = ∞ and Σα_k² < ∞. The method's own vectors are those of the
    formulas (300 rounds), which alone go on to k = 3000."""
    lam, s = 0.8, fixed_scores()
    data, centres, curvatures = quadratic_clients(4, 3, seed=1)

    def gradient(W: Tensor) -> Tensor:
        return torch.einsum("nij,nj->ni", curvatures, W - centres)

    module = Quadratic(3)
    module.theta.data = torch.tensor([2.0, -1.0, 1.5])
    how = {"data": data, "model": module, "loss": mean_output, "steps": 1, "batch": "full", **EXACT}
    method = Fixed(server_step="0.8 / (t + 2)^0.75", client_step="1 / (t + 2)^0.75")
    result = ft.run(method, rounds=300, **how)
    W = module.theta.detach().double().expand(4, 3).clone()
    least = []
    for k in range(1, 3001):
        step = 1 / (k + 2) ** 0.75
        U = W - lam * step * (W - s @ W)
        W = U - step * gradient(U)
        least.append((gradient(W) + lam * (W - s @ W)).norm().item())
        if k == 300:
            for client in range(4):
                close(result.personal_vector(client), W[client])
    assert least[2999] < least[299] / 3
    assert least[299] < least[29] / 3
