"""PGFed, PGFedMo and PGFed-CE against a second, slow implementation, their closed forms and their limit cases.

The slow version is written from the paper's Algorithm 1: loops over i and j, float64, plain autograd.
"""

import re
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.method import Client, Message, Server
from fedtailor.methods.pgfed import PGFed
from fedtailor.methods.pgfed_ce import PGFedCE
from fedtailor.methods.pgfedmo import PGFedMo
from fedtailor.studies.presets import presets
from tests.helpers import Quadratic, assert_same, final, mean_output, quadratic_clients
from tests.methods.problems import (
    EXACT,
    MOMENTUM,
    SMALL,
    Log,
    Problem,
    close,
    on_a_network,
    on_both,
    on_quadratics,
    watched,
    who,
)
from tests.reference.pgfed import SlowPGFed, SlowPGFedCE, SlowPGFedMo

SLOW = {PGFed: SlowPGFed, PGFedMo: SlowPGFedMo, PGFedCE: SlowPGFedCE}
KINDS = {kind.name: kind for kind in SLOW}
each_kind = pytest.mark.parametrize("method", list(KINDS))


@on_both
@pytest.mark.parametrize(
    ("kind", "parameters", "settings"),
    [
        (PGFed, {}, {}),
        (PGFed, {}, {"momentum": 0.3, "weight_decay": 0.2}),
        (PGFedMo, {"beta": 0.5}, {}),
        (PGFedMo, {"beta": 0.8}, {"momentum": 0.6, "keep_momentum": True}),
        (PGFedCE, {}, {}),
        (PGFedCE, {}, {"momentum": 0.6, "keep_momentum": True}),
        (PGFedCE, {}, {"momentum": 0.6}),
    ],
)
def test_a_slow_version_comes_to_the_same_vectors(
    run_on: Callable[..., tuple[ft.RunResult, Problem]],
    kind: type[PGFed],
    parameters: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    parameters = {"mu": 0.6, "alpha_lr": 0.3 if run_on is on_quadratics else 0.05, **parameters}
    method, log = watched(kind, **parameters)
    result, problem = run_on(method, **settings)
    slow = SLOW[kind](problem, who(result), lr=result.experiment.lr, **parameters, **settings)
    slow.run()
    for number, model, A in zip(log.server, slow.models, slow.matrices, strict=True):
        close(log.server[number]["theta"], model)
        close(log.server[number]["A"], A)
        for row, client in enumerate(who(result)[number - 1]):
            close(log.server[number]["gradients"][row], slow.gradients[number - 1][client])
    for client in range(6):
        close(result.personal_vector(client), slow.own.get(client, slow.models[-1]))
        kept = result.client_state(client)
        assert ("g_tilde" in kept) == (client in slow.auxiliary)
        if client in slow.auxiliary:
            close(kept["g_tilde"], slow.auxiliary[client])
    # What this has to see to mean anything: somebody never called, somebody called again after a pause, weights
    # that move and that stop at 0, and personal models that are not the global one.
    calls = [[number for number, called in enumerate(who(result)) if client in called] for client in range(6)]
    assert [] in calls
    assert any(later - earlier > 1 and earlier > 0 for numbers in calls for earlier, later in pairwise(numbers))
    assert (slow.matrices[-1] == 0).any()
    assert ((slow.matrices[-1] > 0) & (slow.matrices[-1] < 0.5)).any()
    assert all((theta - slow.models[-1]).abs().max() > 1e-3 for theta in slow.own.values())
    assert bool(slow.auxiliary) == (kind is PGFedMo)
    assert bool(slow.warm) == settings.get("keep_momentum", False)


@on_both
@each_kind
def test_a_client_whose_reply_is_missing_is_not_there_in_that_round(
    run_on: Callable[..., tuple[ft.RunResult, Problem]], method: str
) -> None:
    """Its row of α and its own tensors stay as they were, and ḡ is the mean over those who replied."""
    kind, parameters = KINDS[method], {"mu": 0.6, "alpha_lr": 0.05}
    lost: list[tuple[int, int]] = []

    class Fails(kind):  # type: ignore[valid-type, misc]
        def train(self, client: Client, message: Message) -> Message:
            upload = super().train(client, message)
            if client.round in (1, 3) and len(lost) < client.round // 2 + 1:  # the first of those that are called
                lost.append((client.round, client.id))
                client.state["theta"] = torch.full_like(client.initial, 9.0)
                raise RuntimeError("the power went off")
            return upload

    watching, log = watched(Fails, **parameters)
    settings = {"momentum": 0.6, "keep_momentum": True, "participation": 3}
    with pytest.warns(ft.ClientFailure, match="the power went off"):
        result, problem = run_on(watching, **settings)
    assert [number for number, _ in lost] == [1, 3]
    slow = SLOW[kind](
        problem, who(result), lr=result.experiment.lr, momentum=0.6, keep_momentum=True, missing=lost, **parameters
    )
    slow.run()
    for number, model, A in zip(log.server, slow.models, slow.matrices, strict=True):
        close(log.server[number]["theta"], model)
        close(log.server[number]["A"], A)
        replied = [i for i in who(result)[number - 1] if (number, i) not in lost]
        assert log.server[number]["last"].tolist() == replied
        assert [record.failed for record in result.rounds][number - 1] == [i for t, i in lost if t == number]
    for client in range(6):
        close(result.personal_vector(client), slow.own.get(client, slow.models[-1]))
    called = {client for participants in who(result)[3:] for client in participants}
    assert any(i in called for _, i in lost)  # somebody comes back after it failed


def quadratics_after_one_round(clients: int, lr: float) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor, Tensor]:
    """The data of quadratic clients, and by hand: θ_j after one step from 0, f_j(θ_j) and ∇f_j(θ_j)."""
    data, centres, curvatures = quadratic_clients(clients, 3, seed=6)
    thetas = torch.stack([lr * curvatures[j] @ centres[j] for j in range(clients)])
    gradients = torch.stack([curvatures[j] @ (thetas[j] - centres[j]) for j in range(clients)])
    risks = torch.stack([0.5 * (thetas[j] - centres[j]) @ gradients[j] for j in range(clients)])
    return data, thetas, risks, gradients


