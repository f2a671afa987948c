"""PGFed, PGFedMo and PGFed-CE against a second, slow implementation, their closed forms and their limit cases.

The slow version is written from the paper's Algorithm 1: loops over i and j, float64, plain autograd.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedtailor as ft
from fedtailor.local.descent import Descent, batches
from fedtailor.local.streams import torch_stream
from fedtailor.method import Message, Method, Replies, Server
from fedtailor.methods.pgfed import PGFed
from tests.helpers import Quadratic, assert_same, digits, final, mean_output, quadratic_clients

SMALL: dict[str, Any] = {
    "data": "digits",
    "clients": 6,
    "model": "mlp:16",
    "rounds": 4,
    "participation": 3,
    "max_train": 40,
    "engine": "in-process",
    "seed": 1,
}
MOMENTUM = {"momentum": 0.9, "keep_momentum": True, "weight_decay": 0.01}
EXACT: dict[str, Any] = {"dtype": "float64", "engine": "in-process", "test": 0.0, "validation": 0.0}


@dataclass
class Problem:
    """What a slow version may know: each client's risk on some or all of its samples, and which it sees in each step
    of a round."""

    risk: Callable[[int, Tensor, Tensor | None], Tensor]
    order: Callable[[int, int], list[Tensor | None]]
    initial: Tensor
    samples: list[int]

    def slope(self, client: int, theta: Tensor, chosen: Tensor | None = None) -> tuple[float, Tensor]:
        """A risk and its gradient by autograd."""
        theta = theta.detach().clone().requires_grad_()
        value = self.risk(client, theta, chosen)
        (gradient,) = torch.autograd.grad(value, theta)
        return value.item(), gradient


def on_quadratics(method: Method, **settings: Any) -> tuple[ft.RunResult, Problem]:
    """A run on 6 quadratic clients with different sample counts, 2 of which take part in a round."""
    data, centres, curvatures = quadratic_clients(6, 4, seed=2)
    data = [(x.repeat(1 + i % 3, 1), y.repeat(1 + i % 3)) for i, (x, y) in enumerate(data)]
    module = Quadratic(4)
    module.theta.data = torch.tensor([0.5, -1.0, 0.3, 0.8])
    how = {"rounds": 7, "participation": 2, "steps": 3, "batch": "full", "lr": 0.1, "seed": 14, **EXACT, **settings}
    result = ft.run(method, data=data, model=module, loss=mean_output, **how)

    def risk(client: int, theta: Tensor, chosen: Tensor | None) -> Tensor:
        away = theta - centres[client]
        return 0.5 * away @ curvatures[client] @ away

    initial = module.theta.detach().double()
    return result, Problem(risk, lambda number, client: [None] * how["steps"], initial, [len(y) for _, y in data])


def on_a_network(method: Method, **settings: Any) -> tuple[ft.RunResult, Problem]:
    """A run of a small network with mini-batches (an incomplete one is dropped) on clients of different sizes."""
    data = [(x.double(), y) for x, y in digits([17, 9, 23, 12, 31, 14])]
    how = {"rounds": 5, "participation": 2, "epochs": 2, "batch": 5, "lr": 0.2, "seed": 29, "drop_last": True}
    how = {**how, **EXACT, **settings}
    result = ft.run(method, data=data, model="mlp:6", **how)
    run = result._federation
    samples = [run.data.train(client) for client in range(6)]  # in the order in which they were dealt

    def risk(client: int, theta: Tensor, chosen: Tensor | None) -> Tensor:
        x, y = samples[client] if chosen is None else (part[chosen] for part in samples[client])
        w, b, v, c = theta.split([6 * 64, 6, 10 * 6, 10])
        hidden = (x @ w.view(6, 64).T + b).relu()
        return functional.cross_entropy(hidden @ v.view(10, 6).T + c, y)

    def order(number: int, client: int) -> list[Tensor | None]:
        stream = torch_stream(how["seed"], "batches", number, client)
        descent = Descent(epochs=how["epochs"], batch=how["batch"], drop_last=True)
        return list(batches(len(samples[client][1]), descent, stream, torch.device("cpu")))

    return result, Problem(risk, order, run.server.initial, [len(y) for _, y in samples])


on_both = pytest.mark.parametrize("run_on", [on_quadratics, on_a_network])


@dataclass
class Log:
    """What was sent, came back and was kept, by round and client."""

    down: dict[tuple[int, int], Message] = field(default_factory=dict)
    up: dict[tuple[int, int], Message] = field(default_factory=dict)
    server: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def watched(kind: type[Method], **parameters: Any) -> tuple[Method, Log]:
    """A method, and what its runs will write down."""
    log = Log()

    class Watched(kind):  # type: ignore[valid-type, misc]
        def send(self, server: Server, client: int) -> Message:
            message = super().send(server, client)
            log.down[server.round, client] = {name: tensor.clone() for name, tensor in message.items()}
            return message

        def receive(self, server: Server, replies: Replies) -> None:
            log.up |= {(server.round, client): reply for client, reply in replies.items()}
            super().receive(server, replies)
            log.server[server.round] = {name: tensor.clone() for name, tensor in server.state.items()}

    return Watched(**parameters), log


def who(result: ft.RunResult) -> list[list[int]]:
    """The participants of each round."""
    return [record["participants"] for record in result.rounds]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@dataclass
class Slow:
    """Algorithm 1, and what it came to in each round."""

    problem: Problem
    rounds: list[list[int]]
    mu: float
    alpha_lr: float
    lr: float
    beta: float = 0.0
    momentum: float = 0.0  # kept from visit to visit
    efficient: bool = False
    paths: dict[tuple[int, int], float] = field(default_factory=dict)  # PGFed-CE: the length of each client's path
    models: list[Tensor] = field(default_factory=list)  # θ_glob of each round
    matrices: list[Tensor] = field(default_factory=list)  # A of each round
    own: dict[int, Tensor] = field(default_factory=dict)  # every client's last θ_i
    auxiliary: dict[int, Tensor] = field(default_factory=dict)  # every client's last g̃_i

    def __post_init__(self) -> None:
        N, M = len(self.problem.samples), len(self.rounds[0])
        A = [[1 / M for _ in range(N)] for _ in range(N)]  # lines 1-2
        glob, velocity = self.problem.initial.clone(), {}
        before: dict[int, tuple[float, Tensor]] = {}  # g⁽¹⁾ and ∇ of the last round's participants
        for number, participants in enumerate(self.rounds, 1):
            now, ends = {}, {}
            for i in participants:
                new, bar = torch.zeros_like(glob), torch.zeros_like(glob)
                for j, (_, gradient) in before.items():
                    new = new + self.mu * A[i][j] * gradient  # line 10
                    bar = bar + self.mu / M * gradient  # line 11
                used = new
                if i in self.auxiliary:
                    used = (1 - self.beta) * new + self.beta * self.auxiliary[i]
                if before:
                    self.auxiliary[i] = used
                theta, speed = glob.clone(), velocity.get(i, torch.zeros_like(glob))
                for batch in self.problem.order(number, i):
                    speed = self.momentum * speed + self.problem.slope(i, theta, batch)[1] + used
                    theta = theta - self.lr * speed
                    second = float(bar @ (glob if self.efficient else theta))
                    for j, (first, _) in before.items():
                        A[i][j] = max(0.0, A[i][j] - self.alpha_lr * (first + second))
                value, gradient = self.problem.slope(i, theta)
                if self.efficient:
                    gradient = (glob - theta) / self.paths[number, i] - new
                now[i] = (self.mu * (value - float(gradient @ theta)), gradient)
                ends[i], velocity[i] = theta, speed
            total = sum(self.problem.samples[i] for i in participants)
            glob = sum((self.problem.samples[i] / total * ends[i] for i in participants), torch.zeros_like(glob))
            before = now
            self.own |= ends
            self.models.append(glob)
            self.matrices.append(torch.tensor(A, dtype=torch.float64))


@on_both
@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        ({}, {}),
        ({"beta": 0.5}, {}),
        ({"beta": 0.8}, {"momentum": 0.6, "keep_momentum": True}),
        ({"efficient": True}, {}),
        ({"efficient": True}, {"momentum": 0.6, "keep_momentum": True}),
    ],
)
def test_a_slow_version_comes_to_the_same_vectors(
    run_on: Callable[..., tuple[ft.RunResult, Problem]], parameters: dict[str, Any], settings: dict[str, Any]
) -> None:
    parameters = {"mu": 0.6, "alpha_lr": 0.3 if run_on is on_quadratics else 0.05, **parameters}
    method, log = watched(PGFed, **parameters)
    result, problem = run_on(method, **settings)
    momentum = settings.get("momentum", 0.0)
    paths = {key: reply["path"].item() for key, reply in log.up.items() if "path" in reply}
    slow = Slow(problem, who(result), lr=result.experiment.lr, momentum=momentum, paths=paths, **parameters)
    if not momentum:
        how_far = {key: result.experiment.lr * len(problem.order(*key)) for key in paths}
        assert paths == pytest.approx(how_far, rel=1e-12)
    for number, model, A in zip(log.server, slow.models, slow.matrices, strict=True):
        close(log.server[number]["theta"], model)
        close(log.server[number]["A"], A)
    run = result._federation
    for client in range(6):
        close(run.personal(client), slow.own.get(client, slow.models[-1]))
        if parameters.get("beta"):
            state = run.states.get(f"client-{client}")
            assert ("auxiliary" in state) == (client in slow.auxiliary)
            if client in slow.auxiliary:
                close(state["auxiliary"], slow.auxiliary[client])
    # What this has to see to mean anything: somebody never called, somebody called again after a pause, weights
    # that move and that stop at 0, and personal models that are not the global one.
    visits = [[number for number, called in enumerate(who(result)) if client in called] for client in range(6)]
    assert [] in visits
    assert any(later - earlier > 1 and earlier > 0 for numbers in visits for earlier, later in pairwise(numbers))
    assert (slow.matrices[-1] == 0).any()
    assert ((slow.matrices[-1] > 0) & (slow.matrices[-1] < 0.5)).any()
    assert all((theta - slow.models[-1]).abs().max() > 1e-3 for theta in slow.own.values())


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
        close(down["auxiliary"], by_theta)  # Eq. 10, 13
        close(down["mean"], mu * gradients.mean(0))  # Eq. 12, 14
        close(down["risks"], mu * (risks - (gradients * thetas).sum(1)))  # g⁽¹⁾ of Eq. 11
        start = thetas.mean(0)
        close(up["theta"], start - lr * (curvatures[i] @ (start - centres[i]) + by_theta))  # line 8
        moved = (1 / 3 - up["alpha"]) / alpha_lr
        close(moved, mu * (risks - (gradients * thetas).sum(1) + gradients.mean(0) @ up["theta"]))
        close(moved.sum(), by_alpha.sum())
        assert (moved - by_alpha).abs().max() > 1e-3
        for j in range(3):  # Eq. 7: what is left out for a quadratic is exactly its second-order term
            away = theta.detach() - thetas[j]
            estimate = down["risks"][j] / mu + gradients[j] @ theta.detach()
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
        g = message.get("auxiliary", torch.zeros(3, dtype=torch.float64))
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
        "auxiliary": torch.tensor([-1.0], dtype=torch.float64),
        "mean": torch.tensor([-2.0], dtype=torch.float64),
        "risks": torch.tensor([0.5], dtype=torch.float64),
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
        def send(self, server: Server, client: int) -> Message:
            return message

    method, log = watched(Sends, mu=1.0, alpha_lr=1.0)
    data = [(torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))]
    how = {"data": data, "model": Flat(), "loss": mean_output, "steps": 4, "batch": "full", "lr": 0.1, **EXACT}
    ft.run(method, rounds=1, **how)
    alpha = 0.2
    for theta in (0.1, 0.2, 0.3, 0.4):  # after each step: 0.2 → −0.1 (0) → −0.1 (0) → 0.1 → 0.4
        alpha = max(0.0, alpha - (0.5 - 2 * theta))
    assert alpha == pytest.approx(0.4)
    close(log.up[1, 0]["alpha"], torch.tensor([alpha], dtype=torch.float64))


@pytest.mark.parametrize("method", ["pgfed", "pgfedmo", "pgfed-ce"])
def test_round_1_is_fedavgs(method: str) -> None:
    how = {**SMALL, **MOMENTUM, "rounds": 1}
    ours, average = ft.run(method, mu=0.5, **how), ft.run("fedavg", **how)
    assert torch.equal(ours._federation.server.state["theta"], average._federation.server.state["theta"])
    assert ours.rounds[0]["bytes_down"] == average.rounds[0]["bytes_down"]
    two = [ft.run(name, **{**how, "rounds": 2}) for name in (method, "fedavg")]
    one, other = (result._federation.server.state["theta"] for result in two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("more", [{}, MOMENTUM])
@pytest.mark.parametrize("method", ["pgfed", "pgfedmo", "pgfed-ce"])
def test_without_mu_it_is_fedavg(method: str, more: dict[str, Any]) -> None:
    ours, average = ft.run(method, mu=0.0, **SMALL, **more), ft.run("fedavg", **SMALL, **more)
    state = ours._federation.server.state
    assert torch.equal(state["theta"], average._federation.server.state["theta"])
    assert torch.equal(state["A"], torch.full((6, 6), 1 / 3))


@pytest.mark.parametrize("more", [{}, MOMENTUM])
def test_pgfedmo_without_beta_is_pgfed(more: dict[str, Any]) -> None:
    how = {**SMALL, **more, "mu": 0.5}
    plain = final(ft.run("pgfed", **how))
    assert_same(final(ft.run("pgfedmo", beta=0.0, **how)), plain)
    assert not any("auxiliary" in name for name in plain)  # a client keeps no vector that it does not need
    assert not torch.equal(final(ft.run("pgfedmo", **how))["server/theta"], plain["server/theta"])


def test_pgfedmo_mixes_with_the_clients_own_last_one_however_old() -> None:
    """One step from θ_glob on a quadratic shows which g̃ was used: (θ_glob − θ_i)/η − ∇f_i(θ_glob)."""
    method, log = watched(PGFed, mu=0.6, alpha_lr=0.05, beta=0.3)
    result, problem = on_quadratics(method, steps=1, rounds=12)
    last: dict[int, tuple[int, Tensor]] = {}
    pauses = []
    for (number, client), message in log.down.items():
        theta = message["theta"]
        used = (theta - log.up[number, client]["theta"]) / 0.1 - problem.slope(client, theta)[1]
        if number == 1:
            close(used, torch.zeros_like(used))
            continue
        expected = message["auxiliary"]  # the first time: the new one
        if client in last:
            pauses.append(number - last[client][0])
            expected = 0.7 * expected + 0.3 * last[client][1]
            assert (expected - message["auxiliary"]).abs().max() > 1e-4
        close(used, expected)
        last[client] = (number, used)
    assert set(who(result)[0]) & set(last)  # round 1 leaves none behind
    assert max(pauses) > 2


@pytest.mark.parametrize("method", ["pgfed", "pgfedmo", "pgfed-ce"])
def test_the_personal_model_is_the_clients_own_last_vector(method: str) -> None:
    parameters = {"pgfed": {}, "pgfedmo": {"beta": 0.5}, "pgfed-ce": {"efficient": True}}[method]
    kind, log = watched(PGFed, **parameters)
    result = ft.run(kind, **{**SMALL, "rounds": 3, "participation": 2, "seed": 0})
    last = {client: reply["theta"] for (_, client), reply in log.up.items()}
    assert 1 < len(last) < 6
    for client in range(6):
        expected = last.get(client, log.server[3]["theta"])
        assert torch.equal(result._federation.personal(client), expected)


def numbers_sent(log: Log, number: int, client: int) -> tuple[int, int]:
    """How many numbers went down and up."""
    return tuple(  # type: ignore[return-value]
        sum(tensor.numel() for tensor in message[number, client].values()) for message in (log.down, log.up)
    )


def test_five_vectors_and_a_few_scalars_are_sent() -> None:
    """Down θ, g̃, ḡ, g⁽¹⁾ and α of the last participants; up θ, ∇f, α and g⁽¹⁾: in round 1 without the former."""
    P, M = 64 * 16 + 16 + 16 * 10 + 10, 3
    for beta in (0.0, 0.5):
        method, log = watched(PGFed, beta=beta)
        result = ft.run(method, **SMALL)
        for number, participants in enumerate(who(result), 1):
            for client in participants:
                down, up = numbers_sent(log, number, client)
                assert (down, up) == ((P, 2 * P + 1) if number == 1 else (3 * P + 2 * M, 2 * P + M + 1))
        assert result.rounds[-1]["bytes_down"] == M * 4 * (3 * P + 2 * M)
        assert result.rounds[-1]["bytes_up"] == M * 4 * (2 * P + M + 1)


def test_pgfed_ce_sends_half_as_much_again_as_fedavg() -> None:
    """Down θ and g̃, up θ: three vectors and O(M) scalars."""
    P, M = 64 * 16 + 16 + 16 * 10 + 10, 3
    method, log = watched(PGFed, efficient=True)
    result, average = ft.run(method, **SMALL), ft.run("fedavg", **SMALL)
    for number, participants in enumerate(who(result), 1):
        for client in participants:
            sent = sum(numbers_sent(log, number, client))
            vectors = 2 if number == 1 else 3
            assert vectors * P <= sent <= vectors * P + 3 * M + 4
    ours, theirs = (
        sum(record["bytes_down"] + record["bytes_up"] for record in run.rounds) for run in (result, average)
    )
    assert ours <= 1.5 * theirs + 4 * M * 4 * (3 * M + 4)


def test_pgfed_ce_forms_the_gradients_from_the_models() -> None:
    """(θ_glob − θ_i) / (ηK) − g̃_i is, to the last digit that counts, the mean of the K batches' gradients."""
    method, log = watched(PGFed, mu=0.6, alpha_lr=0.05, efficient=True)
    result, problem = on_a_network(method)
    for number, participants in enumerate(who(result), 1):
        server = log.server[number]
        assert server["last"].tolist() == participants
        for row, i in enumerate(participants):
            down, up = log.down[number, i], log.up[number, i]
            auxiliary = down.get("auxiliary", torch.zeros_like(up["theta"]))
            steps = problem.order(number, i)
            formed = (down["theta"] - up["theta"]) / (0.2 * len(steps)) - auxiliary
            theta, seen = down["theta"], []
            for batch in steps:
                seen.append(problem.slope(i, theta, batch)[1])
                theta = theta - 0.2 * (seen[-1] + auxiliary)
            close(formed, torch.stack(seen).mean(0))
            close(server["gradients"][row], formed)
            close(server["risks"][row], 0.6 * (problem.slope(i, up["theta"])[0] - formed @ up["theta"]))
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


