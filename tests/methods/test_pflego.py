"""PFLEGO against a second, slow implementation written from the paper, its closed forms and its limit cases."""

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedtailor as ft
from fedtailor.engines.simulation import Simulation
from fedtailor.server.aggregation import Aggregator
from fedtailor.server.loop import Loop
from tests.helpers import assert_same, digits
from tests.reference.pflego import BODY, SlowPFLEGO, after_inner_steps, gradients, logits

SIZES = [13, 7, 20, 9, 5]
BODY_SIZE, HEAD_SIZE = sum(rows * columns + rows for rows, columns in BODY), 10 * 6 + 10
TINY: dict[str, Any] = {
    "model": "mlp:7,6",
    "rounds": 5,
    "participation": 3,
    "batch": 4,  # of no effect, as are these: every step of PFLEGO is a plain one on all samples
    "epochs": 3,
    "momentum": 0.5,
    "weight_decay": 0.1,
    "dtype": "float64",
    "test": 0.0,
    "evaluation": {"every": 0},
    "validation": 0.0,
    "engine": "in-process",
    "seed": 4,
}
BETA, RHO = 0.2, 0.15


def clients() -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y) for x, y in digits(SIZES)]


class Watched:
    """A run, the server's tensors before the first round and after each, and the clients' first heads."""

    def __init__(self, **settings: Any) -> None:
        self.states: list[dict[str, Tensor]] = []
        settings = {"data": clients(), "head_lr": BETA, "joint_lr": RHO, **TINY, **settings}
        self.result = ft.run("pflego", on_start=self._start, on_round=self._keep, **settings)

        self.run: Simulation = self.result.simulation
        method = self.run.terms.method
        self.heads = [  # a client that has no state yet
            method.personal_model(self.run.sites.site(client).client(1, {}), self.states[0])[self.run.server.head]
            for client in range(self.run.data.n_clients)
        ]

    def _start(self, loop: Loop) -> None:
        self._loop = loop
        self._keep()

    def _keep(self, record: object = None) -> None:
        self.states.append({name: tensor.clone() for name, tensor in self._loop.server.state.items()})

    def head(self, client: int) -> Tensor:
        return self.run.state_of(client).get("head", self.heads[client])


@pytest.mark.parametrize(
    "options",
    [
        {"inner_steps": 4},
        {"inner_steps": 1},
        {"inner_steps": 3, "head_start": "uniform"},
        {"inner_steps": 3, "released_weights": True},
        {"inner_steps": 2, "participation": "independent:0.4"},
        {"inner_steps": 3, "labels": "own"},
        {"inner_steps": 2, "server_optimizer": "adam"},
        {"inner_steps": 2, "server_optimizer": "adam", "released_weights": True, "head_start": "uniform"},
    ],
    ids=str,
)
def test_agrees_with_a_second_implementation(options: dict[str, Any]) -> None:
    """Body and heads, vector by vector after every round, with partial participation; Adam is torch.optim.Adam."""
    watched, data = Watched(**options), clients()
    classes: list[int | None] = [None] * 5
    if options.get("labels") == "own":  # K_i outputs for labels 0…K_i−1
        names = [sorted(set(y.tolist())) for _, y in data]
        data = [
            (x, torch.tensor([own.index(label) for label in y.tolist()]))
            for (x, y), own in zip(data, names, strict=True)
        ]
        classes = [len(own) for own in names]
        assert len(set(classes)) > 2
    slow = SlowPFLEGO(
        data,
        watched.states[0]["body"],
        watched.heads,
        beta=BETA,
        rho=RHO,
        tau=options["inner_steps"],
        inverse=5 / (0.4 * 5 if "participation" in options else 3),  # I/r; r is the mean number of participants
        adam=options.get("server_optimizer") == "adam",
        released_weights=options.get("released_weights", False),
        classes=classes,
    )
    for record, state in zip(watched.result.rounds, watched.states[1:], strict=True):
        slow.round(record.participants)
        torch.testing.assert_close(state["body"], slow.body.detach(), rtol=0, atol=1e-9)
    body = slow.body.detach()
    for i, head in enumerate(slow.heads):
        torch.testing.assert_close(watched.head(i), head, rtol=0, atol=1e-9)
        together = torch.cat([body, head])  # the personal model: the server's θ with the client's own W_i
        torch.testing.assert_close(watched.result.personal_vector(i), together, rtol=0, atol=1e-9)
    calls = [client for record in watched.result.rounds for client in record.participants]
    assert len(set(calls)) < len(calls)  # some come back
    assert all(len(record.participants) < 5 for record in watched.result.rounds)
    assert (body - watched.states[0]["body"]).abs().max() > 0.01
    moved = [(head - first).abs().max() for head, first in zip(slow.heads, watched.heads, strict=True)]
    assert all((move > 0.01) == (client in calls) for client, move in enumerate(moved))


