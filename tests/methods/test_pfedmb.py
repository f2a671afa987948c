"""pFedMB against a second, slow implementation written from the paper, its closed forms and its limit cases."""

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fedtailor as ft
from fedtailor.local.descent import Descent, batches
from fedtailor.local.streams import torch_stream
from fedtailor.method import Replies
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.pfedmb import PFedMB, project
from fedtailor.server.loop import Federation
from tests.helpers import assert_same, digits, final

SHAPES = [(7, 64), (6, 7), (10, 6)]  # of the layers of mlp:7,6 on digits
SIZE = sum(rows * columns + rows for rows, columns in SHAPES)
TINY: dict[str, Any] = {
    "model": "mlp:7,6",
    "rounds": 5,
    "participation": 3,
    "epochs": 2,
    "batch": 5,
    "lr": 0.1,
    "dtype": "float64",
    "test": 0.0,
    "validation": 0.0,
    "engine": "in-process",
    "seed": 4,
}
SMALL: dict[str, Any] = {
    "data": "digits",
    "clients": 5,
    "model": "mlp:16",
    "rounds": 3,
    "participation": 0.6,
    "engine": "in-process",
    "seed": 1,
}
MOMENTUM = {"momentum": 0.9, "keep_momentum": True, "weight_decay": 0.01}

Layer = tuple[Tensor, Tensor]  # weights and bias
Branches = list[list[Layer]]  # W[l][b]


def clients() -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y) for x, y in digits([13, 7, 20, 9, 4])]


def run_tiny(**settings: Any) -> tuple[ft.RunResult, list[dict[str, Tensor]]]:
    """A run, and the server's tensors before the first round and after each."""
    started: list[Federation] = []
    states: list[dict[str, Tensor]] = []

    def keep(record: object = None) -> None:
        states.append({name: tensor.clone() for name, tensor in started[0].server.state.items()})

    def start(run: Federation) -> None:
        started.append(run)
        keep()

    method = settings.pop("method", "pfedmb")
    return ft.run(method, data=clients(), on_start=start, on_round=keep, **{**TINY, **settings}), states


# --- the second implementation ---


def unflatten(vector: Tensor) -> list[Layer]:
    """A copy of a network's vector as the weights and bias of each layer."""
    layers, start = [], 0
    for rows, columns in SHAPES:
        weights = vector[start : start + rows * columns].clone().view(rows, columns)
        bias = vector[start + rows * columns : start + rows * columns + rows].clone()
        layers.append((weights, bias))
        start += rows * columns + rows
    assert start == len(vector)
    return layers


def flatten(layers: list[Layer]) -> Tensor:
    return torch.cat([tensor.flatten() for layer in layers for tensor in layer])


def as_branches(W: Tensor) -> Branches:
    """W[l][b] from one vector for each branch."""
    rows = [unflatten(vector) for vector in W]
    return [[row[layer] for row in rows] for layer in range(len(SHAPES))]


def as_vectors(W: Branches) -> Tensor:
    return torch.stack([flatten([branches[b] for branches in W]) for b in range(len(W[0]))])


def multi_branch(x: Tensor, W: Branches, alpha: Tensor) -> Tensor:
    """Eq. 2: every branch receives x, and the outputs are combined with the weights α. One row of α stands for all
    layers where they share it."""
    for layer, branches in enumerate(W):
        shares = alpha[layer] if len(alpha) > 1 else alpha[0]
        x = sum((shares[b] * (x @ w.T + bias) for b, (w, bias) in enumerate(branches)), torch.zeros(()).to(x))
        if layer < len(W) - 1:
            x = x.relu()
    return x


def by_bisection(point: Tensor) -> Tensor:
    """The nearest point of the simplex is max(v − t, 0) with the t for which its entries sum to 1."""
    low, high = float(point.min()) - 1, float(point.max())
    for _ in range(100):
        middle = (low + high) / 2
        if float((point - middle).clamp(min=0).sum()) > 1:
            low = middle
        else:
            high = middle
    return (point - (low + high) / 2).clamp(min=0)


