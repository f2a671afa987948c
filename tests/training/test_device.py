"""Every tensor is made on the run's device."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fedtailor as ft
from fedtailor.methods import CATALOGUE
from tests.helpers import assert_same, final


@pytest.fixture
def default_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's default device is `meta`, which holds no numbers: a tensor made without naming the run's device lands
    there, and the first thing computed from it and a real one fails. The run does not see it, and so does not change
    it."""
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cpu"))
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_is_elsewhere")
@pytest.mark.parametrize("method", CATALOGUE)
@pytest.mark.parametrize("model", ["mlp:8", "resnet"])
def test_the_whole_run_stays_on_its_device(method: str, model: str) -> None:
    settings: dict[str, Any] = {"data": "digits", "clients": 3, "rounds": 2, "max_train": 20, "engine": "in-process"}
    settings["model"] = model
    fine_tune = 0 if CATALOGUE[method]().predicts_by_more else 1
    settings |= {"device": "cpu", "momentum": 0.9, "keep_momentum": True, "evaluation": {"fine_tune": fine_tune}}
    result = ft.run(method, **settings)
    tensors = final(result)
    assert {tensor.device.type for tensor in tensors.values()} <= {"cpu"}
    torch.set_default_device(None)
    assert_same(tensors, final(ft.run(method, **settings)))


def test_a_device_that_is_not_there_is_refused() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ft.FedtailorError, match="cuda is not available here: use cpu, or auto"):
            ft.run("fedavg", device="cuda")
    with pytest.raises(ft.FedtailorError, match="no device 'gpu'"):
        ft.run("fedavg", device="gpu")
    assert ft.run("local", rounds=1, device="auto", workers=1).accuracy is not None
