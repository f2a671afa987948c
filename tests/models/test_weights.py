"""Pretrained weights: what is loaded, what is left, and what is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.engines.preparation import Objects, Prepared, prepare
from fedtailor.experiment import make_experiment
from fedtailor.models.assembly import Assembled, assemble
from tests.helpers import assert_same, final, numbers
from tests.models.nets import SMALL, Backbone, three_clients


def saved(path: Path, module: nn.Module | dict[str, Tensor], **changes: Tensor | None) -> str:
    state = module if isinstance(module, dict) else module.state_dict()
    save_file({n: t.contiguous() for n, t in {**state, **changes}.items() if t is not None}, path)
    return str(path)


def prepared(file: str, **settings: Any) -> Prepared:
    experiment = make_experiment({**SMALL, "weights": file, **settings})
    return prepare(experiment, Objects(data=three_clients(), model=Backbone))


def assembled(file: str, **settings: Any) -> Assembled:
    return assemble(Backbone(), 1, torch.rand(2, 64), weights=file, **settings)


def test_training_begins_with_the_weights_of_the_file(tmp_path: Path) -> None:
    module = Backbone()
    module.encoder[1].running_mean.normal_()
    ready = prepared(saved(tmp_path / "all.safetensors", module))
    assert_same(ready.terms.network.state_dict(ready.terms.initial), module.state_dict())
    by_object = ft.run("ditto", data=three_clients(), model=module, **SMALL)
    by_file = ft.run("ditto", data=three_clients(), model=Backbone, weights=tmp_path / "all.safetensors", **SMALL)
    assert numbers(by_file.rounds) == numbers(by_object.rounds)
    assert_same(final(by_file), final(by_object))


def test_a_head_for_other_classes_stays_as_initialised(tmp_path: Path) -> None:
    other = Backbone(num_classes=7)
    file = saved(tmp_path / "other.safetensors", other)
    ready = prepared(file)
    found, plain = (
        ready.terms.network.state_dict(),
        prepare(make_experiment(SMALL), Objects(data=three_clients(), model=Backbone)).terms.network.state_dict(),
    )
    for name, tensor in found.items():
        wanted = plain if name.startswith("classifier") else other.state_dict()
        assert torch.equal(tensor, wanted[name]), name
    assert ready.setup.notes == [
        f"Weights: 9 tensors loaded from {file}; initialised: classifier.weight, classifier.bias."
    ]
    lacking = saved(tmp_path / "lacking.safetensors", other, **{"classifier.weight": None, "classifier.bias": None})
    assert_same(prepared(lacking).terms.network.state_dict(), found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"encoder.9.weight": torch.zeros(2)}, r"have 'encoder\.9\.weight', which the network does not \(1 of 12"),
        ({"encoder.4.bias": None}, r"lack 'encoder\.4\.bias' of the network's body \(1 such names\): add"),
        (
            {"encoder.4.weight": torch.zeros(13, 20)},
            r"'encoder\.4\.weight' of the weights .* has the shape 13×20, but the network's has 12×20: only the head",
        ),
    ],
)
def test_all_else_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Tensor | None], said: str
) -> None:
    with pytest.raises(ft.FedtailorError, match=said):
        assembled(saved(tmp_path / "unfit.safetensors", Backbone(), **changes))


def test_a_counter_may_be_missing_and_types_are_converted(tmp_path: Path) -> None:
    module = Backbone()
    halves = {name: t.half() if t.is_floating_point() else t for name, t in module.state_dict().items()}
    file = saved(tmp_path / "half.safetensors", halves, **{"encoder.1.num_batches_tracked": None})
    loaded = assembled(file).module.state_dict()
    assert torch.equal(loaded["encoder.0.weight"], module.encoder[0].weight.half().float())


def test_pickles_and_other_files_are_refused(tmp_path: Path) -> None:
    torch.save(Backbone().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(
        ft.FedtailorError, match=r"are a pickle.*save_file\(torch.load\('weights.pt', weights_only=True"
    ):
        assembled(str(tmp_path / "weights.pt"))
    with pytest.raises(ft.FedtailorError, match=r"There is no file .*none\.safetensors of weights"):
        assembled(str(tmp_path / "none.safetensors"))
    (tmp_path / "torn.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ft.FedtailorError, match=r"torn\.safetensors are no safetensors file, or a damaged one"):
        assembled(str(tmp_path / "torn.safetensors"))


def test_other_seeds_keep_what_was_loaded(tmp_path: Path) -> None:
    """IFCA's clusters then differ in the head, and pFedMB's branches."""
    other = Backbone(num_classes=7)
    result = ft.run(
        "ifca", data=three_clients(), model=Backbone, weights=saved(tmp_path / "w.safetensors", other), **SMALL
    )
    server, network = result.simulation.server, result.simulation.terms.network
    for number in (1, 2):
        first = network.state_dict(server.initial_for(number))
        for name, tensor in first.items():
            if not name.startswith("classifier"):
                assert torch.equal(tensor, other.state_dict()[name]), name
    heads = [server.initial_for(number)[server.head] for number in range(3)]
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])
    with pytest.raises(ft.FedtailorError, match=r"The clusters begin equal: .* or are pretrained"):
        ft.run(
            "ifca",
            data=three_clients(),
            model=Backbone,
            weights=saved(tmp_path / "all.safetensors", Backbone()),
            **SMALL,
        )


def test_a_run_goes_on_with_the_same_file_alone(tmp_path: Path) -> None:
    other = Backbone(num_classes=7)
    file = saved(tmp_path / "w.safetensors", other)
    settings = {**SMALL, "model": Backbone, "weights": file}
    whole = ft.run("fedavg", data=three_clients(), **{**settings, "rounds": 3})
    ft.run("fedavg", data=three_clients(), out=tmp_path / "run", **settings)
    head = other.state_dict()["classifier.weight"]
    for changes in ({"encoder.0.bias": torch.zeros(20)}, {"classifier.weight": head + 1}):
        saved(tmp_path / "w.safetensors", other, **changes)
        with pytest.raises(ft.FedtailorError, match="The network is not the one of the run"):
            ft.resume(tmp_path / "run", model=Backbone, data=three_clients(), rounds=3)
    saved(tmp_path / "w.safetensors", other)
    resumed = ft.resume(tmp_path / "run", model=Backbone, data=three_clients(), rounds=3)
    assert numbers(resumed.rounds) == numbers(whole.rounds)


def test_an_exported_model_is_a_file_of_weights(tmp_path: Path) -> None:
    result = ft.run("fedavg", data=three_clients(), model=Backbone, **SMALL)
    (file,) = ft.export(result, global_model=True, to=tmp_path)
    again = prepared(str(file))
    theta = result.global_vector()
    assert theta is not None
    assert torch.equal(again.terms.initial, theta)


def test_weights_are_in_every_precision(tmp_path: Path) -> None:
    module = Backbone()
    ready = prepared(saved(tmp_path / "w.safetensors", module), dtype="float64")
    assert_same(ready.terms.network.state_dict(), copy.deepcopy(module).double().state_dict())


class Tied(nn.Module):
    """A weight with two names, of which a file has one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.two(torch.relu(self.one(x))))
        return out


@pytest.mark.parametrize("left_out", ["one.weight", "two.weight"])
def test_a_shared_weight_may_be_under_one_of_its_names(tmp_path: Path, left_out: str) -> None:
    module = Tied()
    file = saved(tmp_path / "w.safetensors", module, **{left_out: None})
    made = assemble(Tied(), 1, torch.rand(2, 64), weights=file)
    assert_same(dict(made.module.state_dict()), dict(module.state_dict()))
    assert made.loaded is not None
    assert made.loaded.left == ()
    network = made.network()
    assert torch.equal(network.initialised(3), network.vector)
