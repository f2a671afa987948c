"""FedAvg+FT: FedAvg under the evaluation's own fine-tuning, by its name."""

from typing import Any

import pytest
import torch

import fedtailor as ft
from fedtailor.methods import find_method
from tests.helpers import assert_same, final
from tests.methods.parts import normed, server
from tests.methods.problems import MOMENTUM, SMALL, close, on_a_network, who
from tests.reference.batches import batches
from tests.reference.fedavg import SlowFedAvg
from tests.reference.sgd import descend


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}, {"steps": 7, "schedule": "cosine"}])
@pytest.mark.parametrize("epochs", [None, 0, 2])
def test_it_is_fedavg_with_the_evaluations_fine_tuning(epochs: int | None, more: dict[str, Any]) -> None:
    how = {**SMALL, **more}
    named = ft.run("fedavg-ft", **how, **({} if epochs is None else {"tuning_epochs": epochs}))
    average = ft.run("fedavg", **how, fine_tune=5 if epochs is None else epochs)
    assert named.clients == average.clients
    assert_same(final(named), final(average))
    for client in range(2):
        assert torch.equal(named.personal_vector(client), average.personal_vector(client))
    assert (named.accuracy == ft.run("fedavg", **how).accuracy) == (epochs == 0)


def test_a_slow_version_comes_to_the_same_vectors() -> None:
    result, problem = on_a_network(find_method("fedavg-ft", {"tuning_epochs": 3}))
    slow = SlowFedAvg(problem, {"lr": 0.2})
    for number, participants in enumerate(who(result), 1):
        slow.round(number, participants)
    close(server(result), slow.glob)
    for client, n in enumerate(problem.samples):
        drawn = batches(n, 29, 0, client, purpose="fine-tuning", epochs=3, batch=5, drop_last=True)
        own, _ = descend(lambda at, batch, i=client: problem.slope(i, at, batch)[1], slow.glob, drawn, lr=0.2)  # type: ignore[misc]
        close(result.personal_vector(client), own)


def test_clients_keep_nothing_and_the_global_model_is_fedavgs() -> None:
    named = ft.run("fedavg-ft", **SMALL, evaluation={"model": "global"})
    assert named.clients == ft.run("fedavg", **SMALL).clients
    assert not any(named.client_state(client) for client in range(6))
