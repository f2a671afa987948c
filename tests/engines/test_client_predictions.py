"""result.predict and result.features: by the client's personal model, for samples as the run's data were given."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft

SMALL: dict[str, Any] = {"clients": 4, "rounds": 2, "epochs": 1, "engine": "in-process", "max_train": 40}


def module_of(result: ft.RunResult, client: int) -> nn.Module:
    """The client's model as plain PyTorch loads it."""
    module = result.simulation.prepared.assembled.network().module
    module.load_state_dict(result.personal(client))
    return module.eval()


@pytest.mark.parametrize("model", ["mlp:8", "mlp:16,8"])
def test_they_are_the_models_outputs_and_what_its_head_gets(model: str) -> None:
    result = ft.run("fedper", model=model, **SMALL)
    x, y = result.data.test(2)
    module = module_of(result, 2)
    assert isinstance(module, nn.Sequential)
    with torch.no_grad():
        outputs, features = module(x), module[:-1](x)
    found = result.predict(2)
    torch.testing.assert_close(found.outputs, outputs, rtol=0, atol=1e-5)
    torch.testing.assert_close(result.features(2), features, rtol=0, atol=1e-5)
    assert found.predicted == [str(int(label)) for label in outputs.argmax(1)]
    assert found.labels == list(map(str, y.tolist()))
    assert found.accuracy == pytest.approx(result.rounds[-1].accuracy and result.per_client[2].accuracy)
    assert found.outputs.shape[0] == len(result.features("2")) == len(y)


def test_samples_may_be_given_in_any_form(tmp_path: Path) -> None:
    result = ft.run("ditto", model="mlp:8", out=tmp_path / "run", **SMALL)
    x = ft.load_data("digits").x[:7]
    wanted = module_of(result, 1)(x).detach()
    for given in (x, x.numpy(), x.double().numpy(), x.tolist()):
        torch.testing.assert_close(result.predict(1, given).outputs, wanted, rtol=0, atol=1e-5)
    loaded = ft.load(tmp_path / "run")
    assert torch.equal(loaded.predict(1, x).outputs, result.predict(1, x).outputs)
    assert torch.equal(loaded.features(1, x), result.features(1, x))
    assert result.predict(1, x).labels == []
    file = ft.export(result, to=tmp_path / "models", client=1)[0]
    torch.testing.assert_close(ft.predict(file, x).outputs, wanted, rtol=0, atol=1e-5)


def test_images_of_bytes_are_scaled_as_in_training() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 1, 8, 8), dtype=np.uint8)
    parts = [(pixels[:30], np.arange(30) % 2), (pixels[30:], np.arange(30) % 2)]
    result = ft.run("local", data=parts, model="mlp:8", pixels="signed", rounds=1, epochs=1, engine="in-process")
    wanted = module_of(result, 0)(torch.from_numpy(pixels[:5]) / 127.5 - 1).detach()
    torch.testing.assert_close(result.predict(0, pixels[:5]).outputs, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ["federated", "per-client"])
def test_tables_go_by_their_columns(how: Any) -> None:
    pandas = pytest.importorskip("pandas")
    draw = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {"age": draw.normal(50, 9, 80), "dose": draw.normal(1000, 90, 80), "ward": ["a", "b"] * 40}
    )
    frame["label"], frame["client"] = np.where(frame["age"] > 50, "old", "young"), ["n", "s"] * 40
    result = ft.run(
        "local", data=frame, preprocessing=how, columns="ward=category", model="mlp:8", rounds=1, epochs=1,
        engine="in-process",
    )  # fmt: skip
    north = frame[frame["client"] == "n"]
    found = result.predict("n", north)
    known = [result.data.client(0).x, module_of(result, 0)]
    of_training = known[1](known[0]).detach()
    assert sorted(map(tuple, found.outputs.round(decimals=4).tolist())) == sorted(
        map(tuple, of_training.round(decimals=4).tolist())
    )
    other_order = north[["ward", "dose", "age"]]  # no label, no client
    assert torch.equal(result.predict("n", other_order).outputs, found.outputs)
    assert result.features("n", other_order).shape == (40, 8)
    with pytest.raises(ft.FedtailorError, match="dose"):
        result.predict("n", north.drop(columns="dose"))


def test_labels_of_ones_own_are_named() -> None:
    result = ft.run("fedper", model="mlp:8", labels="own", partition="classes:2", **SMALL)
    found = result.predict(0)
    assert found.classes == result.data.own_names[0]
    assert found.outputs.shape[1] == len(found.classes) == 2
    assert set(found.predicted) <= set(found.classes)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.zeros(3, 5), "The samples have the shape 5, but the run's have 1×8×8"),
        (torch.zeros(0, 1, 8, 8), "no samples"),
        ([["a"]], "give numbers"),
    ],
)
def test_samples_that_do_not_fit_are_one_sentence(x: Any, said: str) -> None:
    result = ft.run("local", model="mlp:8", **SMALL)
    with pytest.raises(ft.FedtailorError, match=said):
        result.predict(0, x)
    with pytest.raises(ft.FedtailorError, match="no client 'nobody'"):
        result.predict("nobody")


class Crossed(nn.Module):
    """The head's layer gets more than the body's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.head(self.body(x.flatten(1)).relu())


def test_a_network_that_cannot_be_cut_says_so() -> None:
    result = ft.run("local", model=Crossed, **SMALL)
    assert result.predict(0).outputs.shape[1] == 10
    with pytest.raises(ft.FedtailorError, match="cannot be cut before its head, so it has no features"):
        result.features(0)


def test_a_client_without_test_samples() -> None:
    result = ft.run("local", model="mlp:8", test=0.0, evaluate_every=0, **SMALL)
    with pytest.raises(ft.FedtailorError, match="client 0 has none for testing, so give some"):
        result.predict(0)