def test_equations_9_to_12_on_quadratics() -> None:
    """g̃ and the α-gradient are the derivatives of the auxiliary risk (Eq. 9), the latter with ∇f_j in g⁽²⁾ replaced
    by the mean: so only their sum over j is exact."""
    mu, alpha_lr, lr = 0.7, 0.01, 0.1
    data, thetas, risks, gradients = quadratics_after_one_round(3, lr)
    _, centres, curvatures = quadratic_clients(3, 3, seed=6)
    method, log = watched(PGFed, mu=mu, alpha_lr=alpha_lr)
    how = {"data": data, "model": Quadratic(3), "loss": mean_output, "batch": "full", "lr": lr, **EXACT}
    ft.run(method, rounds=2, steps=1, **how)

    def auxiliary_risk(theta: Tensor, alpha: Tensor) -> Tensor:  # Eq. 9
        return mu * sum(alpha[j] * (risks[j] + gradients[j] @ (theta - thetas[j])) for j in range(3))

    for i in range(3):
        down, up = log.down[2, i], log.up[2, i]
        alpha = torch.full((3,), 1 / 3, dtype=torch.float64, requires_grad=True)
        theta = up["theta"].clone().requires_grad_()
        by_theta, by_alpha = torch.autograd.grad(auxiliary_risk(theta, alpha), (theta, alpha))
        close(down["g_tilde"], by_theta)  # Eq. 10, 13
        close(down["g_bar"], mu * gradients.mean(0))  # Eq. 12, 14
        close(down["g1"], mu * (risks - (gradients * thetas).sum(1)))  # g⁽¹⁾ of Eq. 11
        start = thetas.mean(0)
        close(up["theta"], start - lr * (curvatures[i] @ (start - centres[i]) + by_theta))  # line 8
        moved = (1 / 3 - up["alpha"]) / alpha_lr
        close(moved, mu * (risks - (gradients * thetas).sum(1) + gradients.mean(0) @ up["theta"]))
        close(moved.sum(), by_alpha.sum())
        assert (moved - by_alpha).abs().max() > 1e-3
        for j in range(3):  # Eq. 7: what is left out for a quadratic is exactly its second-order term
            away = theta.detach() - thetas[j]
            estimate = down["g1"][j] / mu + gradients[j] @ theta.detach()
            exact = 0.5 * (theta.detach() - centres[j]) @ curvatures[j] @ (theta.detach() - centres[j])
            close(exact - estimate, 0.5 * away @ curvatures[j] @ away)


