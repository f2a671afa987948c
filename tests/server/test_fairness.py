"""Fair means: closed forms and limit cases, an independent version, engines and resumes, what is refused."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.experiment.fairness import LOSS, Fairness
from fedtailor.messages import NEVER, Train
from fedtailor.method import Mean, Method, Server
from fedtailor.methods import all_methods
from fedtailor.methods.fedavg import FedAvg
from fedtailor.server.aggregation import Aggregator
from fedtailor.server.aggregation.fairness import MIXTURE, FairFactors, on_simplex
from fedtailor.training.layout import Layout
from fedtailor.training.predictions import outputs
from tests.helpers import EqualFedAvg, assert_same, digits, final, make_simulation, numbers, run_quadratic
from tests.helpers import uneven_clients as uneven
from tests.reference.fairness import SlowFair

SMALL: dict[str, Any] = {
    "data": "digits", "clients": 6, "max_train": 20, "model": "mlp:8", "rounds": 3, "epochs": 1, "participation": 4,
}  # fmt: skip
SINGLE = ("pgfed", "pgfedmo", "pgfed-ce", "fedacs", "fedamp", "fedfomo", "pfedsim", "pfedgraph", "fedcac", "cfl",
          "fedpac")  # fmt: skip


# --- the setting ---


@pytest.mark.parametrize(("given", "read"), [("none", "none"), (" Q:2", "q:2.0"), ("afl:1e-2", "afl:0.01")])
def test_a_rule_is_read(given: str, read: str) -> None:
    assert str(Fairness.parse(given)) == read
    assert bool(Fairness.parse(given)) == (read != "none")


@pytest.mark.parametrize("wrong", ["q", "q:-1", "q:inf", "q:nan", "afl", "afl:x", "none:1", "fair:1", 3])
def test_another_is_refused(wrong: Any) -> None:
    with pytest.raises(ft.FedtailorError, match=r"fairness.*q:1\.0"):
        ft.run("fedavg", fairness=wrong, **SMALL)


# --- limit cases ---


@pytest.mark.parametrize("method", all_methods())
def test_the_power_0_has_the_bits_of_the_run_without(method: str) -> None:
    if method in SINGLE or method == "local":
        with pytest.raises(ft.FedtailorError, match=r"Fairness weights means, and .*(own|has none)") as refused:
            make_simulation(method, fairness="q:0", **SMALL)
        assert str(refused.value).endswith(".")
        return
    momentum = {"momentum": 0.5, "keep_momentum": True} if method in ("fedavg", "fedrecon", "per-fedavg") else {}
    plain, fair = (ft.run(method, engine="in-process", fairness=f, **momentum, **SMALL) for f in ("none", "q:0"))
    assert_same(final(fair), final(plain))
    assert [record.accuracy for record in fair.rounds] == [record.accuracy for record in plain.rounds]
    sent = [record.bytes_up - before.bytes_up for record, before in zip(fair.rounds, plain.rounds, strict=True)]
    assert sent == [8 * len(record.participants) for record in plain.rounds]  # one number more of each


@pytest.mark.parametrize("method", ["fedavg", EqualFedAvg()])
def test_a_step_of_0_is_the_methods_own_mean(method: str | Method) -> None:
    data = uneven()[0]
    plain, fair = (run_quadratic(method, data, 4, rounds=5, fairness=fairness) for fairness in ("none", "afl:0"))
    torch.testing.assert_close(fair.server_state["theta"], plain.server_state["theta"], rtol=0, atol=1e-14)
    torch.testing.assert_close(
        fair.server_state[MIXTURE], torch.tensor([1, 2, 3, 1, 2]).double() / 9, rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("method", ["fedavg", EqualFedAvg()])
def test_of_a_large_power_the_worst_client_alone_remains(method: str | Method) -> None:
    data, centres, curvatures = uneven()
    losses = 0.5 * torch.einsum("ni,nij,nj->n", centres, curvatures, centres)  # at θ = 0
    worst = int(losses.argmax())
    found = run_quadratic(method, data, 4, rounds=1, fairness="q:5000").server_state["theta"]
    torch.testing.assert_close(found, 0.1 * curvatures[worst] @ centres[worst], rtol=0, atol=1e-14)


# --- against an independent version ---


@pytest.mark.parametrize("participation", ["all", "3"])
@pytest.mark.parametrize(("fairness", "how"), [("q:1.5", {"q": 1.5}), ("afl:0.02", {"step": 0.02})])
def test_fedavg_is_the_slow_version(fairness: str, how: dict[str, float], participation: str) -> None:
    data, centres, curvatures = uneven()
    result = run_quadratic("fedavg", data, 4, rounds=8, fairness=fairness, participation=participation)
    samples = np.array([len(y) for _, y in data], dtype=float)
    slow = SlowFair(centres.numpy(), curvatures.numpy(), samples, lr=0.1, **how)  # type: ignore[arg-type]
    for record in result.rounds:
        slow.round(record.participants)
    np.testing.assert_allclose(result.server_state["theta"], slow.theta, rtol=0, atol=1e-8)  # 1e-10 beside a loss
    if "step" in how:
        mixture = result.server_state[MIXTURE]
        np.testing.assert_allclose(mixture, slow.mixture, rtol=0, atol=1e-12)
        assert abs(float(mixture.sum()) - 1) < 1e-12
        assert float(mixture.min()) >= 0
        assert not np.allclose(slow.mixture, samples / samples.sum(), atol=0.01)  # it has moved


def test_the_projection_is_the_nearest_point_of_the_simplex() -> None:
    """Against all supports: on each, the nearest point of its affine hull, if none of its numbers is negative."""
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 10.0):
        for point in scale * torch.randn(20, 5, generator=generator, dtype=torch.float64):
            nearest: list[tuple[float, Tensor]] = []
            for support in (s for size in range(1, 6) for s in itertools.combinations(range(5), size)):
                candidate = torch.zeros(5, dtype=torch.float64)
                candidate[[*support]] = point[[*support]] + (1 - point[[*support]].sum()) / len(support)
                if candidate.min() >= 0:
                    nearest.append((float((candidate - point).norm()), candidate))
            expected = min(nearest, key=lambda pair: pair[0])[1]
            torch.testing.assert_close(on_simplex(point), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto"])
def test_the_loss_is_that_of_the_model_that_the_client_had_before_it_trained(method: str) -> None:
    simulation = make_simulation(method, fairness="q:1", **{**SMALL, "participation": "all"})
    loop, sites = simulation.loop, simulation.sites
    loop.round(1, sites)
    loop.call(2)
    for client, message in loop.method.send_all(loop.server).items():
        theta, (x, y) = sites.personal_model(client, 1, message), sites.site(client).data.train
        expected = torch.nn.functional.cross_entropy(outputs(sites.terms.network, theta, x), y)
        (reply,) = sites.ask([Train(2, client, message, loop.versions.get(client, NEVER))])
        assert float(reply.upload[LOSS]) == pytest.approx(float(expected), rel=1e-6)


# --- the running sum ---


class Weighted(FedAvg):
    uploads = {"samples": Mean(), "equal": Mean("equal"), "own": Mean("w")}  # noqa: RUF012


SIZE = 3
LAYOUT = Layout(SIZE, slice(0, 2), slice(2, SIZE))
SAMPLES = torch.tensor([5, 1, 3, 2, 4])


def server(state: dict[str, Tensor] | None = None) -> Server:
    made = Server(torch.zeros(SIZE), LAYOUT, SAMPLES, 5, initialise=lambda number: torch.zeros(SIZE))
    made.state.update(state or {})
    return made


@pytest.mark.parametrize("failed", [None, 0, 3])
@pytest.mark.parametrize("q", [0.0, 1.0, 30.0])
def test_every_kind_of_mean_is_weighted_and_no_power_overflows(q: float, failed: int | None) -> None:
    generator, losses = torch.Generator().manual_seed(1), [1e-5, 1e2, 1e16, 1e-12, 1e14]  # two are the largest so far
    uploads = {
        client: {name: torch.randn(SIZE, generator=generator, dtype=torch.float64) for name in Weighted.uploads}
        | {"w": torch.rand((), generator=generator, dtype=torch.float64)}
        | {LOSS: torch.tensor(losses[client], dtype=torch.float64)}
        for client in range(5)
    }
    there = [client for client in uploads if client != failed]
    factors = np.array([losses[client] + 1e-10 for client in there], dtype=np.longdouble) ** q
    own = {"samples": SAMPLES.numpy()[there], "equal": np.ones(len(there)),
           "own": [float(uploads[client]["w"]) for client in there]}  # fmt: skip
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        fair = FairFactors(Fairness("q", q), server())
        added = Aggregator(Weighted.uploads, [*range(5)], SAMPLES, LAYOUT, fair=fair)
        for client in order:
            assert not added.put(client, None if client == failed else uploads[client])
        total = added.total()
        for name in Weighted.uploads:
            xs = np.array([uploads[client][name].numpy() for client in there])
            expected = np.average(xs, axis=0, weights=np.asarray(own[name]) * factors).astype(float)
            np.testing.assert_allclose(total[name], expected, rtol=0, atol=1e-12)
        scale = np.average(factors, weights=own["samples"])  # weights remain of the size of the clients' own
        np.testing.assert_allclose(float(total.weight("own")), float((own["own"] * factors).sum() / scale), rtol=1e-9)


def test_clients_that_join_bring_their_share_of_the_mixture() -> None:
    kept = torch.tensor([0.0, 0.25, 0.75], dtype=torch.float64)
    fair = FairFactors(Fairness("afl", 0.1), server({MIXTURE: kept}))
    torch.testing.assert_close(fair._mixture, torch.tensor([0, 0.15, 0.45, 2 / 15, 4 / 15], dtype=torch.float64))


def test_a_round_of_clients_without_weight_changes_nothing_and_lambda_still_climbs() -> None:
    simulation = make_simulation("fedavg", fairness="afl:0.01", **{**SMALL, "participation": 2})
    loop = simulation.loop
    participants = loop.call(1)
    mixture = torch.ones(6, dtype=torch.float64)
    mixture[participants] = 0
    loop.server.state[MIXTURE] = mixture / mixture.sum()
    before = loop.server.state["theta"].clone()
    with pytest.warns(UserWarning, match=r"Round 1 changes nothing, as fairness afl:0\.01 gives none of its"):
        loop.round(1, simulation.sites)
    assert torch.equal(loop.server.state["theta"], before)
    assert not loop.versions
    assert (loop.server.state[MIXTURE][participants] > 0).all()


# --- engines, kills, bad numbers ---


@pytest.mark.parametrize("fairness", ["q:2", "afl:0.05"])
@pytest.mark.parametrize("method", ["fedavg", "ditto", "pfedmb"])
def test_the_same_bits_on_every_engine_and_after_a_resume(method: str, fairness: str, tmp_path: Path) -> None:
    settings = {**SMALL, "fairness": fairness}
    reference = ft.run(method, engine="in-process", **settings)
    for engine in ("processes", "sites-in-memory"):
        other = ft.run(method, engine=engine, workers=2, **settings)
        assert numbers(other.rounds) == numbers(reference.rounds)
        assert_same(final(other), final(reference))
    ft.run(method, engine="in-process", out=tmp_path / "run", **{**settings, "rounds": 1})
    resumed = ft.resume(tmp_path / "run", rounds=3)
    assert numbers(resumed.rounds) == numbers(reference.rounds)
    assert_same(final(resumed), final(reference))


def test_clients_that_train_together_have_the_same_losses() -> None:
    data = digits([30] * 4)
    alone, stacked = (
        ft.run("fedavg", data=data, rounds=2, stack=n, fairness="q:2", engine="in-process") for n in (1, 4)
    )
    torch.testing.assert_close(stacked.server_state["theta"], alone.server_state["theta"], rtol=0, atol=1e-5)


def negative(outputs: Tensor, targets: Tensor) -> Tensor:
    return -torch.nn.functional.cross_entropy(outputs, targets)


def test_a_negative_loss_is_a_failure_of_its_client() -> None:
    data = digits([30] * 2)
    with pytest.raises(ft.FedtailorError, match=r"its loss is -2\.\d+, and fairness takes losses of at least 0 alone"):
        ft.run("fedavg", data=data, rounds=1, fairness="q:1", loss=negative, on_failure="stop", lr=1e-6)


# --- what is refused ---


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"privacy": "client, clip=1, noise=1"}, "each client's own loss at the server, which --privacy promises"),
        ({"privacy": "sample, clip=1, noise=1"}, "each client's own loss at the server, which --privacy promises"),
        ({"secure": True}, "each client's own loss at the server, which --secure promises"),
        ({"aggregation": "median"}, "the rule median is for clients that lie"),
        ({"aggregation": "norm-bound:1.0"}, "the rule norm-bound:1.0 is for clients that lie"),
    ],
    ids=str,
)
def test_runs_in_which_losses_are_hidden_or_not_believed_are_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ft.FedtailorError, match=why) as refused:
        ft.run("fedavg", fairness="q:1", **more, **SMALL)
    assert str(refused.value).count(".") - str(refused.value).count("1.0") == 1