# --- Proposition 1 ---


def update(run: Simulation, chosen: tuple[int, ...]) -> tuple[Tensor, dict[int, Tensor]]:
    """What the method itself makes of the present state if these clients take part: the new body and heads."""
    server, method = replace(run.server, state=dict(run.server.state)), run.terms.method
    aggregator, heads = Aggregator(method.uploads, list(chosen), server.n_samples, server.layout), {}
    for number in chosen:
        client = run.sites.site(number).client(9, dict(run.state_of(number)))
        aggregator.put(number, method.train(client, method.broadcast(server)))
        heads[number] = client.state["head"]
    if chosen:
        method.receive(server, aggregator.total())
    return server.state["body"], heads


@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("participation", [2, 3, "independent:0.4"])
def test_proposition_1_the_mean_update_is_the_full_gradient(tau: int, participation: Any) -> None:
    """Over all sets of participants, weighted by their probabilities, the joint step is −ρ times the full gradient.

    Of the body it is that of Eq. 1, Σ_i a_i ∇_θ ℓ_i. Of a head it is ∇_W ℓ_i without a_i, as Eq. 3 and Algorithm 1
    have it; Eq. 5 has a_i there, which would make it the gradient of Eq. 1. With τ > 1 the gradients are those after
    everyone's τ−1 own steps, which only participants take.
    """
    watched, data = Watched(inner_steps=tau, participation=participation), clients()
    run = watched.run
    body, heads = run.server.state["body"], [watched.head(client) for client in range(5)]
    if isinstance(participation, int):
        sets = list(combinations(range(5), participation))
        probabilities, share = [1 / len(sets)] * len(sets), participation / 5
    else:
        flags = list(product([False, True], repeat=5))
        sets = [tuple(i for i in range(5) if flag[i]) for flag in flags]
        probabilities, share = [0.4 ** sum(flag) * 0.6 ** (5 - sum(flag)) for flag in flags], 0.4
    assert sum(probabilities) == pytest.approx(1, abs=1e-12)
    mean_body, mean_heads = torch.zeros_like(body), [torch.zeros_like(head) for head in heads]
    for chosen, probability in zip(sets, probabilities, strict=True):
        new_body, new_heads = update(run, chosen)
        mean_body += probability * (new_body - body)
        for client, new in new_heads.items():
            mean_heads[client] += probability * (new - heads[client])
    full = torch.zeros_like(body)
    for client in range(5):
        head = after_inner_steps(data[client], body, heads[client], tau - 1, BETA)
        of_body, of_head = gradients(data[client], body, head)
        full += SIZES[client] / sum(SIZES) * of_body
        expected = share * (head - heads[client]) - RHO * of_head
        assert of_head.abs().max() > 1e-3
        torch.testing.assert_close(mean_heads[client], expected, rtol=0, atol=1e-12)
    assert full.abs().max() > 1e-3
    torch.testing.assert_close(mean_body, -RHO * full, rtol=0, atol=1e-12)


# --- falling steps ---


class Shift(nn.Module):
    """A layer that is a point, and how far a sample is from it."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (self.point - x).square().sum(1)


class Apart(nn.Module):
    """½‖θ − c_i‖² + ½‖W_i − d_i‖² for a sample (c_i, d_i): θ is the body, W_i the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Shift(), Shift()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x[:, :2]) + self.head(x[:, 2:])


