"""Frozen parts stay as they are: weights, buffers and mode."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fedtailor as ft
from fedtailor.methods import all_methods
from fedtailor.models.assembly import assemble
from fedtailor.training.network import Network
from tests.helpers import assert_same, final, numbers
from tests.models.nets import SMALL, Backbone, three_clients


def test_what_is_frozen_is_in_no_vector_and_does_not_change() -> None:
    start = Backbone()
    start.encoder[1].running_mean.normal_()
    result = ft.run("fedavg", data=three_clients(), model=start, frozen="encoder", **SMALL)
    network = result.simulation.terms.network
    assert network.layout.size == 12 * 10 + 10 == network.n_parameters
    assert network.layout.body == slice(0, 0)
    personal = result.personal(0)
    for name, tensor in start.state_dict().items():
        assert torch.equal(personal[name], tensor) == name.startswith("encoder"), name
    assert result.rounds[-1].bytes_up == 3 * 130 * 4
    assert start.encoder[0].weight.requires_grad  # the user's own is as it was


def test_the_body_is_all_but_the_head() -> None:
    one, two = (
        ft.run("fedavg", data=three_clients(), model=Backbone, frozen=frozen, **SMALL) for frozen in ("encoder", "body")
    )
    assert numbers(one.rounds) == numbers(two.rounds)
    assert_same(final(one), final(two))


def test_training_is_that_of_a_head_on_a_body_in_evaluation_mode() -> None:
    """A plain loop: no dropout and no batch statistics in the frozen part."""
    (x, y), start = three_clients()[0], Backbone()
    start.encoder[1].running_var.uniform_(0.5, 2)
    settings: dict[str, Any] = {"rounds": 1, "steps": 5, "batch": "full", "lr": 0.3, "test": 0, "validation": 0}
    result = ft.run("fedavg", data=[(x, y)], model=start, frozen="encoder", evaluate_every=0, **settings)
    module = copy.deepcopy(start)
    optimizer = torch.optim.SGD(module.classifier.parameters(), lr=0.3)
    x, y = result.data.x, result.data.y
    for _ in range(5):
        optimizer.zero_grad()
        module.encoder.eval()
        functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    for name, tensor in result.personal(0).items():
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_batchnorm_that_is_frozen_needs_no_other_samples() -> None:
    data = three_clients()
    with pytest.raises(ft.FedtailorError, match="BatchNorm needs other samples in a batch"):
        ft.run("fedavg", data=data, model=Backbone, batch=1, **SMALL)
    result = ft.run("fedavg", data=data, model=Backbone, batch=1, frozen="encoder", **SMALL)
    assert result.failures == {}


@pytest.mark.parametrize("frozen", [None, "encoder.0"])
def test_batchnorm_of_ones_own_never_sees_a_single_sample(frozen: str | None) -> None:
    """Also with a last batch of one sample, and at a client with one training sample."""
    sizes = [(x[:n], y[:n]) for (x, y), n in zip(three_clients(), (13, 11, 1), strict=True)]
    settings = {**SMALL, "test": 0, "validation": 0, "batch": 5, "frozen": frozen, "evaluate_every": 0}
    for method in ("fedavg", "fedrep", "ditto", "per-fedavg", "fedrecon", "pfedmb"):
        result = ft.run(method, data=sizes, model=Backbone, on_failure="stop", **settings)
        assert result.failures == {}


@pytest.mark.parametrize("name", all_methods())
def test_every_method_with_a_frozen_body(name: str) -> None:
    """A body without numbers is nothing to share, and nothing to fail at."""
    result = ft.run(name, data=three_clients(), model=Backbone, frozen="body", on_failure="stop", **SMALL)
    assert result.rounds[-1].loss is not None


def test_the_user_is_told_that_nothing_is_shared() -> None:
    result = ft.run("fedper", data=three_clients(), model=Backbone, frozen="body", **SMALL)
    assert result.setup is not None
    assert result.setup.lines() == [
        "Network tests.models.nets:Backbone: body empty, 0 numbers; head classifier (Linear), 130 numbers; frozen "
        "encoder.0 (Linear), encoder.1 (BatchNorm1d), encoder.4 (Linear), 1,633 numbers.",
        "fedper: a client uploads body (mean by samples): 0 numbers, so nothing is shared.",
    ]


def test_other_seeds_leave_frozen_layers_alone() -> None:
    module = Backbone()
    module.classifier.weight.requires_grad_(False)  # beside a bias that is trained
    module.encoder[1].running_mean.normal_()
    network = assemble(module, 1, torch.rand(2, 64), frozen="encoder.0,encoder.1").network()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    other = network.initialised(3)
    after = network.state_dict(other)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"encoder.4.weight", "encoder.4.bias", "classifier.bias"}


def test_sites_with_another_backbone_are_refused() -> None:
    """The vector alone does not tell: the heads are equal."""
    from fedtailor.engines.preparation import Objects, prepare
    from fedtailor.experiment import make_experiment

    def fingerprint(module: nn.Module, frozen: str | None) -> str:
        experiment = make_experiment({"frozen": frozen, "engine": "in-process"})
        return prepare(experiment, Objects(data=three_clients(), model=module)).terms.fingerprint

    one = Backbone()
    weight, buffer, same = copy.deepcopy(one), copy.deepcopy(one), copy.deepcopy(one)
    weight.encoder[0].weight.data[0, 0] += 1
    buffer.encoder[1].running_mean[3] += 1
    found = [fingerprint(module, "encoder") for module in (one, weight, buffer, same)]
    assert len(set(found)) == 3
    assert found[0] == found[3]


def test_fingerprints_of_whole_networks_are_what_they_were() -> None:
    from zlib import crc32

    result = ft.run("fedavg", rounds=1, clients=2, engine="in-process")
    terms = result.simulation.terms
    assert terms.fingerprint == f"{crc32(terms.initial.numpy().data):08x}"


def test_parts_that_are_not_there_are_refused() -> None:
    with pytest.raises(ft.FedtailorError, match=r"no part 'encodr' to freeze; its parts are encoder, encoder\.0"):
        assemble(Backbone(), 1, None, frozen="encodr")
    with pytest.raises(ft.FedtailorError, match="The network has no trained parameters: freeze less"):
        assemble(Backbone(), 1, None, frozen="encoder,classifier")


def test_a_head_that_is_frozen_is_another_layer() -> None:
    """The head is of the layers that are trained."""
    made = assemble(Backbone(), 1, torch.rand(2, 64), frozen="classifier")
    assert made.head == ["encoder.4"]
    network = Network(made.module, made.head)
    assert network.layout.layers.keys() == {"encoder.0", "encoder.1", "encoder.4"}