def test_with_one_participant_before_the_gradient_of_alpha_is_equation_11_exactly() -> None:
    mu, alpha_lr, lr = 0.7, 0.01, 0.1
    data, thetas, risks, gradients = quadratics_after_one_round(4, lr)
    method, log = watched(PGFed, mu=mu, alpha_lr=alpha_lr)
    how = {"data": data, "model": Quadratic(3), "loss": mean_output, "steps": 1, "batch": "full", "lr": lr, **EXACT}
    result = ft.run(method, rounds=2, participation=1, seed=2, **how)
    (j,), (i,) = who(result)
    assert i != j
    theta = log.up[2, i]["theta"]
    moved = (1.0 - log.up[2, i]["alpha"]) / alpha_lr
    close(moved, mu * (risks[j] + gradients[j] @ (theta - thetas[j]))[None])


def test_the_auxiliary_gradient_is_constant_in_a_round() -> None:
    """K steps on a quadratic with g̃ constant end at θ* + (I − ηH)^K (θ − θ*), where θ* = c − H⁻¹g̃."""
    data, centres, curvatures = quadratic_clients(4, 3)
    method, log = watched(PGFed, mu=0.9, alpha_lr=0.1)
    how = {"data": data, "model": Quadratic(3), "loss": mean_output, "steps": 12, "batch": "full", "lr": 0.1, **EXACT}
    ft.run(method, rounds=4, **how)
    eye = torch.eye(3, dtype=torch.float64)
    for (number, i), message in log.down.items():
        g = message.get("g_tilde", torch.zeros(3, dtype=torch.float64))
        assert number == 1 or g.norm() > 1e-2
        goal = centres[i] - torch.linalg.solve(curvatures[i], g)
        power = torch.linalg.matrix_power(eye - 0.1 * curvatures[i], 12)
        close(log.up[number, i]["theta"], goal + power @ (message["theta"] - goal))


def test_alpha_begins_at_1_over_m_and_only_the_last_participants_columns_move() -> None:
    method, log = watched(PGFed, mu=0.6, alpha_lr=0.15)
    result, _ = on_quadratics(method)
    assert torch.equal(log.server[1]["A"], torch.full((6, 6), 1 / 2, dtype=torch.float64))
    moved_ever = torch.zeros(6, 6, dtype=torch.bool)
    for number, (last, participants) in enumerate(pairwise(who(result)), 2):
        moved = log.server[number]["A"] != log.server[number - 1]["A"]
        allowed = torch.zeros(6, 6, dtype=torch.bool)
        for i in participants:
            for j in last:
                allowed[i, j] = True
        assert not (moved & ~allowed).any()
        moved_ever |= moved
        assert (log.server[number]["A"] >= 0).all()
    assert moved_ever.sum() >= 8
    sums = log.server[7]["A"].sum(1)
    assert sums.max() - sums.min() > 0.1  # never normalised


def test_alpha_stops_at_0_in_every_step_and_can_rise_again() -> None:
    """Where the first steps ask for less than 0 and the later ones for more, clamping at the end alone would differ."""
    message = {
        "theta": torch.zeros(1, dtype=torch.float64),
        "g_tilde": torch.tensor([-1.0], dtype=torch.float64),
        "g_bar": torch.tensor([-2.0], dtype=torch.float64),
        "g1": torch.tensor([0.5], dtype=torch.float64),
        "alpha": torch.tensor([0.2], dtype=torch.float64),
    }

    class Flat(nn.Module):
        """Its risk is 0, so that θ grows by the learning rate with g̃ = −1."""

        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return 0 * self.theta * x[:, 0]

    class Sends(PGFed):
        def send_all(self, server: Server) -> dict[int, Message]:
            return {0: message}

        def upload_like(self, server: Server, client: int) -> Message:
            return {**super().upload_like(server, client), "alpha": message["alpha"]}

    method, log = watched(Sends, mu=1.0, alpha_lr=1.0)
    data = [(torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))]
    how = {"data": data, "model": Flat(), "loss": mean_output, "steps": 4, "batch": "full", "lr": 0.1, **EXACT}
    ft.run(method, rounds=1, **how)
    alpha = 0.2
    for theta in (0.1, 0.2, 0.3, 0.4):  # after each step: 0.2 → −0.1 (0) → −0.1 (0) → 0.1 → 0.4
        alpha = max(0.0, alpha - (0.5 - 2 * theta))
    assert alpha == pytest.approx(0.4)
    close(log.up[1, 0]["alpha"], torch.tensor([alpha], dtype=torch.float64))


