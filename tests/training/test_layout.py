"""Where the parts of a network lie in its vector."""

import pytest
import torch
from torch import nn

from fedtailor.models import CATALOGUE, build_model
from fedtailor.training.layout import Layout
from fedtailor.training.network import Network
from tests.helpers import fitting_shape

LAYOUT = Layout(
    size=10,
    body=slice(0, 7),
    head=slice(7, 10),
    layers={"a": slice(0, 3), "norm": slice(3, 7), "b": slice(7, 10)},
    norm_layers=(slice(3, 7),),
    buffers=(slice(4, 6), slice(6, 7)),
)
PLAIN = Layout(3, slice(0, 3), slice(3, 3), {"a": slice(0, 3)})


def test_buffers_are_left_out_of_lengths_and_angles() -> None:
    vector, rows = torch.arange(1.0, 11.0), torch.arange(1.0, 21.0).view(2, 10)
    before = vector.clone()
    assert LAYOUT.without_buffers(vector).tolist() == [1, 2, 3, 4, 0, 0, 0, 8, 9, 10]
    assert LAYOUT.without_buffers(rows)[:, 4:7].tolist() == [[0, 0, 0]] * 2
    assert LAYOUT.without_buffers(rows)[:, :4].tolist() == rows[:, :4].tolist()
    assert torch.equal(vector, before)
    assert PLAIN.without_buffers(vector[:3]).tolist() == [1, 2, 3]


def test_buffers_are_copied_in_place() -> None:
    to, source = torch.zeros(10), torch.arange(1.0, 11.0)
    assert LAYOUT.copy_buffers(to, source) is to
    assert to.tolist() == [0, 0, 0, 0, 5, 6, 7, 0, 0, 0]
    rows = LAYOUT.copy_buffers(torch.zeros(2, 10), source)
    assert rows[1].tolist() == to.tolist()
    assert PLAIN.copy_buffers(torch.zeros(3), torch.ones(3)).sum() == 0


@pytest.mark.parametrize(
    ("part", "inside"),
    [
        (slice(0, 10), [slice(4, 6), slice(6, 7)]),
        (slice(0, 7), [slice(4, 6), slice(6, 7)]),
        (slice(7, 10), []),
        (slice(0, 4), []),
        (slice(6, 10), [slice(6, 7)]),
        (slice(7, 7), []),
    ],
)
def test_buffers_inside_a_part(part: slice, inside: list[slice]) -> None:
    assert LAYOUT.buffers_in(part) == inside


def test_one_value_a_layer_is_repeated_for_its_entries() -> None:
    assert LAYOUT.spread(torch.tensor([1, 2, 3])).tolist() == [1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert LAYOUT.spread(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [
        [1, 1, 1, 2, 2, 2, 2, 3, 3, 3],
        [4, 4, 4, 5, 5, 5, 5, 6, 6, 6],
    ]
    assert LAYOUT.spread(torch.tensor([[7], [8]])).tolist() == [[7], [8]]  # one for all layers stays one


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_layers_of_a_network_cover_its_vector(name: str) -> None:
    layout = Network(build_model(name, fitting_shape(name), 10, 0)).layout
    ends = [place.stop for place in layout.layers.values()]
    assert [place.start for place in layout.layers.values()] == [0, *ends[:-1]]
    assert ends[-1] == layout.size
    assert (layout.body.start, layout.body.stop, layout.head.stop) == (0, layout.head.start, layout.size)
    assert all(place in layout.layers.values() for place in layout.norm_layers)
    for place in layout.buffers:
        assert any(norm.start <= place.start and place.stop <= norm.stop for norm in layout.norm_layers)


def test_a_network_knows_its_normalisation_layers_of_every_kind() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    layout = Network(module).layout
    assert layout.norm_layers == tuple(layout.layers[name] for name in "123")
    assert sum(place.stop - place.start for place in layout.buffers) == 4 + 4 + 1
