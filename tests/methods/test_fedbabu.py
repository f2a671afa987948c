"""FedBABU against its slow reference, its limit cases, and what fine-tuning may not depend on."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.methods import CATALOGUE
from tests.helpers import assert_same, digits, final, numbers
from tests.methods.parts import SMALL, absent, close, first, normed, personal, run_parts, server, unequal_clients
from tests.methods.problems import MOMENTUM, OWN, own_label_clients, watched
from tests.reference.fedbabu import fedbabu, trained

PARTS = {"all": slice(0, 5), "head": slice(3, 5), "body": slice(0, 3)}


@pytest.mark.parametrize("tuned", ["all", "head", "body"])
def test_follows_its_formula(tuned: str) -> None:
    """The body moves under the first head and is averaged by samples; all clients then fine-tune for two steps."""
    data, centres, curvatures, samples = unequal_clients(4, 5)
    settings = {"epochs": 3, "rounds": 5, "participation": 2, "seed": 3, "momentum": 0.5, "keep_momentum": False}
    result = run_parts("fedbabu", data, 3, 2, tuning_epochs=2, tuned=tuned, **settings)

    def slope(i: int, theta: Tensor) -> Tensor:
        return curvatures[i] @ (theta - centres[i])

    rounds, sgd = [record.participants for record in result.rounds], {"lr": 0.1, "momentum": 0.5}
    theta = fedbabu(slope, rounds, samples, first(3, 2), body=3, steps=3, **sgd)
    assert 1 not in absent(result)
    close(server(result, "body"), theta[:3])
    for client in range(4):
        close(personal(result, client), trained(slope, client, theta, PARTS[tuned], 2, **sgd))


def test_the_head_stays_as_it_began_and_is_not_zero() -> None:
    result = ft.run("fedbabu", **SMALL, tuning_epochs=0, keep_momentum=True, momentum=0.5, weight_decay=0.1)
    run = result.simulation
    head = run.server.initial[run.server.head]
    assert head.abs().min() > 0
    for client in range(5):
        assert torch.equal(personal(result, client), torch.cat([server(result, "body"), head]))


def test_without_fine_tuning_it_is_the_global_model() -> None:
    mine = ft.run("fedbabu", **SMALL, tuning_epochs=0)
    shared = ft.run("fedbabu", **SMALL, evaluation={"model": "global"})
    assert mine.clients == shared.clients
    assert mine.accuracy != ft.run("fedbabu", **SMALL, tuning_epochs=3).accuracy


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_fine_tuning_is_the_evaluations_own(more: dict[str, Any]) -> None:
    settings = {**SMALL, **more, "steps": 7}  # steps of the training have no say in the fine-tuning
    mine = ft.run("fedbabu", **settings, tuning_epochs=2)
    other = ft.run("fedbabu", **settings, tuning_epochs=0, evaluation={"fine_tune": 2})
    assert mine.clients == other.clients
    assert_same(final(mine), final(other))


def test_five_epochs_by_default_as_in_the_release() -> None:
    other = ft.run("fedbabu", **SMALL, tuning_epochs=0, evaluation={"fine_tune": 5})
    assert ft.run("fedbabu", **SMALL).clients == other.clients


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_without_a_head_it_is_fedavg_fine_tuned(more: dict[str, Any]) -> None:
    mine = ft.run("fedbabu", **{**SMALL, **more}, head=0, tuning_epochs=1)
    average = ft.run("fedavg", **{**SMALL, **more}, evaluation={"fine_tune": 1})
    assert torch.equal(server(mine, "body"), server(average, "theta"))
    assert mine.clients == average.clients


def test_with_everything_in_the_head_only_fine_tuning_trains() -> None:
    result = ft.run("fedbabu", **SMALL, head=2, tuning_epochs=1)
    run = result.simulation
    assert result.rounds[-1].bytes_up == result.rounds[-1].bytes_down == 0
    tuned = run.sites.site(0).client(0, {}).descend(run.server.initial, epochs=1, purpose="fine-tuning")
    assert torch.equal(personal(result, 0), tuned)


def test_the_personal_model_depends_on_the_body_alone() -> None:
    """Not on the round, on momentum that is kept, or on whether the client ever took part; and it leaves no trace."""
    method = CATALOGUE["fedbabu"](tuning_epochs=2)
    run = ft.run(method, data=digits([40, 40]), rounds=2, engine="in-process", **MOMENTUM).simulation
    message, old = method.broadcast(run.server), run.state_of(0)
    before = {name: tensor.clone() for name, tensor in old.items()}
    assert before["momentum/theta"].any()
    site = run.sites.site(0)
    models = [method.personal_model(site.client(round, kept), message) for round, kept in ((1, {}), (2, {}), (2, old))]
    assert torch.equal(models[0], models[1])
    assert torch.equal(models[0], models[2])
    assert_same(old, before)


def test_an_orthogonal_head_has_orthogonal_rows_near_the_first_ones() -> None:
    result = ft.run("fedbabu", **SMALL, head_start="orthogonal", tuning_epochs=0)
    run = result.simulation
    first_head = run.server.initial[run.server.head]
    for client in range(5):
        head = personal(result, client)[run.server.head]
        weight, old = head[:160].view(10, 16).double(), first_head[:160].view(10, 16).double()
        close(weight @ weight.T, torch.eye(10, dtype=torch.float64), 1e-6)
        stretch = old @ weight.T  # the nearest one: what remains is symmetric and stretches only (polar form)
        close(stretch, stretch.T, 1e-6)
        assert torch.linalg.eigvalsh(stretch).min() > 0
        assert torch.equal(head[160:], first_head[160:])


def test_with_labels_of_its_own_a_client_is_measured_with_its_trained_body_under_all_outputs() -> None:
    """As in PFLEGO's release: one orthogonal head for all, with as many outputs as the largest client has classes, is
    never trained; a local model is the body after the client's own steps, under that head."""
    method, log = watched(CATALOGUE["fedbabu"], head_start="orthogonal", tuning_epochs=0)
    how = {**OWN, "evaluation": {"model": "local", "clients": "participants", "train": True}}
    result = ft.run(method, data=own_label_clients(), **how)
    heads = [personal(result, client)[-45:] for client in range(3)]
    weight, bias = heads[0][:40].view(5, 8), heads[0][40:]
    close(weight @ weight.T, torch.eye(5), 1e-6)
    assert torch.equal(bias, result.simulation.server.initial[-5:])
    for client in range(3):
        assert torch.equal(heads[client], heads[0])
        up = log.up[result.rounds[-1].round, client]
        assert up.keys() == {"body"}
        for split in ("train", "test"):
            x, y = getattr(result.data.client(client), split)
            hidden = (x.flatten(1) @ up["body"][: 64 * 8].view(8, 64).T + up["body"][64 * 8 :]).relu()
            expected = torch.nn.functional.cross_entropy(hidden @ weight.T + bias, y).item()
            assert result.clients[-1].results[client][split].loss == pytest.approx(expected, rel=1e-4)


def test_an_orthogonal_head_is_the_same_on_every_engine() -> None:
    one = ft.run("fedbabu", **SMALL, head_start="orthogonal")
    other = ft.run("fedbabu", **{**SMALL, "engine": "processes"}, workers=2, head_start="orthogonal")
    assert numbers(one.rounds) == numbers(other.rounds)
    assert_same(final(one), final(other))
    assert not torch.equal(server(one, "body"), server(ft.run("fedbabu", **SMALL), "body"))
