"""How a class of the user's own is called, and what is said of outputs that do not fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.models import build_model
from tests.helpers import digits

SHAPE = (3, 8, 8)


class Said(nn.Linear):
    """Remembers how it was called."""

    def __init__(self, *said: Any) -> None:
        super().__init__(2, 2)
        self.said = said


def positional(shape: Any, classes: Any, width: int = 5) -> nn.Module:
    return Said(shape, classes, width)


def whole(input_shape: Any, *, num_classes: Any) -> nn.Module:
    return Said(input_shape, num_classes)


def features(hidden: int = 7, *, in_features: int, n_classes: int) -> nn.Module:
    return Said(hidden, in_features, n_classes)


def channels(num_classes: int, in_channels: int = 1) -> nn.Module:
    nn.Linear(2, num_classes)  # a shape in its place fails
    return Said(num_classes, in_channels)


def classes_alone(num_classes: int) -> nn.Module:
    return Said(num_classes)


def tokens(vocab_size: int, output_dim: int, *, width: int = 3) -> nn.Module:
    nn.Embedding(vocab_size, width)
    return Said(vocab_size, output_dim, width)


def nothing(width: int = 5) -> nn.Module:
    return Said(width)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (positional, (SHAPE, 4, 5)),
        (whole, (SHAPE, 4)),
        (features, (7, 192, 4)),
        (channels, (4, 3)),
        (classes_alone, (4,)),
        (tokens, (50, 4, 3)),
        (nothing, (5,)),
        (lambda: Said("nothing"), ("nothing",)),
    ],
)
def test_a_factory_is_called_in_the_first_way_that_it_takes(factory: Callable[..., nn.Module], said: Any) -> None:
    made = build_model(factory, SHAPE, 4, 0, tokens=50)
    assert isinstance(made, Said)
    assert made.said == said


def test_without_tokens_no_size_of_a_vocabulary_is_made_up() -> None:
    with pytest.raises(ft.FedtailorError, match=r"tokens\(output_dim=4\) does not fit \(missing a req.*'vocab_size'\)"):
        build_model(tokens, SHAPE, 4, 0)


class Fussy(nn.Module):
    """Draws random numbers before it fails."""

    def __init__(self, num_classes: Any, in_channels: Any = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        if isinstance(num_classes, tuple):
            raise TypeError("a number, please")


def test_calls_that_failed_leave_no_trace_in_the_initial_values() -> None:
    tried, direct = build_model(Fussy, SHAPE, 4, 7), build_model(lambda: Fussy(4), SHAPE, 4, 7)
    assert isinstance(tried, Fussy)
    assert isinstance(direct, Fussy)
    assert torch.equal(tried.layer.weight, direct.layer.weight)


class Few(nn.Module):
    def __init__(self, outputs: int, several: bool = False) -> None:
        super().__init__()
        self.layer, self.several = nn.Linear(64, outputs), several

    def forward(self, x: Tensor) -> Any:
        out = self.layer(x)
        return (out, x) if self.several else out


def test_too_few_outputs_are_told_in_numbers() -> None:
    """Whatever the labels of the first samples are."""
    data = digits([40, 40])
    zeros = data[0][1].sort(stable=True).indices
    data[0] = (data[0][0][zeros], data[0][1][zeros])
    settings: dict[str, Any] = {"rounds": 1, "engine": "in-process"}
    with pytest.raises(ft.FedtailorError, match=r"^The model gives 5 outputs, but there are 10 classes: "):
        ft.run("fedavg", data=data, model=Few(5), **settings)
    with pytest.raises(ft.FedtailorError, match="The model returns a tuple, but it must return one tensor"):
        ft.run("fedavg", data=data, model=Few(10, several=True), **settings)
    ft.run("fedavg", data=data, model=Few(12), **settings)  # more do no harm
