"""FedProto against its slow reference, its limit cases, its errors, and its personal model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor.methods.fedproto import FedProto
from tests.helpers import assert_same, digits, final
from tests.methods.parts import SMALL, normed, personal, server, state
from tests.methods.problems import (
    BODY,
    EXACT,
    MOMENTUM,
    OWN,
    close,
    features,
    on_a_network,
    own_label_clients,
    watched,
    who,
)  # fmt: skip
from tests.reference.fedproto import SlowFedProto


@pytest.mark.parametrize(("lam", "weighting"), [(2.0, "samples"), (2.0, "clients"), (0.0, "samples")])
def test_follows_its_formulas(lam: float, weighting: Any) -> None:
    """Training, prototypes, and the nearest of them: it is one vector, with a score for each class."""
    result, problem = on_a_network(FedProto(lam=lam, weighting=weighting))
    samples = [result.data.client(client).train for client in range(6)]
    labels = [y for _, y in samples]
    slow = SlowFedProto(problem, lambda i, at: features(samples[i][0], at), labels, lam, weighting == "samples", 0.2)
    slow.run(who(result))
    assert len(slow.own) > 3
    assert 5 < len(slow.prototypes) <= 10
    assert server(result, "known")[:, 0].nonzero()[:, 0].tolist() == sorted(slow.prototypes)
    for c, prototype in slow.prototypes.items():
        close(server(result, "prototypes")[c], prototype)
    for i, theta in slow.own.items():
        close(state(result, i)["theta"], theta)
        z = features(samples[i][0], theta)
        scores = z @ personal(result, i)[BODY : BODY + 60].view(10, 6).T + personal(result, i)[BODY + 60 :]
        close(personal(result, i)[:BODY], theta[:BODY])
        for k in range(len(z)):
            away = slow.distances(z[k])
            assert int(scores[k].argmax()) == min(away, key=lambda c: away[c])
            for c, distance in away.items():
                close(z[k] @ z[k] - scores[k, c], torch.tensor(distance, dtype=torch.float64))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}, {"label_smoothing": 0.1}])
def test_without_prototypes_it_is_local(more: dict[str, Any]) -> None:
    mine, local = ft.run("fedproto", **{**SMALL, **more}, lam=0.0, own_head=True), ft.run("local", **{**SMALL, **more})
    for client in range(5):
        assert torch.equal(personal(mine, client), personal(local, client))
    drawn = ft.run("fedproto", **{**SMALL, **more}, own_head=True)
    assert any(not torch.equal(personal(drawn, client), personal(local, client)) for client in range(5))


def test_before_there_are_prototypes_it_trains_as_local() -> None:
    for rounds, same in ((1, True), (2, False)):
        how = {**SMALL, "dtype": "float64", "rounds": rounds, "participation": "all"}
        mine, local = ft.run("fedproto", **how), ft.run("local", **how)
        away = max(float((state(mine, client)["theta"] - personal(local, client)).abs().max()) for client in range(5))
        assert (away < 1e-12) == same


def test_features_of_a_class_come_together() -> None:
    """The larger λ is, the nearer are clients' means of the same class."""
    spread = []
    for lam in (0.0, 1.0, 30.0):
        method, log = watched(FedProto, lam=lam)
        ft.run(method, **{**SMALL, "rounds": 6, "participation": "all"})
        P = torch.stack([log.up[6, client]["prototypes"] for client in range(5)])
        there = torch.stack([log.up[6, client]["counts"] for client in range(5)]) > 0
        mean = (P * there).sum(0) / there.sum(0).clamp(min=1)
        spread.append(float(((P - mean) * there).square().sum()))
    assert spread[0] > 1.2 * spread[1] > 1.2**2 * spread[2]


def test_a_class_that_nobody_has_had_is_never_predicted() -> None:
    """Not by a client that has it in its test data, and not before the first round, when all classes are alike."""
    x, y = digits([600])[0]
    data = [(x[y % 5 != i], y[y % 5 != i]) for i in (0, 1)]
    method = FedProto()
    result = ft.run(method, data=data, model="mlp:8", rounds=1, engine="in-process", participation=1)
    (trained,) = who(result)[0]
    lacks = {trained, trained + 5}
    assert lacks.isdisjoint(result.data.train(trained)[1].tolist())
    scores = result.simulation.predict(1 - trained, x)
    assert lacks.isdisjoint(scores.argmax(1).tolist())
    assert (scores[:, sorted(lacks)] < -1e20).all()
    assert result.rounds[-1].loss is not None
    side = result.simulation.server
    method.start(side)
    client = result.simulation.sites.site(0).client(1, {})
    assert len(set(method.personal_model(client, method.broadcast(side))[-10:].tolist())) == 1


