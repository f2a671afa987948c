"""The server's optimiser as a setting: what it moves, what stays as it is, and what is refused."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.experiment import Experiment
from fedtailor.method import Server, Total, Uploads
from fedtailor.methods import all_methods, find_method
from fedtailor.server.aggregation.server_optimizer import optimised
from fedtailor.training.optimizer import SERVER_LR, TAU
from tests.helpers import assert_same, digits, final, make_simulation, numbers
from tests.methods.parts import normed

SMALL: dict[str, Any] = {
    "data": "digits", "clients": 5, "max_train": 20, "model": "mlp:8", "rounds": 3, "epochs": 1, "participation": 3,
    "engine": "in-process",
}  # fmt: skip
OWN, USELESS = "its server takes a step of its own", "no mean of its uploads is a change of what the server broadcasts"
CLASSES = "class means are no parameters, which steps could improve"
NAMED = "it has one by its name"
REFUSED = {
    **dict.fromkeys(("pflego", "scaffold", "fedrecon", "feddyn", "fednova"), OWN),
    **dict.fromkeys(("local", "pgfed-ce", "fedacs", "fedamp", "fedfomo", "pfedsim", "pfedgraph"), USELESS),
    **dict.fromkeys(("fedcac", "cfl"), USELESS),
    **dict.fromkeys(("fedproto", "fedpac", "pfedfda"), CLASSES),
    **dict.fromkeys(("fedavgm", "fedadagrad", "fedyogi", "fedadam"), NAMED),
}
MOVED = {"lg-fedavg": ["shared"], "fedbn": ["shared"], "pfedmb": ["W"], "fedcp": ["body", "head", "policy"],
         "gpfl": ["body", "guide"]}  # fmt: skip
BODIES = ("fedper", "fedrep", "fedbabu", "fedas")


@pytest.mark.parametrize("method", all_methods())
def test_every_method_takes_it_or_says_why_not(method: str) -> None:
    if method in REFUSED:
        with pytest.raises(ft.FedtailorError, match=REFUSED[method]) as refused:
            make_simulation(method, server_optimizer="momentum", **SMALL)
        assert str(refused.value).endswith(".")
        return
    found = ft.run(method, server_optimizer="momentum", **SMALL)
    plain = ft.run(method, **SMALL)
    names = MOVED.get(method, ["body" if method in BODIES else "theta"])
    assert found.server_state.keys() - plain.server_state.keys() == {f"{name}/mean" for name in names}
    assert all(found.server_state[f"{name}/mean"].abs().max() > 0 for name in names)
    assert all(t.isfinite().all() for t in final(found).values() if t.is_floating_point())
    for name in ["theta"] if method == "lg-fedavg" else names:
        assert not torch.equal(found.server_state[name], plain.server_state[name])


@pytest.mark.parametrize("method", ["fedavg", "ifca", "fedper"])
def test_by_default_nothing_changes(method: str) -> None:
    plain = ft.run(method, **SMALL)
    told = ft.run(method, server_optimizer="sgd", server_lr=1.0, **SMALL)
    assert plain.clients == told.clients
    assert_same(final(plain), final(told))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"aggregation": "median"},
        {"aggregation": "norm-bound:0.1"},
        {"privacy": "client, clip=0.5, noise=0.1"},
        {"privacy": "client, clip=0.5, noise=0.1, by=clients"},
    ],
    ids=str,
)
def test_it_moves_along_what_was_aggregated(more: dict[str, Any]) -> None:
    """Half a step of plain SGD ends half way to the mean, median or private mean."""
    how = {**SMALL, **more, "rounds": 1, "dtype": "float64"}
    half, whole = (ft.run("fedavg", server_lr=rate, **how).simulation.server for rate in (0.5, 1.0))
    expected = (half.initial + whole.state["theta"]) / 2
    assert not torch.equal(expected, half.initial)
    torch.testing.assert_close(half.state["theta"], expected, rtol=0, atol=1e-14)


def test_the_guard_of_the_mean_comes_before_it() -> None:
    class Clumsy(ft.Method):
        """FedAvg in which the last client's second change is absurd."""

        def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
            return {"theta": client.descend(message["theta"]) * (1e9 if client.id == 4 and client.round == 2 else 1)}

    with pytest.warns(UserWarning, match="times as long as usual"):
        result = ft.run(Clumsy(), server_optimizer="adam", **{**SMALL, "participation": "all", "rounds": 2})
    moved = result.server_state["theta"] - result.simulation.server.initial
    assert moved.abs().max() < 1
    assert result.server_state["theta/square"].max() < 1


