"""Random streams: what a client draws depends on the seed, the round and the client, and on nothing else."""

import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.training.streams import numpy_stream, torch_stream
from tests.helpers import assert_same, final


def test_streams_are_told_apart_by_their_keys() -> None:
    keys = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 1), (0, "a", 0, 1), (0, "a", 1, 0)]
    draws = {tuple(torch.rand(4, generator=torch_stream(*key)).tolist()) for key in keys}
    assert len(draws) == len(keys)
    assert len({tuple(numpy_stream(*key).random(4)) for key in keys}) == len(keys)
    one, two = (torch.rand(4, generator=torch_stream(5, "x", 2)) for _ in range(2))
    assert torch.equal(one, two)


class Dropping(nn.Module):
    """Dropout draws from PyTorch's own generator, in whatever process the client happens to run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_dropout_is_the_same_on_every_engine_and_whatever_was_drawn_before() -> None:
    settings = {"data": "digits", "clients": 4, "rounds": 2, "model": Dropping}
    torch.manual_seed(1)
    one = ft.run("ditto", engine="in-process", **settings)
    torch.manual_seed(2)
    torch.rand(3)
    two = ft.run("ditto", engine="processes", workers=2, **settings)
    assert_same(final(one), final(two))
    other = ft.run("ditto", engine="in-process", seed=1, **settings)
    assert not torch.equal(final(one)["server/theta"], final(other)["server/theta"])


def test_a_run_leaves_the_callers_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    ft.run("fedavg", data="digits", clients=3, rounds=1, engine="in-process", model=Dropping)
    assert torch.equal(torch.rand(3), expected)


def test_the_children_of_a_stream_are_those_of_its_key_and_a_number() -> None:
    """A split takes the streams of all clients from one: the same, whether a client is split alone or with others."""
    stream = numpy_stream(5, "partition", "split")
    for client in range(3):
        (child,) = stream.spawn(1)
        assert child.random(4).tolist() == numpy_stream(5, "partition", "split", client).random(4).tolist()
