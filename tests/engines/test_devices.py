"""Several devices: which they are, a worker for each, and what is computed there.

A device without numbers (`meta`) stands for an accelerator: nothing can be copied from it to the host.
"""

from contextlib import closing
from typing import Any

import pytest
import torch

import fedtailor as ft
from fedtailor.client.sites import Sites
from fedtailor.engines.devices import find_devices
from fedtailor.engines.processes import Processes, _at_device
from fedtailor.messages import Train, packed, unpacked
from tests.client.parts import make_sites
from tests.engines.place import Pretended, within
from tests.helpers import assert_same, final

CPU, META = torch.device("cpu"), torch.device("meta")
SMALL: dict[str, Any] = {
    "data": "digits", "clients": 6, "model": "mlp:8", "rounds": 3, "max_train": 40, "class_weights": "balanced",
}  # fmt: skip


def test_devices_are_named_once_by_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert find_devices("cuda:0,2") == [torch.device("cuda:0"), torch.device("cuda:2")]
    assert find_devices("cuda:1, cuda:0") == [torch.device("cuda:1"), torch.device("cuda:0")]
    assert find_devices("cpu,cpu") == [CPU, CPU]
    assert find_devices("cpu") == [CPU]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cuda:0,3", r"^The device cuda:3 is not available here \(there are: cuda:0, cuda:1\)\.$"),
        ("cuda,1", r"^The device cuda is not available here \(there are: cuda:0, cuda:1\)\.$"),
        ("cuda:1,1", "^The devices cuda:1,1 must differ"),
        ("cuda:0,cpu", "must be of one kind"),
        ("cuda:0,mps", "must be of one kind"),
        ("cuda:0,", "are not understood: write cuda:0,1"),
        ("cpu:x,1", "are not understood: write cuda:0,1"),
    ],
)
def test_devices_that_cannot_be_are_one_sentence(monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ft.FedtailorError, match=said):
        ft.run("fedavg", device=name, **SMALL)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": "in-process"}, "Several devices need worker processes"),
        ({"engine": "sites-in-memory"}, "Several devices need worker processes"),
        ({"debug": True}, "Several devices need worker processes"),
        ({"workers": 2}, "Each of several devices has one worker: leave --workers out"),
    ],
)
def test_what_needs_one_device_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ft.FedtailorError, match=said):
        ft.run("fedavg", device="cpu,cpu", **SMALL, **settings)


def test_a_process_that_has_used_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ft.FedtailorError, match="has used CUDA already"):
        ft.run("fedavg", device="cpu,cpu", **SMALL)


def test_two_devices_have_the_numbers_of_one() -> None:
    one = ft.run("ditto", engine="in-process", stack=2, **SMALL)
    other = ft.run("ditto", device="cpu,cpu", stack=2, **SMALL)
    assert_same(final(one), final(other))


def test_each_device_has_a_worker_and_gets_another_if_that_dies() -> None:
    devices = [torch.device("cpu", 0), CPU, CPU]
    with within(60), closing(Processes(Pretended([1]), 1, devices=devices)) as transport:
        assert [worker.device for worker in transport._all] == devices
        transport._dismiss(transport._all[0])
        transport._hire()
        assert [worker.device for worker in transport._all] == [CPU, CPU, torch.device("cpu", 0)]


def test_a_worker_moves_all_that_it_computes_with_to_its_device() -> None:
    """Trains there without a look at a number, until the upload is checked: that is the first copy to the host."""
    for model in ("mlp:8", "resnet"):
        there = make_sites(model=model).on(META)
        network = there.terms.network
        tensors = [network.vector, network.gradient, there.terms.initial, there.data.x, there.data.y]
        tensors += [*network.module.parameters(), *network.module.buffers()]
        tensors += [p.grad for p in network.module.parameters() if p.grad is not None]
        assert {tensor.device for tensor in tensors} == {META}  # type: ignore[union-attr]
        theta = there.terms.initial.clone()
        client = there.site(0).client(1, {})
        assert client.descend(theta).device == META
        assert client.gradient(theta).device == META
        reply, _ = there.work(Train(1, 0, {"theta": theta}), {})
        assert "meta" in reply.error


def test_a_network_on_another_device_is_its_own() -> None:
    sites = make_sites(model="mlp:8")
    there = sites.on(CPU).terms.network
    there.module.get_parameter(next(name for name, _ in there.module.named_parameters())).data.fill_(7.0)
    assert (there.vector == 7).any()
    assert not (sites.terms.network.vector == 7).any()


def test_a_device_that_cannot_be_used_is_the_reply_to_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Sites, device: torch.device) -> Sites:
        raise RuntimeError("no such device")

    monkeypatch.setattr(Sites, "on", fails)
    reply, _ = _at_device(make_sites(), META)(Train(1, 0, {}), {})
    assert reply.error.startswith("the device meta cannot be used (RuntimeError: no such device")


def test_tensors_of_all_kinds_are_fetched_at_once() -> None:
    tensors = [
        torch.tensor(True), torch.arange(3, dtype=torch.int8), torch.tensor(0.1, dtype=torch.float64),
        torch.empty(0, 2), torch.arange(6.0).view(2, 3).t(), torch.tensor([2**60]), torch.ones(5, dtype=torch.bfloat16),
    ]  # fmt: skip
    found = unpacked(packed(tensors), tensors)
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(tensors, found, strict=True))