@pytest.mark.parametrize("kind", ["momentum", "adam"])
@pytest.mark.parametrize("method", ["fedavg", "fedper", "lg-fedavg"])
def test_the_same_bits_on_every_engine_and_after_a_resume(method: str, kind: Any, tmp_path: Path) -> None:
    settings = {**SMALL, "server_optimizer": kind, "parameters": {"warm_rounds": 1} if method == "lg-fedavg" else {}}
    reference = ft.run(method, **settings)
    for engine in ("processes", "sites-in-memory"):
        other = ft.run(method, **{**settings, "engine": engine, "workers": 2})
        assert numbers(other.rounds) == numbers(reference.rounds)
        assert_same(final(other), final(reference))
    ft.run(method, out=tmp_path / "run", **{**settings, "rounds": 2})
    resumed = ft.resume(tmp_path / "run", rounds=3)
    assert numbers(resumed.rounds) == numbers(reference.rounds)
    assert_same(final(resumed), final(reference))


def started(server: Server, method: str) -> Server:
    """A server on which the method has begun."""
    fresh = Server(server.initial, server.layout, server.n_samples, server.per_round)
    find_method(method).start(fresh)
    return fresh


@pytest.mark.parametrize(("method", "name"), [("fedavg", "theta"), ("fedper", "body"), ("fedbn", "shared")])
def test_buffers_stay_the_plain_mean(method: str, name: str) -> None:
    """After one round, BatchNorm's buffers are those of the mean, and no weight is that was trained."""
    how: dict[str, Any] = {"data": digits([30, 40, 20]), "model": normed(), "rounds": 1, "engine": "in-process"}
    plain = ft.run(method, **how)
    found = ft.run(method, server_optimizer="adam", **how).server_state[name]
    server, mean = plain.simulation.server, plain.server_state[name]
    before = find_method(method).broadcast(started(server, method))[name]
    fixed = torch.zeros(server.layout.size, dtype=torch.bool)
    for place in server.layout.buffers if method != "fedbn" else ():
        fixed[place] = True
    fixed = fixed[: len(mean)]
    assert bool(fixed.any()) == (method != "fedbn")  # where normalisation layers never leave
    assert torch.equal(found[fixed], mean[fixed])
    trained = ~fixed & (mean != before)
    assert trained.sum() > 100
    assert (found != mean)[trained].all()


def test_momentum_goes_on_with_the_head_when_the_warm_rounds_of_lg_fedavg_end() -> None:
    how = {**SMALL, "dtype": "float64", "server_optimizer": "momentum"}
    warm, after = (ft.run("lg-fedavg", warm_rounds=2, **{**how, "rounds": rounds}) for rounds in (2, 3))
    head = after.simulation.server.head
    before, velocity = warm.server_state["shared/mean"], after.server_state["shared/mean"]
    assert len(before) == len(warm.server_state["theta"])
    assert velocity.shape == before[head].shape
    moved = after.server_state["theta"] - warm.server_state["theta"]
    torch.testing.assert_close(moved[head], velocity, rtol=0, atol=1e-14)
    assert not moved[: head.start].any()
    plain = ft.run("lg-fedavg", warm_rounds=2, **{**how, "rounds": 2})
    assert_same(final(plain), final(warm))


class Clusters(ft.Method):
    """Two models; a client gives weight to one of them alone."""

    uploads: ClassVar[Uploads] = {"theta": ft.Mean("weight")}

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        raise NotImplementedError