def local_learning(
    W: Branches, alpha: Tensor, x: Tensor, y: Tensor, order: list[Tensor], alpha_lr: float, lr: float
) -> tuple[Branches, Tensor]:
    """ClientLocalLearning of Algorithm 1, with an autograd leaf for α and for each tensor of each branch."""
    for chosen in order:  # line 19
        leaf = alpha.clone().requires_grad_()
        loss = functional.cross_entropy(multi_branch(x[chosen], W, leaf), y[chosen])
        (gradient,) = torch.autograd.grad(loss, [leaf])
        alpha = torch.stack([by_bisection(row) for row in alpha - alpha_lr * gradient])
    for chosen in order:  # line 20
        W = [[(w.clone().requires_grad_(), bias.clone().requires_grad_()) for w, bias in layer] for layer in W]
        leaves = [tensor for layer in W for branch in layer for tensor in branch]
        functional.cross_entropy(multi_branch(x[chosen], W, alpha), y[chosen]).backward()
        assert all(leaf.grad is not None for leaf in leaves)
        W = [[tuple((t - lr * t.grad).detach() for t in branch) for branch in layer] for layer in W]
    return W, alpha


def order_of(n: int, round: int, client: int) -> list[Tensor]:
    """The samples of each step, as the run draws them."""
    how = Descent(epochs=TINY["epochs"], batch=TINY["batch"])
    drawn = batches(n, how, torch_stream(TINY["seed"], "batches", round, client), torch.device("cpu"))
    return [torch.arange(n) if chosen is None else chosen for chosen in drawn]


def average(W: list[Branches], alpha: list[Tensor], n: list[int], before: Branches) -> Branches:
    """Eq. 5 by loops over layers, branches, tensors and participants."""
    after: Branches = []
    for layer in range(len(SHAPES)):
        after.append([])
        for b in range(len(before[layer])):
            tensors = []
            for part in (0, 1):
                above, below = torch.zeros_like(before[layer][b][part]), 0.0
                for i in range(len(W)):
                    share = float(alpha[i][layer if len(alpha[i]) > 1 else 0, b])
                    above += n[i] * share * W[i][layer][b][part]
                    below += n[i] * share
                tensors.append(above / below if below > 0 else before[layer][b][part])
            after[layer].append((tensors[0], tensors[1]))
    return after


@pytest.mark.parametrize(
    "options",
    [
        {"branches": 3},
        {"branches": 3, "per_layer": False},
        {"branches": 3, "alpha_weighted": False},
        {"branches": 2, "branch_lr": 0.15, "alpha_lr": 0.05},
        {},
    ],
    ids=str,
)
def test_agrees_with_a_second_implementation(options: dict[str, Any]) -> None:
    """Server and clients, vector by vector after every round, with mini-batches and partial participation."""
    result, states = run_tiny(**options)
    B, data = options.get("branches", 5), clients()
    rate = options.get("branch_lr", TINY["lr"] * B)
    W = as_branches(states[0]["W"])
    rows = len(SHAPES) if options.get("per_layer", True) else 1
    alpha = [torch.full((rows, B), 1 / B, dtype=torch.float64) for _ in data]
    for record, state in zip(result.rounds, states[1:], strict=True):
        local = []
        for i in record["participants"]:
            order = order_of(len(data[i][1]), record["round"], i)
            trained, alpha[i] = local_learning(W, alpha[i], *data[i], order, options.get("alpha_lr", 0.2), rate)
            local.append(trained)
        weights = [alpha[i] for i in record["participants"]]
        if not options.get("alpha_weighted", True):
            weights = [torch.ones_like(row) for row in weights]  # Eq. 6
        W = average(local, weights, [len(data[i][1]) for i in record["participants"]], W)
        torch.testing.assert_close(state["W"], as_vectors(W), rtol=0, atol=1e-9)
        torch.testing.assert_close(state["alpha"], torch.stack(alpha), rtol=0, atol=1e-9)
    visited = {i for record in result.rounds for i in record["participants"]}
    assert any(len(record["participants"]) < len(data) for record in result.rounds)
    assert len(visited) < sum(len(record["participants"]) for record in result.rounds)  # some come back
    moved = torch.stack([alpha[i] for i in visited])
    assert (moved - 1 / B).abs().amax(dim=(1, 2)).min() > 1e-3  # α is at work
    if "alpha_lr" not in options:
        assert (moved == 0).any()  # and the constraint too
    for i in range(len(data)):  # the personal model: the server's W with the client's own α
        mixed = []
        for layer in range(len(SHAPES)):
            shares = alpha[i][layer if rows > 1 else 0]
            mixed.append(
                tuple(sum(float(shares[b]) * W[layer][b][part] for b in range(B)) for part in (0, 1))  # Eq. 1
            )
        torch.testing.assert_close(result._federation.personal(i), flatten(mixed), rtol=0, atol=1e-9)


# --- architecture and the client's two phases ---


