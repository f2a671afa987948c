"""The server's side of a method: what it keeps of clients, and replies as matrices."""

import pytest
import torch
from torch import Tensor

from fedtailor import method
from fedtailor.method import Replies, Server
from fedtailor.store import States


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.arange(3),
        torch.tensor([True, False]),
        torch.rand(2, 3, dtype=torch.float64),
        torch.rand(5).bfloat16(),
        torch.rand(2, 0),
        torch.rand(4, 6).T,
    ],
)
def test_replies_are_stacked_in_the_order_of_clients(tensor: Tensor) -> None:
    found = Replies({2: {"t": tensor}, 0: {"t": ~tensor if tensor.dtype == torch.bool else tensor * 2}}, torch.ones(3))
    stacked = found.stack("t")
    expected = torch.stack([found[0]["t"], tensor])
    assert stacked.dtype == expected.dtype
    assert torch.equal(stacked, expected)
    assert stacked.data_ptr() % 64 == 0  # as PyTorch's own memory
    assert stacked.is_contiguous()


@pytest.mark.parametrize("block", [1, 8, 1000])  # numbers
def test_what_is_kept_of_clients_is_mixed_in_blocks_of_any_size(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method, "BLOCK", block)
    models, initial = torch.rand(5, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    server = Server(initial, slice(0, 4), slice(4, 4), {}, torch.ones(5), 2.0, store=States(None))
    for client in (0, 2, 4):
        server.keep(client, {"w": models[client]})
    models[[1, 3]] = initial  # of these nothing is kept
    assert torch.equal(torch.cat([rows.clone() for _, rows in server.kept("w")]), models)
    assert torch.equal(torch.stack(server.kept_of([3, 0], "w")), models[[3, 0]])
    weights = torch.rand(2, 5, dtype=torch.float64)
    torch.testing.assert_close(server.mixed(weights, "w"), weights @ models)
