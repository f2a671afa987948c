"""Outputs of few samples do not depend on how many are measured together."""

import torch
from torch import nn

from fedtailor.training.network import Network
from fedtailor.training.predictions import ROWS, outputs, padded


def test_outputs_of_few_samples_are_those_among_many() -> None:
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)))
    theta, x = network.vector.clone(), torch.randn(120, 784)
    whole = outputs(network, theta, x)
    for few in range(1, 40):
        assert torch.equal(outputs(network, theta, x[5 : 5 + few].clone()), whole[5 : 5 + few]), few


def test_few_samples_are_filled_up_with_the_last_one() -> None:
    x = torch.arange(3.0)[:, None]
    assert padded(x)[:, 0].tolist() == [0.0, 1.0, *[2.0] * (ROWS - 2)]
    assert len(padded(torch.zeros(ROWS + 1, 1))) == ROWS + 1


def test_no_samples_have_no_outputs() -> None:
    network = Network(nn.Linear(3, 2))
    assert len(outputs(network, network.vector.clone(), torch.zeros(0, 3))) == 0