@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        ({}, {}),
        ({}, {"momentum": 0.8}),
    ],
)
def test_pgfed_ce_finds_a_constant_gradient(parameters: dict[str, Any], settings: dict[str, Any]) -> None:
    """Where the gradient is the same everywhere, the mean along the path is that gradient, however the client went."""
    generator = torch.Generator().manual_seed(3)
    data = [(torch.randn(1, 3, generator=generator).double(), torch.zeros(1).double()) for _ in range(4)]
    method, log = watched(PGFed, mu=0.6, alpha_lr=0.05, efficient=True, **parameters)
    how = {"data": data, "model": Straight(), "loss": mean_output, "steps": 5, "batch": "full", "lr": 0.1, **EXACT}
    result = ft.run(method, rounds=5, participation=2, seed=1, **how, **settings)
    for number, participants in enumerate(who(result), 1):
        for row, client in enumerate(participants):
            close(log.server[number]["gradients"][row], data[client][0][0])


def test_pgfed_ce_has_no_momentum_of_the_auxiliary_gradient() -> None:
    """The server takes the auxiliary gradient off again, so it has to know the one that the client used."""
    with pytest.raises(ft.FedtailorError, match="do not go together: with efficient, beta must be 0"):
        ft.run("pgfed-ce", beta=0.5)


def test_the_change_of_a_is_recorded_with_its_correlations() -> None:
    """Figure 3: column averages (help given) and row averages (help needed) against the clients' samples."""
    result = ft.run(
        "pgfed", data="digits", clients=6, partition="quantity:1", rounds=4, participation=3, mu=0.5, alpha_lr=0.1,
        model="mlp:16", engine="in-process",
    )  # fmt: skip
    shown = result.observed(4)
    change = shown["A"] - 1 / 3
    assert torch.equal(shown["change"], change)
    n = result._federation.data.samples.double().numpy()
    for found, dim in zip(shown["correlation"].tolist(), (0, 1), strict=True):
        assert found == pytest.approx(np.corrcoef(change.mean(dim).double().numpy(), n)[0, 1], abs=1e-5)