@pytest.mark.parametrize("kind", [kind for kind in SERVER_LR if kind != "sgd"])
def test_a_tensor_that_nobody_trained_rests_and_so_do_its_moments(kind: Any) -> None:
    """In rounds 1 and 3 clients choose the first model, in round 2 the second one."""
    layout = make_simulation("fedavg", **SMALL).server.layout
    size = layout.size
    server = Server(torch.zeros(size), layout, torch.ones(3), 3.0, {"theta": torch.ones(2, size)})
    seen, experiment = [], Experiment(server_optimizer=kind)
    for chosen in ([1.0, 0.0], [0.0, 2.0], [3.0, 0.0]):
        weight = torch.tensor(chosen)[:, None]
        mean = torch.where(weight > 0, server.state["theta"] + 0.5, torch.zeros(2, size))
        total = Total([0], torch.ones(1), {"theta": mean}, {"theta": weight}, {})
        found = optimised(total, experiment, Clusters(), server)
        server.state["theta"] = torch.where(weight > 0, found["theta"], server.state["theta"])
        seen.append({name: tensor.clone() for name, tensor in server.state.items()})
    for name in seen[0]:
        first, second = zip(*((state[name][0], state[name][1]) for state in seen), strict=True)
        assert torch.equal(first[0], first[1]), name
        assert not torch.equal(first[1], first[2])
        rested = {"theta": 1.0, "theta/mean": 0.0, "theta/square": TAU**2}[name]
        torch.testing.assert_close(second[0], torch.full_like(second[0], rested))
        assert torch.equal(second[1], second[2])


class AlsoALoss(ft.Method):
    """FedAvg, and the mean of the clients' losses, which is no change of anything."""

    uploads: ClassVar[Uploads] = {"theta": ft.Mean("samples"), "loss": ft.Mean("samples")}

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        theta = client.descend(message["theta"])
        return {"theta": theta, "loss": client.loss(theta)}

    def upload_like(self, server: Server, client: int) -> ft.Message:
        return {"loss": server.initial[0]}

    def receive(self, server: Server, total: Total) -> None:
        server.state |= {"theta": total["theta"], "last": total["loss"]}


def test_means_that_are_no_changes_stay_as_they_are() -> None:
    how = {**SMALL, "rounds": 1}
    plain, found = ft.run(AlsoALoss(), **how), ft.run(AlsoALoss(), server_optimizer="adam", **how)
    assert torch.equal(plain.server_state["last"], found.server_state["last"])
    assert not torch.equal(plain.server_state["theta"], found.server_state["theta"])
    assert {name for name in found.server_state if name.startswith("loss")} == set()


class OnlyGradients(AlsoALoss):
    """What clients upload is no change of the server's tensor by its name."""

    uploads: ClassVar[Uploads] = {"gradient": ft.Mean("samples")}

    def broadcast(self, server: Server) -> ft.Message:
        return {"theta": server.state["theta"]}


@pytest.mark.parametrize("more", [{"server_optimizer": "yogi"}, {"server_lr": 0.5}])
def test_a_method_of_ones_own_with_nothing_to_move_is_refused_before_the_run(
    more: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ft.FedtailorError, match=f"OnlyGradients has no use for {next(iter(more))}.*{USELESS}"):
        ft.run(OnlyGradients(), out=tmp_path / "run", **SMALL, **more)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["scaffold", "fedrecon"])
def test_a_parameter_of_the_method_by_the_name_of_a_setting_is_the_methods(method: str) -> None:
    own = ft.run(method, server_lr=0.25, **{**SMALL, "rounds": 1})
    assert own.experiment.server_lr is None
    assert own.experiment.parameters["server_lr"] == 0.25
    with pytest.raises(ft.FedtailorError, match=f"cannot train with server_lr 0.25: {OWN}"):
        make_simulation(method, server_lr=0.25, **{**SMALL, "rounds": 1})


def test_pflego_keeps_the_adam_of_its_release() -> None:
    """It corrects its bias: the first step of any gradient is as long as the rate."""
    result = ft.run("pflego", server_optimizer="adam", joint_lr=0.01, **{**SMALL, "rounds": 1, "dtype": "float64"})
    assert result.experiment.server_optimizer == "sgd"
    server = result.simulation.server
    moved: Tensor = (server.state["body"] - server.initial[server.body]).abs()
    assert moved[moved > 0].median() == pytest.approx(0.01, rel=1e-3)
    assert find_method("pflego").refuses["server_optimizer"] == OWN
