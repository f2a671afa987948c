"""Clients with labels of their own: a personal head has as many outputs as its client has classes."""

from typing import Any

import pytest
import torch

import fedtailor as ft
from tests.helpers import digits

SMALL: dict[str, Any] = {"model": "mlp:8", "rounds": 3, "epochs": 2, "labels": "own", "engine": "in-process", "seed": 2}


def clients() -> list[Any]:
    """Two clients with the digits 0 and 1, one with 2 to 6."""
    pool = digits([400])[0]
    chosen = [torch.isin(pool[1], torch.tensor(labels)) for labels in ([0, 1], [0, 1], [2, 3, 4, 5, 6])]
    return [(pool[0][mask][:40], pool[1][mask][:40]) for mask in chosen]


@pytest.mark.parametrize("method", ["pflego", "fedper"])
def test_outputs_that_a_client_does_not_have_take_no_part(method: str) -> None:
    """Their weights stay where they began, and no sample is taken for one of them."""
    result = ft.run(method, data=clients(), **SMALL)
    run = result._federation
    assert run.data.own_classes == (2, 2, 5)
    first = run.server.initial[run.server.head]
    for client, own in ((0, 2), (2, 5)):
        head = run.states.get(f"client-{client}")["head"]
        weights, bias = head[:40].view(5, 8), head[40:]
        assert torch.equal(weights[own:], first[:40].view(5, 8)[own:])
        assert torch.equal(bias[own:], first[40:][own:])
        assert not torch.equal(weights[:own], first[:40].view(5, 8)[:own])
    x, y = run.data.test(0)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
    module.load_state_dict(result.personal(0))
    hits = (module(x)[:, :2].argmax(1) == y).double().mean().item()
    assert result.per_client[0]["accuracy"] == pytest.approx(hits)


def test_a_shared_head_keeps_all_outputs() -> None:
    """As in the PFLEGO paper, where FedAvg's last layer has as many outputs as the largest client has classes."""
    result = ft.run("fedavg", data=clients(), **SMALL)
    run = result._federation
    x, y = run.data.test(0)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
    module.load_state_dict(result.personal(0))
    assert result.per_client[0]["loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(module(x), y).item(), rel=1e-5
    )
