"""A run is a function of its experiment: what the caller has set in PyTorch and NumPy changes no bit of it."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.training.isolation import SWITCHES, isolated
from tests.helpers import assert_same, final, numbers

SETTINGS: dict[str, Any] = {"data": "digits", "clients": 4, "new_clients": 1, "rounds": 2, "epochs": 1, "max_train": 40}


@contextmanager
def switched(read: Callable[[], Any], set_to: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    set_to(value)
    try:
        yield
    finally:
        assert read() == value  # a run leaves it as it was
        set_to(before)


def among(number: int, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: switched(SWITCHES[number][0], SWITCHES[number][1], value)


CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "threads": among(0, 2),
    "default type": among(1, torch.float64),
    "default half type": among(1, torch.bfloat16),
    "matmul precision": among(2, "medium"),
    "no mkldnn": among(3, False),
    "denormals": among(4, True),
    "anomaly": among(5, True),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic": lambda: switched(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "default device": lambda: torch.device("meta"),
    "NumPy": lambda: np.errstate(all="raise"),
}


class Net(nn.Sequential):
    """Layers of all kinds, behind a loss that the run cannot know: through autograd."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out + 1e-3 * out.detach().tanh()


def outcome(model: Any, out: Path, **settings: Any) -> dict[str, Any]:
    """All that is computed during a run and after it, as bits."""
    result = ft.run("ditto", model=model, out=out, evaluation={"fine_tune": 1}, **{**SETTINGS, **settings})
    objects = {} if isinstance(model, str) else {"model": model}
    loaded = ft.load(out, **objects)
    longer = ft.resume(out, rounds=3, **objects)
    (file,) = ft.export(loaded, to=out / "models", client=1)
    adapted = ft.adapt(loaded, epochs=1, engine="in-process")
    x, _ = result.data.test(1)
    network = None if isinstance(model, str) else model
    vector = result.global_vector()
    assert vector is not None
    return {
        "records": numbers(longer.rounds),
        "tensors": {
            **final(result),
            **{f"personal/{name}": tensor for name, tensor in loaded.personal(2).items()},
            **{f"adapted/{name}": tensor for name, tensor in adapted.models[3].items()},
            **{f"loaded/{name}": tensor for name, tensor in ft.load_model(file, network).state_dict().items()},
            "global": vector,
            "vector": result.personal_vector(0),
            "predicted": ft.predict(file, x.numpy(), network).outputs,
        },
        "file": file.read_bytes(),
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("expected")
    return {
        "mlp:8": outcome("mlp:8", folder / "mlp", engine="in-process"),
        "Net": outcome(Net, folder / "net", engine="in-process"),
    }


@pytest.mark.parametrize("engine", [{"engine": "in-process"}, {"engine": "processes", "workers": 2}])
@pytest.mark.parametrize("model", ["mlp:8", "Net"])
@pytest.mark.parametrize("caller", CALLERS)
def test_what_the_caller_has_set_changes_no_bit(
    caller: str, model: str, engine: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    with CALLERS[caller]():
        found = outcome(Net if model == "Net" else model, tmp_path / "run", **engine)
    assert found["records"] == expected[model]["records"]
    assert_same(found["tensors"], expected[model]["tensors"])
    assert found["file"] == expected[model]["file"]


@pytest.mark.parametrize("caller", CALLERS)
def test_afterwards_all_is_as_it_was_also_after_an_error(caller: str) -> None:
    def seen() -> list[Any]:
        modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), np.geterr()]
        return [*(read() for read, _, _ in SWITCHES), *modes]

    @isolated()
    def fail() -> None:
        assert [read() for read, _, _ in SWITCHES] == [value for _, _, value in SWITCHES]
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        raise ZeroDivisionError

    with CALLERS[caller]():
        before = seen()
        with pytest.raises(ZeroDivisionError):
            fail()
        assert seen() == before


def test_setting_switches_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for caller in ("default type", "matmul precision", "autocast"):
            with CALLERS[caller](), isolated():
                pass