def test_falling_steps_converge_where_a_constant_step_keeps_bouncing() -> None:
    """Two of six clients take part, so a round's gradient is that of the joint loss only on average. With Σρ_t = ∞ and
    Σρ_t² < ∞ (Robbins and Monro) θ comes to the joint loss's minimum, Σ a_i c_i; with a constant ρ it does not."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    data = [(point.repeat(1 + i % 3, 1), torch.zeros(1 + i % 3).double()) for i, point in enumerate(points)]
    n = torch.tensor([1 + i % 3 for i in range(6)]).double()
    goal = n / n.sum() @ points[:, :2]
    how: dict[str, Any] = {"data": data, "model": Apart(), "loss": lambda outputs, _: outputs.mean(), "inner_steps": 1}
    how |= {
        "rounds": 300,
        "participation": 2,
        "evaluation": {"every": 0},
        "test": 0.0,
        "validation": 0.0,
        "head": "head",
    }
    away: dict[Any, Tensor] = {}
    for rho in (0.3, "1.0 / (t + 2)"):
        loops: list[Loop] = []
        distances: list[Tensor] = []

        def measure(_: object, loops: list[Loop] = loops, distances: list[Tensor] = distances) -> None:
            distances.append((loops[0].server.state["body"] - goal).norm())

        ft.run(
            "pflego", joint_lr=rho, on_start=loops.append, on_round=measure, dtype="float64", engine="in-process", **how
        )
        away[rho] = torch.stack(distances)
    constant, falling = away.values()
    assert constant[200:].mean() > 0.8 * constant[20:60].mean() > 0.1
    assert falling[200:].mean() < 0.5 * falling[20:60].mean()
    assert falling[200:].mean() < 0.2 * constant[200:].mean()


# --- limit cases ---


def test_one_inner_step_of_all_clients_is_gradient_descent_on_the_joint_loss() -> None:
    """Eq. 1 is the mean loss over the samples of all clients, each through its own head. One autograd step on it: the
    body moves by −ρ ∇_θ L. A head moves by −ρ ∇_W ℓ_i = −(ρ/a_i) ∇_W L, as Eq. 3 has no a_i: a step preconditioned by
    1/a_i (the same for all if all have equally many samples)."""
    watched, data = Watched(inner_steps=1, participation="all"), clients()
    body, heads = watched.states[0]["body"], watched.heads
    for state in watched.states[1:]:
        leaves = [tensor.clone().requires_grad_() for tensor in (body, *heads)]
        outputs = torch.cat([logits(x, leaves[0], head) for (x, _), head in zip(data, leaves[1:], strict=True)])
        functional.cross_entropy(outputs, torch.cat([y for _, y in data])).backward()
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        body = body - RHO * grads[0]
        heads = [
            head - RHO * sum(SIZES) / size * grad for head, size, grad in zip(heads, SIZES, grads[1:], strict=True)
        ]
        torch.testing.assert_close(state["body"], body, rtol=0, atol=1e-12)
    for client, head in enumerate(heads):
        torch.testing.assert_close(watched.head(client), head, rtol=0, atol=1e-12)


def test_held_out_clients_are_no_part_of_the_joint_loss() -> None:
    """New clients never take part: I and Σ N are those of the clients that do. With all of these and τ = 1, a round is
    one step on their joint loss."""
    watched = Watched(inner_steps=1, participation="all", new_clients=2, rounds=1)
    training = watched.result.rounds[0].participants
    assert len(training) == 3
    data = {client: watched.run.data.client(client).train for client in training}
    total = sum(len(y) for _, y in data.values())
    assert total / 3 != sum(SIZES) / 5
    body = watched.states[0]["body"]
    full = torch.zeros_like(body)
    for client in training:
        of_body, of_head = gradients(data[client], body, watched.heads[client])
        full += len(data[client][1]) / total * of_body
        torch.testing.assert_close(watched.head(client), watched.heads[client] - RHO * of_head, rtol=0, atol=1e-12)
    torch.testing.assert_close(watched.states[1]["body"], body - RHO * full, rtol=0, atol=1e-12)


def test_the_releases_weights_enlarge_the_step_by_the_share_of_samples() -> None:
    """The step of Eq. 4 times Σ_all N / Σ_participants N; the heads have the same step."""
    formula, released = (Watched(inner_steps=2, rounds=1, released_weights=switch) for switch in (False, True))
    chosen = formula.result.rounds[0].participants
    larger = sum(SIZES) / sum(SIZES[client] for client in chosen)
    assert larger > 1.2
    step, other = (watched.states[1]["body"] - watched.states[0]["body"] for watched in (formula, released))
    torch.testing.assert_close(other, larger * step, rtol=0, atol=1e-12)
    for client in chosen:
        assert torch.equal(formula.head(client), released.head(client))


def test_under_adam_the_releases_weights_make_no_difference_where_they_are_a_constant() -> None:
    """With equally many samples the factor is I/r in every round, and Adam's step is free of it (but for its ε)."""
    data = [(x.double(), y) for x, y in digits([12] * 5)]
    formula, released = (
        Watched(data=data, inner_steps=2, server_optimizer="adam", joint_lr=0.01, released_weights=switch)
        for switch in (False, True)
    )
    moved = (formula.states[-1]["body"] - formula.states[0]["body"]).abs()
    apart = (formula.states[-1]["body"] - released.states[-1]["body"]).abs()
    assert moved.max() > 0.02
    assert apart.max() < 1e-3 * moved.max()