def test_prototypes_stay_where_nobody_of_a_round_has_the_class() -> None:
    x, y = digits([300])[0]
    data = [(x[y < 5], y[y < 5]), (x[y >= 5], y[y >= 5])]
    method, log = watched(FedProto)
    result = ft.run(method, data=data, model="mlp:8", rounds=6, engine="in-process", participation=1)
    assert len({tuple(called) for called in who(result)}) == 2
    for number, (client,) in enumerate(who(result)[1:], 2):
        before, after = log.server[number - 1]["prototypes"], log.server[number]["prototypes"]
        others = slice(5, 10) if client == 0 else slice(0, 5)
        assert torch.equal(before[others], after[others])
    assert (server(result, "known") == 1).all()


def test_prototypes_are_those_of_the_model_as_it_predicts() -> None:
    """With BatchNorm, by its buffers."""
    data = digits([50, 40])
    result = ft.run("fedproto", **EXACT, data=data, model=normed(), rounds=2)
    sums, counts = torch.zeros(10, 8, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)
    for client in range(2):
        module, (x, y) = normed().double(), result.data.client(client).train
        module.load_state_dict(result.simulation.terms.network.state_dict(state(result, client)["theta"]))
        module.eval()
        sums.index_add_(0, y, module[:4](x).detach())  # type: ignore[index]
        counts += y.bincount(minlength=10)
    close(server(result, "prototypes"), sums / counts.clamp(min=1)[:, None])


def test_the_nearest_prototype_is_a_model_that_can_be_exported(tmp_path: Path) -> None:
    result = ft.run("fedproto", **SMALL)
    ft.export(result, client=2, to=tmp_path)
    x, y = result.data.test(2)
    (path,) = tmp_path.glob("*.safetensors")
    assert ft.predict(path, x).accuracy is None
    assert torch.equal(ft.predict(path, x).outputs.argmax(1), result.simulation.predict(2, x).argmax(1))
    hits = (ft.predict(path, x).outputs.argmax(1) == y).double().mean().item()
    assert result.per_client[2].accuracy == pytest.approx(hits)


def test_a_new_client_gets_the_prototypes_on_the_initial_body() -> None:
    result = ft.run("fedproto", **{**SMALL, "new_clients": 1})
    new, side = result.data.n_clients - 1, result.simulation.server
    theta = personal(result, new)
    assert torch.equal(theta[side.body], side.initial[side.body])
    assert torch.equal(theta[side.head][:160].view(10, 16), 2 * server(result, "prototypes"))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10), nn.Linear(10, 10))


def unbiased() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10, bias=False))


def rectified() -> nn.Module:
    return nn.Sequential(*two_layers(), nn.ReLU())


@pytest.mark.parametrize(
    "settings", [{"head": 0}, {"model": two_layers(), "head": 2}, {"model": unbiased()}, {"model": rectified()}]
)
def test_a_head_that_is_not_one_linear_layer_is_refused_before_the_first_round(settings: dict[str, Any]) -> None:
    with pytest.raises(ft.FedtailorError, match="FedProto needs a head that is one linear layer with a bias"):
        ft.run("fedproto", **{**SMALL, **settings})


def test_a_network_that_is_one_linear_layer_shares_means_of_its_inputs() -> None:
    data = digits([60, 60])
    result = ft.run("fedproto", data=data, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), **EXACT, rounds=2)
    (x, y), (others, labels) = (result.data.client(client).train for client in range(2))
    every, classes = torch.cat([x, others]).flatten(1), torch.cat([y, labels])
    for c in range(10):
        close(server(result, "prototypes")[c], every[classes == c].mean(0))


@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_targets_that_are_not_one_class_a_sample_are_refused(loss: str) -> None:
    data = [(x, (x.flatten(1)[:, 20:22] > 0.2).float()) for x, _ in digits([20, 30])]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with pytest.raises(ft.FedtailorError, match="its targets must be one class label per sample"):
        ft.run("fedproto", data=data, model=model, loss=loss, rounds=1, engine="in-process", on_failure="stop")


def test_labels_that_every_client_numbers_for_itself_are_refused() -> None:
    """Also where the data come so and the setting does not say it."""
    sentence = r"FedProto cannot train with labels own: .*; leave it out, or take another method\.$"
    with pytest.raises(ft.FedtailorError, match=sentence):
        ft.run("fedproto", data=own_label_clients(), **OWN)
    made = ft.run("fedavg", data=own_label_clients(), **OWN).data
    with pytest.raises(ft.FedtailorError, match=sentence):
        ft.run("fedproto", data=made, **{**OWN, "labels": "shared"})


def test_weights_by_clients_are_those_of_equal_counts() -> None:
    x, y = digits([800])[0]
    each = torch.cat([(y == c).nonzero()[:12, 0] for c in range(10)])
    data = [(x[each], y[each]), (1 - x[each], y[each])]
    how: dict[str, Any] = {**EXACT, "data": data, "model": "mlp:6", "rounds": 3}
    one, other = (ft.run("fedproto", **how, weighting=weighting) for weighting in ("samples", "clients"))
    close(server(one, "prototypes"), server(other, "prototypes"))
    assert one.server_state.keys() == other.server_state.keys()
    assert_same(final(one), final(ft.run("fedproto", **how)))
