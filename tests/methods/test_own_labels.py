"""Clients with labels of their own: a personal head has as many outputs as its client has classes."""

import pytest
import torch

import fedtailor as ft
from tests.methods.problems import OWN, own_label_clients


@pytest.mark.parametrize("method", ["pflego", "fedper", "fedrep", "fedrecon", "fedas"])
def test_outputs_that_a_client_does_not_have_take_no_part(method: str) -> None:
    """Their weights stay where they began, and no sample is taken for one of them."""
    result = ft.run(method, data=own_label_clients(), **OWN)
    server = result.simulation.server
    assert tuple(result.data.client(client).n_classes for client in range(3)) == (2, 2, 5)
    first = server.initial[server.head]
    for client, own in ((0, 2), (2, 5)):
        moved = result.personal_vector(client)[server.head] != first
        assert moved[:40].view(5, 8).any(1).tolist() == [row < own for row in range(5)]
        assert not moved[40:][own:].any()
    x, y = result.data.client(0).test
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
    module.load_state_dict(result.personal(0))
    hits = (module(x)[:, :2].argmax(1) == y).double().mean().item()
    assert result.per_client[0].accuracy == pytest.approx(hits)


def test_a_shared_head_keeps_all_outputs() -> None:
    """As in the PFLEGO paper, where FedAvg's last layer has as many outputs as the largest client has classes."""
    result = ft.run("fedavg", data=own_label_clients(), **OWN)
    x, y = result.data.client(0).test
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
    module.load_state_dict(result.personal(0))
    assert result.per_client[0].loss == pytest.approx(torch.nn.functional.cross_entropy(module(x), y).item(), rel=1e-5)
