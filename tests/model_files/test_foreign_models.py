"""Model files of strangers: nothing in them runs, hangs, takes memory, or ends in a traceback."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.model_files.format import HEADER, read_model
from fedtailor.models.expression import build_expression, expression

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
LAYERS = "nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))"


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the values of a model file."""
    result = ft.run("fedavg", data=[(X, np.arange(60) % 3)], model="mlp:8", rounds=1, epochs=1, engine="in-process")
    (file,) = ft.export(result, client=0, to=tmp_path_factory.mktemp("models"))
    about, state = read_model(file)
    return json.loads(about.model_dump_json()), state


def write(path: Path, about: Any, state: dict[str, Tensor]) -> Path:
    file = path / "model.safetensors"
    save_file(state, file, {HEADER: about if isinstance(about, str) else json.dumps(about)})
    return file


def refused(file: Path, x: Any = X) -> str:
    """The sentence with which a model file is refused, soon."""
    began = time.process_time()
    with pytest.raises(ft.FedtailorError) as caught:
        ft.predict(file, x)
    assert time.process_time() - began < 5
    said = str(caught.value)
    assert "\n" not in said
    return said


Right = tuple[dict[str, Any], dict[str, Tensor]]
DENSE = {"0.weight": torch.zeros(3, 4), "0.bias": torch.zeros(3)}


@pytest.mark.parametrize(
    "layers",
    [
        "nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (1, 3)), nn.Upsample(scale_factor=1e8))",
        "nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (1, 3)), nn.AdaptiveAvgPool1d(10**9))",
        "nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (1, 3)), nn.AdaptiveAvgPool1d(900000000), "
        "nn.AdaptiveAvgPool1d(3), nn.Flatten())",
        "nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (1, 3)), nn.ConstantPad1d(900000000, 0.0), "
        "nn.AdaptiveAvgPool1d(3), nn.Flatten())",
        "nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (1, 3)), nn.ConstantPad1d(5000000, 0.0), "
        "nn.AvgPool1d(5000000, 1), nn.AdaptiveAvgPool1d(3), nn.Flatten())",
        "nn.Sequential(nn.Linear(4, 3), nn.Transformer(8, 2, 1000000, 1000000))",
        "nn.Sequential(nn.Linear(4, 3), nn.LSTM(3, 3, 1000000))",
        "nn.Sequential(nn.Linear(4, 3), nn.Softmax(99999999999999999999))",
        "nn.Sequential(nn.Linear(4, 3, device='cpu'), nn.Linear(100000, 100000, device='cpu'))",
        "nn.Sequential(nn.Linear(4, 3), nn.Linear(100000000000, 100000000000))",
        "nn.Sequential(nn.LazyLinear(3))",
        "nn.Sequential(" * 5_000 + ")" * 5_000,
        "nn.Sequential(nn.Linear(4, 3), " + "nn.ReLU(), " * 100_000 + ")",
        "nn.Linear(" + "-" * 90_000 + "4, 3)",
        "nn.Linear(4, " + "(" * 5_000 + ")" * 5_000 + ")",
        "nn.Linear(" + "9" * 5_000 + ", 3)",
        "nn.Sequential(*[nn.Linear(4, 3)])",
        "nn.Module.__init__.__globals__",
        "nn.functional.relu(3)",
        "nn.Sequential()",
        "\0",
    ],
)
def test_lines_that_would_hang_or_fill_the_memory(tmp_path: Path, right: Right, layers: str) -> None:
    file = write(tmp_path, {**right[0], "layers": layers}, DENSE)
    said = refused(file)
    assert "not a network of torch.nn's layers" in said or "do not fit together" in said


def test_a_line_of_small_layers_that_would_compute_for_hours(tmp_path: Path, right: Right) -> None:
    slow = "nn.ConstantPad1d(400000, 0.0), nn.MaxPool1d(400000, 1), nn.AdaptiveAvgPool1d(3), nn.Flatten()"
    layers = f"nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (1, 3)), {slow})"  # 10¹¹ comparisons
    assert "do not fit together, or one needs too much" in refused(
        write(tmp_path, {**right[0], "layers": layers}, DENSE)
    )