def some_alpha(layers: int, branches: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1 + torch.rand(layers, branches, generator=generator, dtype=torch.float64)).softmax(1)


def test_the_chain_rule_for_alpha_is_autograds_through_explicit_branches() -> None:
    """One full-batch step that stays inside the simplex: there the projection only takes off the gradient's mean,
    α' = α − η (g − mean g), whoever computes it."""
    result, states = run_tiny(branches=4, steps=1, batch="full", alpha_lr=1.0)
    run, W, alpha = result._federation, states[-1]["W"], some_alpha(3, 4)
    x, y = run.data.train(2)
    leaf = alpha.clone().requires_grad_()
    (g,) = torch.autograd.grad(functional.cross_entropy(multi_branch(x, as_branches(W), leaf), y), [leaf])
    expected = alpha - (g - g.mean(1, keepdim=True))
    assert expected.min() > 0
    assert (expected - alpha).abs().amax(1).min() > 1e-4
    reply = run.method.train(run.bench.client(2, 1, {"alpha": alpha.clone()}), {"W": W})
    torch.testing.assert_close(reply["alpha"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_chain_rule_for_the_branches_is_autograds_through_explicit_branches(momentum: float) -> None:
    """Several steps of torch.optim.SGD on every W_lb as a parameter of its own, at an α with an unused branch."""
    result, states = run_tiny(branches=4, steps=6, batch="full", alpha_lr=0.0, branch_lr=0.2, momentum=momentum)
    run, W, alpha = result._federation, states[-1]["W"], some_alpha(3, 4)
    alpha[1] = torch.tensor([0.0, 0.5, 0.2, 0.3], dtype=torch.float64)
    x, y = run.data.train(0)
    explicit = [
        [(w.clone().requires_grad_(), bias.clone().requires_grad_()) for w, bias in layer] for layer in as_branches(W)
    ]
    leaves = [tensor for layer in explicit for branch in layer for tensor in branch]
    optimizer = torch.optim.SGD(leaves, lr=0.2, momentum=momentum)
    for _ in range(6):
        optimizer.zero_grad()
        functional.cross_entropy(multi_branch(x, explicit, alpha), y).backward()
        optimizer.step()
    reply = run.method.train(run.bench.client(0, 1, {"alpha": alpha.clone()}), {"W": W})
    trained = as_vectors(explicit).detach()
    assert (trained - W).abs().amax(1).min() > 1e-2
    torch.testing.assert_close(reply["W"], trained, rtol=0, atol=1e-11)
    assert torch.equal(reply["alpha"], alpha)
    unused = slice(7 * 65, 7 * 65 + 6 * 8)  # the second layer of branch 0
    assert torch.equal(reply["W"][0, unused], W[0, unused])


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
            assert kept or client in record["participants"]
            assert not (kept and first and client in record["participants"])
    if alpha_lr > 1:
        assert (states[-1]["alpha"] == 0).any()
    for client in {client for record in result.rounds for client in record["participants"]}:
        own = result._federation.states.get(f"client-{client}")["alpha"]  # the server's copy is the client's own
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
    assert torch.equal(W[0], result._federation.server.initial)
    for one, other in combinations(W, 2):
        for (weights, bias), (weights2, bias2) in zip(unflatten(one), unflatten(other), strict=True):
            assert (weights != weights2).all()
            assert (bias != bias2).all()
    for layer in zip(*(unflatten(row) for row in W), strict=True):
        deviations = torch.stack([weights.std() for weights, _ in layer])
        assert deviations.max() < 1.5 * deviations.min()
    assert torch.equal(run_tiny(rounds=1)[1][0]["W"], W)
    assert (run_tiny(rounds=1, seed=5)[1][0]["W"] != W).all()


# --- the server ---


def random_replies(B: int, layers: int = 3) -> tuple[dict[int, dict[str, Tensor]], list[int]]:
    generator = torch.Generator().manual_seed(8)
    chosen = [0, 2, 3]
    replies = {
        i: {
            "W": torch.randn(B, SIZE, generator=generator, dtype=torch.float64),
            "alpha": some_alpha(layers, B, seed=i),
        }
        for i in chosen
    }
    return replies, [13, 20, 9]


@pytest.mark.parametrize("per_layer", [True, False])
def test_equation_5_is_a_loop_and_a_branch_that_nobody_uses_keeps_its_value(per_layer: bool) -> None:
    result, _ = run_tiny(branches=3, rounds=1, per_layer=per_layer)
    server, method = result._federation.server, result._federation.method
    replies, n = random_replies(3, 3 if per_layer else 1)
    number = 1 if per_layer else 0
    for reply in replies.values():
        reply["alpha"][number] = torch.tensor([0.5, 0.0, 0.5])  # nobody uses branch 1 here
    replies[2]["alpha"][number] = torch.tensor([1.0, 0.0, 0.0])
    before = server.state["W"].clone()
    method.receive(server, Replies(replies, server.samples))
    Ws, alphas = [as_branches(r["W"]) for r in replies.values()], [r["alpha"] for r in replies.values()]
    expected = as_vectors(average(Ws, alphas, n, as_branches(before)))
    torch.testing.assert_close(server.state["W"], expected, rtol=0, atol=1e-12)
    unused = slice(7 * 65, 7 * 65 + 6 * 8) if per_layer else slice(0, SIZE)
    kept = server.state["W"] == before
    assert kept[1, unused].all()
    assert kept.sum() == (unused.stop - unused.start)  # and nothing else is kept


def test_equation_6_averages_by_samples_alone() -> None:
    result, _ = run_tiny(branches=3, rounds=1, alpha_weighted=False)
    server, method = result._federation.server, result._federation.method
    replies, n = random_replies(3)
    replies[0]["alpha"][1] = torch.tensor([1.0, 0.0, 0.0])
    method.receive(server, Replies(replies, server.samples))
    expected = torch.zeros(3, SIZE, dtype=torch.float64)
    for samples, reply in zip(n, replies.values(), strict=True):
        expected += samples / 42 * reply["W"]
    torch.testing.assert_close(server.state["W"], expected, rtol=0, atol=1e-12)


def test_a_round_costs_b_vectors_each_way_and_alpha_up() -> None:
    size = 64 * 16 + 16 + 16 * 10 + 10
    for options, alpha in (({}, 2 * 5), ({"branches": 3}, 2 * 3), ({"branches": 3, "per_layer": False}, 3)):
        branches = options.get("branches", 5)
        for record in ft.run("pfedmb", **SMALL, max_train=20, **options).rounds:
            assert record["bytes_down"] == 3 * 4 * branches * size
            assert record["bytes_up"] == 3 * 4 * (branches * size + alpha)


# --- limit cases ---


@pytest.mark.parametrize("more", [{}, MOMENTUM])
@pytest.mark.parametrize("options", [{}, {"per_layer": False}, {"alpha_weighted": False}], ids=str)
def test_one_branch_is_fedavg(options: dict[str, Any], more: dict[str, Any]) -> None:
    """Bit for bit, in single precision."""
    one, average = ft.run("pfedmb", branches=1, **options, **SMALL, **more), ft.run("fedavg", **SMALL, **more)
    assert torch.equal(one._federation.server.state["W"][0], average._federation.server.state["theta"])
    assert [record["accuracy"] for record in one.rounds] == [record["accuracy"] for record in average.rounds]


class FromTheMean(FedAvg):
    """FedAvg that begins at the mean of pFedMB's first branches."""

    branches: int = 4

    def start(self, server: ft.Server) -> None:
        server.state["theta"] = torch.stack([server.another_initial(b) for b in range(self.branches)]).mean(0)


@pytest.mark.parametrize("branch_lr", [None, 0.2])
@pytest.mark.parametrize("alpha_weighted", [True, False])
def test_equal_and_fixed_alpha_is_fedavg_on_each_branch(branch_lr: float | None, alpha_weighted: bool) -> None:
    """The sense in which it holds: the gradient of every branch is that of their mean θ̄ (with the factor α = 1/B), not
    its own. So θ̄ is FedAvg from the mean of the first values with the rate η_W Σ_b α_b² = η_W / B (which is lr by
    default), every branch moves by what θ̄ moves by, and the server's average of each branch is FedAvg's."""
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


def test_rounds_repeat_bit_for_bit_whatever_else_was_drawn() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        once = final(run_tiny()[0])
        torch.manual_seed(2)
        assert_same(once, final(run_tiny()[0]))


def test_alpha_is_recorded_for_every_client_layer_and_branch() -> None:
    """Fig. 3: what `observe` shows is the α of all clients."""
    result, states = run_tiny(branches=3)
    shown = result._federation.method.observe(result._federation.server)
    assert torch.equal(shown["alpha"], states[-1]["alpha"])
    assert shown["alpha"].shape == (5, 3, 3)
    assert any(not torch.equal(one["alpha"], other["alpha"]) for one, other in pairwise(states))
