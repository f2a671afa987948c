"""pFedMB against a second, slow implementation written from the paper, its closed forms and its limit cases."""

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedtailor as ft
from fedtailor.method import Total
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.pfedmb import PFedMB, project
from fedtailor.server.aggregation import Aggregator
from fedtailor.server.loop import Loop
from tests.helpers import digits, final
from tests.methods.problems import MOMENTUM, SMALL, watched
from tests.reference.pfedmb import (
    Dense,
    Layers,
    Norm,
    SlowPFedMB,
    as_branches,
    as_vectors,
    average,
    multi_branch,
    unflatten,
)

MLP = (Dense(7, 64), Dense(6, 7), Dense(10, 6, relu=False))  # mlp:7,6 on digits
NORMED = (Dense(7, 64, relu=False), Norm(7), Dense(10, 7, relu=False))
SIZE = 7 * 64 + 7 + 6 * 7 + 6 + 10 * 6 + 10
TINY: dict[str, Any] = {
    "model": "mlp:7,6",
    "rounds": 5,
    "participation": 3,
    "epochs": 2,
    "batch": 5,
    "lr": 0.1,
    "dtype": "float64",
    "test": 0.0,
    "evaluation": {"every": 0},
    "validation": 0.0,
    "engine": "in-process",
    "seed": 4,
}


def clients() -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y) for x, y in digits([13, 7, 20, 9, 4])]


def run_tiny(**settings: Any) -> tuple[ft.RunResult, list[dict[str, Tensor]]]:
    """A run, and the server's tensors before the first round and after each."""
    started: list[Loop] = []
    states: list[dict[str, Tensor]] = []

    def keep(record: object = None) -> None:
        states.append({name: tensor.clone() for name, tensor in started[0].server.state.items()})

    def start(run: Loop) -> None:
        started.append(run)
        keep()

    method = settings.pop("method", "pfedmb")
    return ft.run(method, data=clients(), on_start=start, on_round=keep, **{**TINY, **settings}), states