def test_nobody_taking_part_is_a_round_without_effect() -> None:
    quiet = Watched(inner_steps=2, participation="independent:0.1", rounds=12, server_optimizer="adam")
    empty = [record.round for record in quiet.result.rounds if not record.participants]
    busy = [record.round for record in quiet.result.rounds if record.participants]
    assert empty
    assert busy
    for number in range(1, 13):
        before, after = quiet.states[number - 1], quiet.states[number]
        if number in empty:
            assert_same(before, after)
            assert quiet.result.rounds[number - 1].bytes_up == quiet.result.rounds[number - 1].bytes_down == 0
        else:
            assert not torch.equal(before["body"], after["body"])
    assert any(number > busy[0] for number in empty)  # also when Adam has its moments already


# --- the heads ---


def test_a_uniform_head_start_is_each_clients_own_and_reproducible() -> None:
    """Uniform in [0, 1), weights and bias; drawn once for each client, whenever it first takes part."""
    watched = Watched(head_start="uniform", inner_steps=1, rounds=1)
    heads = torch.stack(watched.heads)
    assert heads.shape == (5, HEAD_SIZE)
    assert heads.min() >= 0
    assert heads.max() < 1
    assert abs(float(heads.mean()) - 0.5) < 0.05
    assert abs(float(heads.var()) - 1 / 12) < 0.02
    assert all(abs(float(heads[:, part].mean()) - 0.5) < 0.12 for part in (slice(0, 60), slice(60, 70)))
    for one, other in combinations(heads, 2):
        assert (one != other).all()
    assert torch.equal(torch.stack(Watched(head_start="uniform", rounds=1).heads), heads)
    assert (torch.stack(Watched(head_start="uniform", rounds=1, seed=5).heads) != heads).all()
    run, method = watched.run, watched.run.terms.method
    for client in range(5):
        if client not in watched.result.rounds[0].participants:
            later = method.personal_model(run.sites.site(client).client(7, {}), method.broadcast(run.server))
            assert torch.equal(later[run.server.head], heads[client])  # the same in any round


def test_heads_start_as_the_networks_unless_said_otherwise() -> None:
    watched = Watched(rounds=1)
    first = watched.run.server.initial
    assert torch.equal(watched.states[0]["body"], first[:BODY_SIZE])
    assert all(torch.equal(head, first[BODY_SIZE:]) for head in watched.heads)


def test_a_head_never_leaves_its_client() -> None:
    """Only the body goes down and only its gradient up; neither the server nor another client holds a head."""
    watched = Watched(inner_steps=3)
    run = watched.run
    assert {name: tuple(tensor.shape) for name, tensor in run.server.state.items()} == {"body": (BODY_SIZE,)}
    down = run.terms.method.send(run.server, 1)
    assert list(down) == ["body"]
    client = run.sites.site(1).client(6, dict(run.state_of(1)))
    up = run.terms.method.train(client, down)
    assert {name: tuple(tensor.shape) for name, tensor in up.items()} == {"gradient": (BODY_SIZE,)}
    assert list(client.state) == ["head"]
    assert client.state["head"].shape == (HEAD_SIZE,)
    after = after_inner_steps(clients()[1], down["body"], watched.head(1), 2, BETA)
    of_body, _ = gradients(clients()[1], down["body"], after)
    torch.testing.assert_close(up["gradient"], of_body, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tau", [1, 2, 5, 50])
def test_a_round_passes_the_data_twice_whatever_tau_is(tau: int) -> None:
    """Samples through each layer in a participant's work; the head alone has all τ steps. (τ = 1 needs one pass.)"""
    watched = Watched(inner_steps=tau, rounds=1)
    run = watched.run
    layers = [layer for layer in run.terms.network.module.modules() if isinstance(layer, nn.Linear)]
    passed = dict.fromkeys(layers, 0)

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        passed[layer] += len(inputs[0])

    hooks = [layer.register_forward_hook(count) for layer in layers]
    run.terms.method.train(run.sites.site(2).client(2, {}), run.terms.method.broadcast(run.server))
    for hook in hooks:
        hook.remove()
    passes = 1 if tau == 1 else 2
    assert [passed[layer] for layer in layers] == [passes * SIZES[2], passes * SIZES[2], tau * SIZES[2]]


def test_participants_can_be_evaluated_after_their_local_work() -> None:
    """As the paper does: the new head with the θ that was received, before the server's step."""
    watched = Watched(inner_steps=3, rounds=2, test=0.4, evaluation={"model": "local", "clients": "participants"})
    run, received = watched.run, watched.states[1]["body"]
    assert not torch.equal(received, watched.states[2]["body"])
    for client, measured in watched.result.per_client.items():
        x, y = run.data.client(client).test
        loss = functional.cross_entropy(logits(x, received, watched.head(client)), y)
        assert measured.loss == pytest.approx(float(loss), abs=1e-9)
    assert set(watched.result.per_client) == set(watched.result.rounds[-1].participants)