def warned_of(result: ft.RunResult) -> dict[str, str]:
    return result.simulation.server.warnings


@pytest.mark.parametrize(("method", "mu"), [("pgfed", 1.5), ("pgfedmo", 2.0)])
def test_divergence_is_seen_long_before_the_models_are_infinite(method: str, mu: float) -> None:
    """The linear estimates of quadratics are unbounded below: with a large η₂, α and g̃ feed each other. The one warning
    comes while the model is where it belongs, ten rounds or more before the run breaks off."""
    kind, log = watched(KINDS[method], mu=mu, alpha_lr=1.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(ft.FedtailorError, match="NaN or infinite"):
            on_quadratics(kind, rounds=60, on_failure="stop")
    (message,) = [str(one.message) for one in said]
    found = re.fullmatch(
        r"Round (\d+): PGFed's auxiliary gradient is \S+ times as long .* from 0.5 to (\S+)\. .* a smaller mu\.",
        message,
    )
    assert found is not None
    first, lengths = int(found[1]), {number: state["theta"].norm() for number, state in log.server.items()}
    assert max(lengths.values()) > 1e6
    assert lengths[first - 1] < 2
    assert max(lengths) - first >= 10
    assert f"{log.server[first - 1]['A'].max():.3g}" == found[2]


def test_a_ceiling_of_alpha_keeps_the_models_finite() -> None:
    """Where they become infinite without one; as the slow version has it, which clamps each step to [0, ceiling]."""
    parameters: dict[str, Any] = {"mu": 1.5, "alpha_lr": 1.0, "alpha_max": 0.6}
    method, log = watched(PGFed, **parameters)
    result, problem = on_quadratics(method, rounds=60)
    slow = SlowPGFed(problem, who(result), lr=result.experiment.lr, **parameters)
    slow.run()
    close(log.server[60]["theta"], slow.models[-1])
    close(log.server[60]["A"], slow.matrices[-1])
    assert log.server[60]["A"].max() == 0.6
    assert log.server[60]["theta"].norm() < 2


def test_mu_is_the_releases_in_the_presets_alone() -> None:
    """With 0.1 a run on Fashion-MNIST diverges (the page has the figures)."""
    assert PGFed().mu == PGFedMo().mu == PGFedCE().mu == 0.01
    rows = [row for preset in presets().values() for row in preset.rows if row.method in KINDS]
    assert {row.method for row in rows} == set(KINDS)
    assert all(row.settings["parameters"]["mu"] == (0 if row.name == "pgfed-mu0" else 0.1) for row in rows)


@each_kind
def test_a_stable_run_gives_no_warning(method: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, _ = on_quadratics(KINDS[method](mu=0.6, alpha_lr=0.1), rounds=60)
        network = ft.run(method, **{**SMALL, "rounds": 20})
    assert warned_of(result) == warned_of(network) == {}


def test_a_large_mu_alone_gives_no_warning() -> None:
    """g̃ has at most μ times the length of the clients' gradients as long as α is what it was at the start."""
    data, _, _ = quadratic_clients(4, 3)
    how = {"data": data, "model": Quadratic(3), "loss": mean_output, "batch": "full", "lr": 0.001, **EXACT}
    result = ft.run(PGFed(mu=20.0, alpha_lr=0.0), rounds=3, steps=1, **how)
    assert warned_of(result) == {}


@each_kind
def test_round_1_is_fedavgs(method: str) -> None:
    how = {**SMALL, **MOMENTUM, "rounds": 1}
    ours, average = ft.run(method, mu=0.5, **how), ft.run("fedavg", **how)
    assert torch.equal(ours.server_state["theta"], average.server_state["theta"])
    assert ours.rounds[0].bytes_down == average.rounds[0].bytes_down
    two = [ft.run(name, **{**how, "rounds": 2}) for name in (method, "fedavg")]
    one, other = (result.server_state["theta"] for result in two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("more", [{}, MOMENTUM])
@each_kind
def test_without_mu_it_is_fedavg(method: str, more: dict[str, Any]) -> None:
    ours, average = ft.run(method, mu=0.0, **SMALL, **more), ft.run("fedavg", **SMALL, **more)
    state = ours.server_state
    assert torch.equal(state["theta"], average.server_state["theta"])
    assert torch.equal(state["A"], torch.full((6, 6), 1 / 3))


@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_pgfedmo_without_beta_is_pgfed(more: dict[str, Any]) -> None:
    """Bit for bit: the server's tensors and the clients' own, but for the g̃ that PGFedMo keeps."""
    how = {**SMALL, **more, "mu": 0.5}
    plain, without = final(ft.run("pgfed", **how)), final(ft.run("pgfedmo", beta=0.0, **how))
    assert_same(without, plain)
    assert not any("g_tilde" in name for name in plain)  # a client keeps no vector that it does not need
    assert not torch.equal(final(ft.run("pgfedmo", **how))["server/theta"], plain["server/theta"])


def test_pgfedmo_mixes_with_the_clients_own_last_one_however_old() -> None:
    """One step from θ_glob on a quadratic shows which g̃ was used: (θ_glob − θ_i)/η − ∇f_i(θ_glob)."""
    method, log = watched(PGFedMo, mu=0.6, alpha_lr=0.05, beta=0.3)
    result, problem = on_quadratics(method, steps=1, rounds=12)
    last: dict[int, tuple[int, Tensor]] = {}
    pauses = []
    for (number, client), message in log.down.items():
        theta = message["theta"]
        used = (theta - log.up[number, client]["theta"]) / 0.1 - problem.slope(client, theta)[1]
        if number == 1:
            close(used, torch.zeros_like(used))
            continue
        expected = message["g_tilde"]  # the first time: the new one
        if client in last:
            pauses.append(number - last[client][0])
            expected = 0.7 * expected + 0.3 * last[client][1]
            assert (expected - message["g_tilde"]).abs().max() > 1e-4
        close(used, expected)
        last[client] = (number, used)
    assert set(who(result)[0]) & set(last)  # round 1 leaves none behind
    assert max(pauses) > 2


@each_kind
def test_the_personal_model_is_the_clients_own_last_vector(method: str) -> None:
    kind, log = watched(KINDS[method])
    result = ft.run(kind, **{**SMALL, "rounds": 3, "participation": 2, "seed": 0})
    last = {client: reply["theta"] for (_, client), reply in log.up.items()}
    assert 1 < len(last) < 6
    for client in range(6):
        expected = last.get(client, log.server[3]["theta"])
        assert torch.equal(result.personal_vector(client), expected)


def numbers_sent(log: Log, number: int, client: int) -> tuple[int, int]:
    """How many numbers went down and up."""
    return tuple(  # type: ignore[return-value]
        sum(tensor.numel() for tensor in message[number, client].values()) for message in (log.down, log.up)
    )


def test_five_vectors_and_a_few_scalars_are_sent() -> None:
    """Down θ, g̃, ḡ, g⁽¹⁾ and α of the last participants; up θ, ∇f, α and g⁽¹⁾: in round 1 without the former."""
    P, M = 64 * 16 + 16 + 16 * 10 + 10, 3
    for kind in (PGFed, PGFedMo):
        method, log = watched(kind)
        result = ft.run(method, **SMALL)
        for number, participants in enumerate(who(result), 1):
            for client in participants:
                down, up = numbers_sent(log, number, client)
                assert (down, up) == ((P, 2 * P + 1) if number == 1 else (3 * P + 2 * M, 2 * P + M + 1))
        assert result.rounds[-1].bytes_down == M * 4 * (3 * P + 2 * M)
        assert result.rounds[-1].bytes_up == M * 4 * (2 * P + M + 1)


def test_pgfed_ce_sends_half_as_much_again_as_fedavg() -> None:
    """Down θ and g̃, up θ: three vectors and O(M) scalars."""
    P, M = 64 * 16 + 16 + 16 * 10 + 10, 3
    method, log = watched(PGFedCE)
    result, average = ft.run(method, **SMALL), ft.run("fedavg", **SMALL)
    for number, participants in enumerate(who(result), 1):
        for client in participants:
            sent = sum(numbers_sent(log, number, client))
            vectors = 2 if number == 1 else 3
            assert vectors * P <= sent <= vectors * P + 3 * M + 4
    ours, theirs = (sum(record.bytes for record in run.rounds) for run in (result, average))
    assert ours <= 1.5 * theirs + 4 * M * 4 * (3 * M + 4)


def test_pgfed_ce_forms_the_gradients_from_the_models() -> None:
    """(θ_glob − θ_i) / (ηK) − g̃_i is, to the last digit that counts, the mean of the K batches' gradients."""
    method, log = watched(PGFedCE, mu=0.6, alpha_lr=0.05)
    result, problem = on_a_network(method)
    for number, participants in enumerate(who(result), 1):
        server = log.server[number]
        assert server["last"].tolist() == participants
        for row, i in enumerate(participants):
            down, up = log.down[number, i], log.up[number, i]
            auxiliary = down.get("g_tilde", torch.zeros_like(up["theta"]))
            steps = problem.order(number, i)
            formed = (down["theta"] - up["theta"]) / (0.2 * len(steps)) - auxiliary
            theta, seen = down["theta"], []
            for batch in steps:
                seen.append(problem.slope(i, theta, batch)[1])
                theta = theta - 0.2 * (seen[-1] + auxiliary)
            close(formed, torch.stack(seen).mean(0))
            close(server["gradients"][row], formed)
            close(server["g1"][row], 0.6 * (problem.slope(i, up["theta"])[0] - formed @ up["theta"]))
            if number > 1:
                mean = 0.6 * log.server[number - 1]["gradients"].mean(0)
                close(down["slope"], mean @ down["theta"])
                assert down["slope"].numel() == 1


class Straight(nn.Module):
    """A risk with the same gradient everywhere: the samples' mean."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([0.4, -0.2, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.theta


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.8}])
def test_pgfed_ce_finds_a_constant_gradient(settings: dict[str, Any]) -> None:
    """Where the gradient is the same everywhere, the mean along the path is that gradient, however the client went."""
    generator = torch.Generator().manual_seed(3)
    data = [(torch.randn(1, 3, generator=generator).double(), torch.zeros(1).double()) for _ in range(4)]
    method, log = watched(PGFedCE, mu=0.6, alpha_lr=0.05)
    how = {"data": data, "model": Straight(), "loss": mean_output, "steps": 5, "batch": "full", "lr": 0.1, **EXACT}
    result = ft.run(method, rounds=5, participation=2, seed=1, **how, **settings)
    for number, participants in enumerate(who(result), 1):
        for row, client in enumerate(participants):
            close(log.server[number]["gradients"][row], data[client][0][0])


def test_pgfed_ce_has_no_momentum_of_the_auxiliary_gradient() -> None:
    """The server takes the auxiliary gradient off again, so it has to know the one that the client used."""
    with pytest.raises(ft.FedtailorError, match="There is no parameter of pgfed-ce 'beta'"):
        ft.run("pgfed-ce", parameters={"beta": 0.5}, **SMALL)


def test_the_change_of_a_is_recorded_with_its_correlations() -> None:
    """Figure 3: column averages (help given) and row averages (help needed) against the clients' samples."""
    result = ft.run(
        "pgfed", data="digits", clients=6, partition="quantity:1", rounds=4, participation=3, mu=0.1, alpha_lr=0.1,
        model="mlp:16", engine="in-process",
    )  # fmt: skip
    shown = result.observed(4)
    change = shown["A"] - 1 / 3
    assert torch.equal(shown["change"], change)
    n = result.data.n_samples.double().numpy()
    for found, dim in zip(shown["correlation"].tolist(), (0, 1), strict=True):
        assert found == pytest.approx(np.corrcoef(change.mean(dim).double().numpy(), n)[0, 1], abs=1e-5)