class Scaled(nn.BatchNorm1d):
    """BatchNorm whose branches begin with scales of their own: with equal ones, its α would never move."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.uniform_(self.weight, 0.5, 1.5)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7), Scaled(7), nn.ReLU(), nn.Linear(7, 10))


@pytest.mark.parametrize("layers", [MLP, NORMED], ids=["mlp", "batch norm"])
@pytest.mark.parametrize(
    "options",
    [
        {"branches": 3},
        {"branches": 3, "per_layer": False},
        {"branches": 3, "alpha_weighted": False},
        {"branches": 2, "branch_lr": 0.15, "alpha_lr": 0.05},
        {"branches": 3, "weight_decay": 0.3},
        {"branches": 3, "weight_decay": 0.2, "momentum": 0.6, "branch_lr": 0.15},
        {},
    ],
    ids=str,
)
def test_agrees_with_a_second_implementation(options: dict[str, Any], layers: Layers) -> None:
    """Server and clients, vector by vector after every round, with mini-batches and partial participation."""
    result, states = run_tiny(**options, **({"model": normed()} if layers is NORMED else {}))
    B, data = options.get("branches", 5), clients()
    slow = SlowPFedMB(
        layers,
        data,
        as_branches(states[0]["W"], layers),
        **{"alpha_lr": 0.2, **{name: value for name, value in options.items() if name != "branches"}},
        **{name: TINY[name] for name in ("seed", "epochs", "batch", "lr")},
    )
    for record, state in zip(result.rounds, states[1:], strict=True):
        slow.round(record.round, record.participants)
        torch.testing.assert_close(state["W"], as_vectors(slow.W), rtol=0, atol=1e-9)
        torch.testing.assert_close(state["alpha"], torch.stack(slow.alpha), rtol=0, atol=1e-9)
    called = {i for record in result.rounds for i in record.participants}
    assert any(len(record.participants) < len(data) for record in result.rounds)
    assert len(called) < sum(len(record.participants) for record in result.rounds)  # some come back
    moved = torch.stack([slow.alpha[i] for i in called])
    assert (moved - 1 / B).abs().amax(dim=(1, 2)).min() > 1e-3  # α is at work
    if "alpha_lr" not in options:
        assert (moved == 0).any()  # and the constraint too
    for i in range(len(data)):  # the personal model: the server's W with the client's own α
        torch.testing.assert_close(result.personal_vector(i), slow.personal(i), rtol=0, atol=1e-9)
    if layers is NORMED:
        used = [branch["count"] for b, branch in enumerate(slow.W[1]) if (moved[:, 1 % moved.shape[1], b] > 0).any()]
        assert min(used) > 3  # buffers are at work
        assert (moved[:, 1 % moved.shape[1]] - 1 / B).abs().max() > 1e-3


# --- architecture and the client's two phases ---


def some_alpha(layers: int, branches: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1 + torch.rand(layers, branches, generator=generator, dtype=torch.float64)).softmax(1)


def trained_once(result: ft.RunResult, client: int, alpha: Tensor, W: Tensor) -> ft.Message:
    """What a client with this α uploads after its work on these branches."""
    site = result.simulation.sites.site(client)
    return site.terms.method.train(site.client(1, {"alpha": alpha.clone()}), {"W": W})


def test_the_chain_rule_for_alpha_is_autograds_through_explicit_branches() -> None:
    """One full-batch step that stays inside the simplex: there the projection only takes off the gradient's mean,
    α' = α − η (g − mean g), whoever computes it."""
    result, states = run_tiny(branches=4, steps=1, batch="full", alpha_lr=1.0)
    W, alpha = states[-1]["W"], some_alpha(3, 4)
    x, y = result.data.client(2).train
    leaf = alpha.clone().requires_grad_()
    (g,) = torch.autograd.grad(functional.cross_entropy(multi_branch(x, as_branches(W, MLP), leaf, MLP), y), [leaf])
    expected = alpha - (g - g.mean(1, keepdim=True))
    assert expected.min() > 0
    assert (expected - alpha).abs().amax(1).min() > 1e-4
    reply = trained_once(result, 2, alpha, W)
    torch.testing.assert_close(reply["alpha"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_chain_rule_for_the_branches_is_autograds_through_explicit_branches(momentum: float) -> None:
    """Several steps of torch.optim.SGD on every W_lb as a parameter of its own, at an α with an unused branch."""
    result, states = run_tiny(branches=4, steps=6, batch="full", alpha_lr=0.0, branch_lr=0.2, momentum=momentum)
    W, alpha = states[-1]["W"], some_alpha(3, 4)
    alpha[1] = torch.tensor([0.0, 0.5, 0.2, 0.3], dtype=torch.float64)
    x, y = result.data.client(0).train
    explicit = as_branches(W, MLP)
    leaves = [tensor.requires_grad_() for layer in explicit for branch in layer for tensor in branch.values()]
    optimizer = torch.optim.SGD(leaves, lr=0.2, momentum=momentum)
    for _ in range(6):
        optimizer.zero_grad()
        functional.cross_entropy(multi_branch(x, explicit, alpha, MLP), y).backward()
        optimizer.step()
    reply = trained_once(result, 0, alpha, W)
    trained = as_vectors(explicit).detach()
    assert (trained - W).abs().amax(1).min() > 1e-2
    torch.testing.assert_close(reply["W"], trained, rtol=0, atol=1e-11)
    assert torch.equal(reply["alpha"], alpha)
    unused = slice(7 * 65, 7 * 65 + 6 * 8)  # the second layer of branch 0
    assert torch.equal(reply["W"][0, unused], W[0, unused])


def test_the_mix_descends_with_the_experiments_rate_whatever_alpha_is() -> None:
    """One step of Eq. 4 moves θ_l = Σ_b α_lb W_lb by −lr · g_l: with equal α, with all of α on one branch, and between.
    (η_W = lr × B would give the second B times that.)"""
    result, states = run_tiny(branches=4, steps=1, batch="full", alpha_lr=0.0)
    W, alpha = states[-1]["W"], some_alpha(3, 4)
    alpha[0], alpha[1] = torch.full((4,), 0.25), torch.tensor([0.0, 0.0, 1.0, 0.0])
    x, y = result.data.client(1).train
    leaves = [unflatten(row, MLP) for row in W]
    mix = [
        {name: sum(alpha[layer][b] * leaves[b][layer][name] for b in range(4)) for name in ("weight", "bias")}
        for layer in range(3)
    ]
    tensors = [tensor.requires_grad_() for piece in mix for tensor in piece.values()]
    outputs = x
    for layer, piece in zip(MLP, mix, strict=True):
        outputs = layer(outputs, piece)
        outputs = outputs.relu() if layer.relu else outputs
    gradients = torch.autograd.grad(functional.cross_entropy(outputs, y), tensors)
    before = torch.cat([tensor.detach().flatten() for tensor in tensors])
    expected = before - TINY["lr"] * torch.cat([gradient.flatten() for gradient in gradients])
    after = trained_once(result, 1, alpha, W)["W"]
    sizes = [7 * 65, 6 * 8, 10 * 7]
    pieces = [share @ part for share, part in zip(alpha, after.split(sizes, dim=1), strict=True)]
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=0, atol=1e-12)
    assert (expected - before).abs().max() > 1e-3


@pytest.mark.parametrize("per_layer", [True, False])
@pytest.mark.parametrize("alpha_lr", [0.2, 20.0])
def test_alpha_starts_equal_and_stays_on_the_simplex(per_layer: bool, alpha_lr: float) -> None:
    layers = 3 if per_layer else 1
    result, states = run_tiny(branches=4, per_layer=per_layer, alpha_lr=alpha_lr)
    assert torch.equal(states[0]["alpha"], torch.full((5, layers, 4), 0.25, dtype=torch.float64))
    for record, before, after in zip(result.rounds, states, states[1:], strict=False):
        alpha = after["alpha"]
        assert alpha.shape == (5, layers, 4)
        assert (alpha >= 0).all()
        torch.testing.assert_close(alpha.sum(2), torch.ones(5, layers, dtype=torch.float64), rtol=0, atol=1e-12)
        for client in range(5):
            kept, first = torch.equal(alpha[client], before["alpha"][client]), (before["alpha"][client] == 0.25).all()
            assert kept or client in record.participants
            assert not (kept and first and client in record.participants)
    if alpha_lr > 1:
        assert (states[-1]["alpha"] == 0).any()
    for client in {client for record in result.rounds for client in record.participants}:
        own = result.client_state(client)["alpha"]  # the server's copy is the client's own
        assert torch.equal(own, states[-1]["alpha"][client])


def nearest_by_enumeration(point: Tensor) -> Tensor:
    """The nearest point of the simplex, by trying every set of positive entries."""
    best, nearest = float("inf"), point
    for size in range(1, len(point) + 1):
        for support in combinations(range(len(point)), size):
            chosen = point[list(support)]
            candidate = torch.zeros_like(point)
            candidate[list(support)] = chosen - (chosen.sum() - 1) / size
            distance = float(candidate @ (candidate - 2 * point))  # squared, less ‖point‖², which may be huge
            if candidate.min() >= 0 and distance < best:
                best, nearest = distance, candidate
    return nearest


@pytest.mark.parametrize("branches", [1, 2, 3, 6])
@pytest.mark.parametrize("scale", [0.05, 0.5, 5.0])
def test_the_projection_is_the_nearest_point_of_the_simplex(branches: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(branches)
    rows = scale * torch.randn(40, branches, generator=generator, dtype=torch.float64) + 1 / branches
    rows[0] = rows[0, 0]  # ties
    expected = torch.stack([nearest_by_enumeration(row) for row in rows])
    torch.testing.assert_close(project(rows), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(project(expected), expected, rtol=0, atol=1e-13)  # what is on it stays
    if branches > 1 and scale > 1:
        assert (expected.count_nonzero(1) < branches).any()


@pytest.mark.parametrize("far", [1e3, 1e9])
def test_the_projection_is_exact_far_from_the_simplex(far: float) -> None:
    """A large step (a steep loss or a large η_α) in single precision must end on the simplex, too."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat(
        [
            torch.tensor([[far, far, -far], [far, 0.0, 0.0], [-far, -far, -2 * far]]),
            far + torch.randn(20, 3, generator=generator),
            far * torch.randn(20, 3, generator=generator),
        ]
    )
    expected = torch.stack([nearest_by_enumeration(row - row.max()) for row in rows.double()])
    torch.testing.assert_close(project(rows).double(), expected, rtol=0, atol=1e-6)


def test_branches_have_first_values_of_their_own() -> None:
    """Branch 0 is the network's first vector; the others are like it, all different, and a matter of the seed."""
    result, states = run_tiny(rounds=1)
    W = states[0]["W"]
    assert W.shape == (5, SIZE)
    assert torch.equal(W[0], result.simulation.server.initial)
    for one, other in combinations(W, 2):
        for mine, theirs in zip(unflatten(one, MLP), unflatten(other, MLP), strict=True):
            assert (mine["weight"] != theirs["weight"]).all()
            assert (mine["bias"] != theirs["bias"]).all()
    for layer in zip(*(unflatten(row, MLP) for row in W), strict=True):
        deviations = torch.stack([tensors["weight"].std() for tensors in layer])
        assert deviations.max() < 1.5 * deviations.min()
    assert torch.equal(run_tiny(rounds=1)[1][0]["W"], W)
    assert (run_tiny(rounds=1, seed=5)[1][0]["W"] != W).all()


# --- the server ---


N = {0: 13, 2: 20, 3: 9}  # the participants of a round by hand, and their samples


def random_uploads(B: int, layers: int = 3) -> dict[int, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(8)
    return {
        i: {"W": torch.randn(B, SIZE, generator=generator, dtype=torch.float64), "alpha": some_alpha(layers, B, seed=i)}
        for i in N
    }


def received(result: ft.RunResult, uploads: dict[int, dict[str, Tensor]]) -> Total:
    """Hand these uploads to the server as its loop does, in the order in which they happen to arrive."""
    server, method = result.simulation.server, result.simulation.terms.method
    aggregator = Aggregator(method.uploads, list(uploads), server.n_samples, server.layout)
    for client in reversed(uploads):
        aggregator.put(client, uploads[client])
    total = aggregator.total()
    method.receive(server, total)
    return total


@pytest.mark.parametrize("per_layer", [True, False])
def test_equation_5_is_a_loop_and_a_branch_that_nobody_uses_keeps_its_value(per_layer: bool) -> None:
    result, _ = run_tiny(branches=3, rounds=1, per_layer=per_layer)
    server = result.simulation.server
    uploads = random_uploads(3, 3 if per_layer else 1)
    number = 1 if per_layer else 0
    for upload in uploads.values():
        upload["alpha"][number] = torch.tensor([0.5, 0.0, 0.5])  # nobody uses branch 1 here
    uploads[2]["alpha"][number] = torch.tensor([1.0, 0.0, 0.0])
    for i, upload in uploads.items():
        upload["weight"] = N[i] * upload["alpha"].T
    before = server.state["W"].clone()
    total = received(result, uploads)
    Ws, alphas = [as_branches(u["W"], MLP) for u in uploads.values()], [u["alpha"] for u in uploads.values()]
    expected = as_vectors(average(Ws, alphas, list(N.values()), as_branches(before, MLP)))
    torch.testing.assert_close(server.state["W"], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(total.weight("W"), sum(N[i] * uploads[i]["alpha"].T for i in N), rtol=0, atol=1e-12)
    unused = slice(7 * 65, 7 * 65 + 6 * 8) if per_layer else slice(0, SIZE)
    kept = server.state["W"] == before
    assert kept[1, unused].all()
    assert kept.sum() == (unused.stop - unused.start)  # and nothing else is kept


def test_equation_6_averages_by_samples_alone() -> None:
    result, _ = run_tiny(branches=3, rounds=1, alpha_weighted=False)
    server = result.simulation.server
    uploads = random_uploads(3)
    uploads[0]["alpha"][1] = torch.tensor([1.0, 0.0, 0.0])
    for i, upload in uploads.items():
        upload["weight"] = torch.full((3, 3), float(N[i]), dtype=torch.float64)
    received(result, uploads)
    expected = torch.zeros(3, SIZE, dtype=torch.float64)
    for i, upload in uploads.items():
        expected += N[i] / 42 * upload["W"]
    torch.testing.assert_close(server.state["W"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha_weighted", [True, False])
def test_a_client_computes_the_weights_of_its_branches(alpha_weighted: bool) -> None:
    """n_i α_lb for Eq. 5, n_i for Eq. 6, so that the server adds up and divides without a look at any client."""
    method, log = watched(PFedMB, branches=3, alpha_weighted=alpha_weighted)
    run_tiny(method=method)
    assert len(log.up) == 15
    for (_, client), upload in log.up.items():
        alpha = upload["alpha"].T if alpha_weighted else torch.ones(3, 3, dtype=torch.float64)
        assert torch.equal(upload["weight"], len(clients()[client][1]) * alpha)
    with pytest.raises(KeyError):
        log.totals[1].each("W")


# --- limit cases ---


@pytest.mark.parametrize("more", [{}, MOMENTUM])
@pytest.mark.parametrize("options", [{}, {"per_layer": False}, {"alpha_weighted": False}], ids=str)
def test_one_branch_is_fedavg(options: dict[str, Any], more: dict[str, Any]) -> None:
    """Bit for bit, in single precision."""
    one, average = ft.run("pfedmb", branches=1, **options, **SMALL, **more), ft.run("fedavg", **SMALL, **more)
    assert torch.equal(one.server_state["W"][0], average.server_state["theta"])
    assert [record.accuracy for record in one.rounds] == [record.accuracy for record in average.rounds]


class FromTheMean(FedAvg):
    """FedAvg that begins at the mean of pFedMB's first branches."""

    branches: int = 4

    def start(self, server: ft.Server) -> None:
        server.state["theta"] = torch.stack([server.initial_for(b) for b in range(self.branches)]).mean(0)


@pytest.mark.parametrize("branch_lr", [None, 0.2])
@pytest.mark.parametrize("alpha_weighted", [True, False])
def test_equal_and_fixed_alpha_is_fedavg_on_each_branch(branch_lr: float | None, alpha_weighted: bool) -> None:
    """The sense in which it holds: the gradient of every branch is that of their mean θ̄ (with the factor α = 1/B), not
    its own. So θ̄ is FedAvg from the mean of the first values with the rate η_W Σ_b α_b² = η_W / B (by default lr,
    whatever α is), every branch moves by what θ̄ moves by, and the server's average of each branch is FedAvg's."""
    options = {"branches": 4, "alpha_lr": 0.0, "branch_lr": branch_lr, "alpha_weighted": alpha_weighted}
    _, states = run_tiny(**options)
    _, average = run_tiny(method=FromTheMean(), lr=branch_lr / 4 if branch_lr else TINY["lr"])
    for state, fedavg in zip(states, average, strict=True):
        assert torch.equal(state["alpha"], states[0]["alpha"])
        moved = fedavg["theta"] - average[0]["theta"]
        torch.testing.assert_close(state["W"].mean(0), fedavg["theta"], rtol=0, atol=1e-12)
        torch.testing.assert_close(state["W"] - states[0]["W"], moved.expand(4, SIZE), rtol=0, atol=1e-12)
    assert (average[-1]["theta"] - average[0]["theta"]).abs().max() > 0.05


class AllTheSame(PFedMB):
    """pFedMB whose branches all begin with the network's first vector."""

    def start(self, server: ft.Server) -> None:
        super().start(server)
        server.state["W"] = server.initial.expand(self.branches, -1).clone()


def test_nothing_separates_branches_that_begin_equal() -> None:
    """Then α stays equal and every branch is FedAvg: why they need different first values."""
    _, states = run_tiny(method=AllTheSame(branches=4))
    _, average = run_tiny(method="fedavg")
    for state, fedavg in zip(states, average, strict=True):
        torch.testing.assert_close(state["alpha"], torch.full_like(state["alpha"], 0.25), rtol=0, atol=1e-12)
        torch.testing.assert_close(state["W"], fedavg["theta"].expand(4, SIZE), rtol=0, atol=1e-12)


def test_clients_with_the_same_data_have_the_same_alpha() -> None:
    """All clients take part with equal full batches: they end with equal α, and Eq. 5 leaves what each of them sent."""
    ((x, y),) = digits([20])
    result = ft.run("pfedmb", data=[(x, y)] * 3, **{**TINY, "participation": "all", "batch": "full"})
    alone = ft.run("pfedmb", data=[(x, y)], **{**TINY, "participation": "all", "batch": "full"})
    many, one = final(result), final(alone)
    for name in ("0", "1", "2"):
        torch.testing.assert_close(many[f"{name}/alpha"], one["0/alpha"], rtol=0, atol=1e-12)
    torch.testing.assert_close(many["server/W"], one["server/W"], rtol=0, atol=1e-12)


def test_alpha_is_recorded_for_every_client_layer_and_branch() -> None:
    """Fig. 3: what `observe` shows is the α of all clients."""
    result, states = run_tiny(branches=3)
    shown = result.simulation.terms.method.observe(result.simulation.server)
    assert torch.equal(shown["alpha"], states[-1]["alpha"])
    assert shown["alpha"].shape == (5, 3, 3)
    assert any(not torch.equal(one["alpha"], other["alpha"]) for one, other in pairwise(states))