def test_a_line_may_have_any_simple_layer(tmp_path: Path, right: Right) -> None:
    module = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(8, 3))
    text = expression(module)
    assert text is not None
    file = write(tmp_path, {**right[0], "layers": text}, module.state_dict())
    assert torch.allclose(ft.predict(file, X).outputs, module(torch.from_numpy(X)), atol=1e-6)
    assert repr(build_expression(text)) == repr(module)


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_shape": [0]}, {"input_shape": [-4]}, {"input_shape": [10**30]}, {"input_shape": []},
        {"input_shape": [10**5, 10**5]}, {"input_shape": 4}, {"input_shape": [1] * 50}, {"input_shape": ["a"]},
        {"counted": 4}, {"counted": 0}, {"counted": -1}, {"counted": None}, {"outputs": 0}, {"outputs": 10**12},
        {"outputs": 2, "counted": 2, "classes": ["a", "b"]}, {"outputs": 4, "counted": 4, "classes": list("abcd")},
        {"classes": ["a"]}, {"classes": list("abcd")}, {"classes": [1, 2, 3]}, {"classes": "abc"}, {"dtype": "float64"},
        {"dtype": "float16"}, {"pixels": "odd"}, {"kind": "x"}, {"layers": 3}, {"layers": ["nn"]}, {"client": "a"},
        {"parameters": []}, {"load": "x"}, {"layers": None, "network": "mlp:99999999,99999999"},
        {"layers": None, "network": "cnn"}, {"layers": None, "network": "mlp:" + "9" * 5_000},
        {"layers": None, "network": "mlp:" + "1," * 10**5 + "1"}, {"layers": None, "network": ""},
    ],
)  # fmt: skip
def test_descriptions_that_cannot_be(tmp_path: Path, right: Right, wrong: dict[str, Any]) -> None:
    refused(write(tmp_path, {**right[0], **wrong}, right[1]))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "3",
        "{",
        '{"a":' * 100_000,
        "[" * 100_000,
        '{"client": ' + "9" * 10_000 + "}",
        "\ud800"[:0] + "\0",
    ],
)
def test_headers_that_are_no_description(tmp_path: Path, right: Right, text: str) -> None:
    assert "is no model that fedtailor exported" in refused(write(tmp_path, text, right[1]))


def test_deep_parameters_are_read_or_refused(tmp_path: Path, right: Right) -> None:
    for depth in (50, 1_000, 100_000):
        text = json.dumps(right[0]).replace(
            '"parameters": {}', '"parameters": {"a": ' + "[" * depth + "]" * depth + "}"
        )
        file = write(tmp_path, text, right[1])
        try:
            ft.predict(file, X)
        except ft.FedtailorError as error:
            assert depth > 50, error  # noqa: PT017


def test_values_of_another_type_or_number(tmp_path: Path, right: Right) -> None:
    about, state = right
    for kind in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.int8):
        file = write(tmp_path, about, {name: tensor.to(kind) for name, tensor in state.items()})
        assert "do not fit together" in refused(file)
    for other in ({}, {"x": torch.zeros(2)}, {**state, "x": torch.zeros(2)}, {n: t[:1] for n, t in state.items()}):
        assert "do not fit together" in refused(write(tmp_path, about, dict(other)))


def test_a_model_that_diverged_predicts_nothing(tmp_path: Path, right: Right) -> None:
    about, state = right
    file = write(tmp_path, about, {name: torch.full_like(tensor, torch.nan) for name, tensor in state.items()})
    assert "gives NaN or Inf for 60 of 60 samples, the first is sample 0: its training diverged" in refused(file)


def test_a_network_of_other_outputs_than_described(tmp_path: Path, right: Right) -> None:
    two = nn.Linear(4, 2)
    file = write(tmp_path, {**right[0], "layers": None, "network": "mine:Two"}, two.state_dict())
    with pytest.raises(ft.FedtailorError, match="gives 120 values for 60 samples, not the 3 for each"):
        ft.predict(file, X, model=two)


def test_headers_of_absurd_size(tmp_path: Path, right: Right) -> None:
    file = write(tmp_path, *right)
    content = file.read_bytes()
    for length in (0, 1, 10**6, 2**40, 2**63, 2**64 - 1):
        file.write_bytes(length.to_bytes(8, "little") + content[8:])
        assert "it is no safetensors file, or a damaged one" in refused(file)
    for shape in (b"[99999999999999999999,4]", b"[4611686018427387904,4]", b"[0,4]", b"[-8,4]"):
        header = content[8 : 8 + int.from_bytes(content[:8], "little")]
        changed = header.replace(b'"shape":[8,4]', b'"shape":' + shape)
        assert changed != header
        file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + len(header) :])
        refused(file)
