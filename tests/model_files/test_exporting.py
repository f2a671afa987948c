"""Exported models: what plain PyTorch makes of the files is what the run measured."""

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedtailor as ft
from fedtailor._common.extras import install_command
from fedtailor.model_files.format import HEADER, read_model
from fedtailor.models import CATALOGUE, build_model
from fedtailor.models.expression import build_expression, expression
from fedtailor.server.records import RoundRecord
from tests.helpers import digits, fitting_shape, rewrite_settings

SMALL: dict[str, Any] = {"data": "digits", "clients": 6, "model": "mlp:16", "rounds": 3, "participation": 3,
                         "engine": "in-process", "seed": 2}  # fmt: skip


def description(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.with_suffix(".json").read_text())
    return found


def loaded(file: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The model that the three lines of a file's own description give."""
    lines = description(file)["load"]
    assert len(lines) == 3
    monkeypatch.chdir(file.parent)
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    model = names["model"]
    assert isinstance(model, nn.Module)
    assert not model.training
    return model


def accuracy(model: nn.Module, samples: tuple[Tensor, Tensor], counted: int | None = None) -> float:
    with torch.no_grad():
        return float((model(samples[0])[:, :counted].argmax(1) == samples[1]).double().mean())


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("ditto", {}),
        ("fedavg", {"evaluation": {"fine_tune": 2}}),
        ("fedper", {"dtype": "float64"}),
        ("pfedmb", {}),
        ("fedbabu", {}),
        ("pgfed", {"model": nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))}),
    ],
)
def test_three_lines_of_plain_pytorch_give_the_accuracy_that_the_run_recorded(
    method: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ft.run(method, **{**SMALL, **changes})
    (file,) = ft.export(result, client=3, to=tmp_path / "models")
    about = description(file)
    assert file.name == "client-3.safetensors"
    assert "fedtailor" not in "".join(about["load"])
    recorded = result.clients[-1].results[3]["test"].accuracy
    assert accuracy(loaded(file, monkeypatch), result.data.test(3)) == recorded == about["accuracy"]
    assert "as the run recorded it in round 3" in about["measured"]
    assert about["fine_tuned"] == (2 if method == "fedavg" else 0)
    for name, tensor in load_file(file).items():
        assert tensor.is_contiguous()
        assert torch.equal(tensor, result.personal(3)[name])


def test_a_file_says_all_that_one_must_know(tmp_path: Path) -> None:
    result = ft.run("ditto", **SMALL, lam=0.25, pixels="signed", out=tmp_path / "run")
    files = ft.export(tmp_path / "run", to=tmp_path / "models")
    assert [file.name for file in files] == [f"client-{number}.safetensors" for number in range(6)]
    about = description(files[4])
    assert about["network"] == "mlp:16"
    assert about["layers"] == "nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))"
    assert about["classes"] == list("0123456789")
    assert (about["input_shape"], about["dtype"], about["pixels"]) == ([1, 8, 8], "float32", "signed")
    assert "divided by 255, times 2, minus 1" in about["preprocessing"]
    assert (about["method"], about["parameters"], about["round"]) == ("ditto", {"lam": 0.25}, 3)
    assert (about["client"], about["test_samples"]) == (4, len(result.data.test(4)[1]))
    assert about["fedtailor"] == ft.__version__
    with safe_open(files[4], framework="pt") as file:
        assert json.loads(file.metadata()[HEADER]) == about  # the file alone is enough
    other = ft.run("ditto", **SMALL, lam=0.5)
    again = ft.run("ditto", **SMALL, lam=0.25, pixels="signed", workers=1)
    hashes = [
        description(ft.export(run, client=0, to=tmp_path / name)[0])["experiment"]
        for name, run in (("other", other), ("again", again))
    ]
    assert about["experiment"] == hashes[1] != hashes[0]


def test_the_global_model_and_methods_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = ft.run("ditto", **SMALL, evaluation={"model": "global"})
    (file,) = ft.export(result, global_model=True, to=tmp_path)
    model, data = loaded(file, monkeypatch), result.data
    each = [accuracy(model, data.test(client)) for client in range(6)]
    assert description(file)["accuracy"] == result.accuracy == pytest.approx(np.mean(each), abs=1e-12)
    assert description(file)["client"] is None
    with pytest.raises(ft.FedtailorError, match="fedper has no global model: export the clients' own"):
        ft.export(ft.run("fedper", **SMALL), global_model=True, to=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_metrics_of_another_model_are_not_passed_off_as_this_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run looked at what participants hold right after their work; what is exported is what they predict with."""
    result = ft.run("fedavg", **SMALL, evaluation={"model": "local"})
    (file,) = ft.export(result, client=3, to=tmp_path)
    about = description(file)
    assert about["accuracy"] == accuracy(loaded(file, monkeypatch), result.data.test(3))
    assert about["accuracy"] != result.clients[-1].results[3]["test"].accuracy
    assert "measured at export" in about["measured"]


def test_a_run_that_was_killed_is_exported_as_its_checkpoint_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is then a round ahead: the metrics are those of the checkpoint's round."""

    def kill(record: RoundRecord) -> None:
        if record.round == 2:
            shutil.copytree(tmp_path / "run", tmp_path / "killed")

    everybody = {**SMALL, "participation": "all"}  # so that round 2 changes every client's metrics
    result = ft.run("ditto", **everybody, checkpoint_every=1, out=tmp_path / "run", on_round=kill)
    assert len(ft.load(tmp_path / "killed").rounds) == 2
    (file,) = ft.export(tmp_path / "killed", client=3, to=tmp_path / "models")
    about = description(file)
    assert (about["round"], about["rounds"]) == (1, 3)
    assert about["loss"] == result.clients[0].results[3]["test"].loss
    assert about["accuracy"] == accuracy(loaded(file, monkeypatch), result.data.test(3))


def test_a_run_without_a_round_has_no_models(tmp_path: Path) -> None:
    def stop(run: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.run("ditto", **SMALL, out=tmp_path / "run", on_start=stop)
    with pytest.raises(ft.FedtailorError, match="has no finished round to take a model from"):
        ft.export(tmp_path / "run", to=tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_a_run_from_a_device_that_is_not_here_is_exported_all_the_same(tmp_path: Path) -> None:
    result = ft.run("ditto", **SMALL, out=tmp_path / "run")
    rewrite_settings(tmp_path / "run", device="cuda:7")
    (model,) = ft.export(tmp_path / "run", client=3, to=tmp_path / "models")
    assert torch.equal(load_file(model)["1.weight"], result.personal(3)["1.weight"])


class Noisy(ft.Method):
    """Draws its personal models, from PyTorch's own generator and from one of the round."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": client.descend(message["theta"])}

    def personal_model(self, client: ft.Client, message: ft.Message) -> Tensor:
        drawn = torch.randn(len(message["theta"]), generator=client.stream("noise"))
        return message["theta"] + 0.3 * drawn + 0.3 * torch.rand(len(drawn))


def test_a_model_that_is_drawn_is_the_one_that_was_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = ft.run(Noisy(), **SMALL, out=tmp_path / "run")
    for run in (result, tmp_path / "run"):
        (file,) = ft.export(run, client=3, to=tmp_path / "models", overwrite=True, trust=True)
        x, y = result.data.test(3)
        loss = nn.functional.cross_entropy(loaded(file, monkeypatch)(x), y).item()
        assert loss == pytest.approx(result.per_client[3].loss, rel=1e-5)


def own_labels() -> list[tuple[Tensor, Tensor]]:
    x, y = digits([500])[0]
    chosen = [torch.isin(y, torch.tensor(labels)) for labels in ([4, 7], [4, 7], [2, 3, 4, 5, 6])]
    return [(x[mask][:40], y[mask][:40]) for mask in chosen]


def test_labels_of_a_clients_own_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A personal head has as many outputs that count as its client has classes."""
    own = {"data": own_labels(), "labels": "own", "clients": None, "participation": "all"}
    result = ft.run("fedper", **{**SMALL, **own})
    (file,) = ft.export(result, client=0, to=tmp_path)
    about = description(file)
    assert (about["classes"], about["outputs"], about["counted"]) == (["4", "7"], 5, 2)
    assert about["load"][2].endswith("# the first 2 outputs count")
    assert about["accuracy"] == accuracy(loaded(file, monkeypatch), result.data.test(0), 2)
    assert ft.predict(file, result.data.test(0)[0]).outputs.shape[1] == 2
    shared = ft.run("fedavg", **{**SMALL, **own})  # one head for all: the outputs beyond a client's own count too
    about = description(ft.export(shared, client=0, to=tmp_path / "shared")[0])
    assert (about["classes"], about["counted"]) == (["4", "7", "output 2", "output 3", "output 4"], 5)


def test_clients_are_known_by_number_and_name(tmp_path: Path) -> None:
    x, y = digits([90])[0]
    names = np.array(["st. mary", "north/east", "7"])[np.arange(90) % 3]
    np.savez(tmp_path / "clinics.npz", x=x.numpy(), y=y.numpy(), client=names)
    own = {"data": tmp_path / "clinics.npz", "clients": None, "participation": "all"}
    result = ft.run("fedavg", **{**SMALL, **own})
    assert result.names == ("7", "north/east", "st. mary")
    written = ft.export(result, to=tmp_path / "all")
    assert [file.name.removesuffix(".safetensors") for file in written] == [
        "client-0-7",
        "client-1-north-east",
        "client-2-st.-mary",
    ]
    for client, number in (("st. mary", 2), (1, 1), ("1", 1), ("7", 0)):
        (file,) = ft.export(result, client=client, to=tmp_path / "one", overwrite=True)
        assert (description(file)["client"], description(file)["name"]) == (number, result.names[number])
        assert ft.load_model(file.with_suffix(".json"))[1].weight.shape == (16, 64)
    for wrong in ("st. marie", "8", 3, -1):
        with pytest.raises(ft.FedtailorError, match="There is no client"):
            ft.export(result, client=wrong, to=tmp_path / "one")


def test_files_are_not_written_over_unless_that_is_allowed(tmp_path: Path) -> None:
    result = ft.run("fedavg", **SMALL)
    ft.export(result, client=3, to=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ft.FedtailorError, match=r"client-3.safetensors exists already: .* with --overwrite"):
        ft.export(result, to=tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    ft.export(result, to=tmp_path, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 12
    assert all(path.read_bytes() == content for path, content in before.items())  # the same bytes every time


def test_new_clients_are_left_to_themselves_unless_asked_for(tmp_path: Path) -> None:
    result = ft.run("fedper", **SMALL, new_clients=2)
    assert len(ft.export(result, to=tmp_path)) == 4
    (file,) = ft.export(result, client=5, to=tmp_path)
    assert torch.equal(load_file(file)["3.weight"].flatten(), result.simulation.server.initial[-170:-10])


def test_predictions_are_the_models_own(tmp_path: Path) -> None:
    result = ft.run("ditto", **SMALL, out=tmp_path / "run")
    (file,) = ft.export(result, client=3, to=tmp_path)
    x, y = result.data.test(3)
    model = ft.load_model(file)
    found = ft.predict(file, x.numpy())
    assert torch.equal(found.outputs, model(x).detach())
    assert torch.equal(found.probabilities, model(x).detach().softmax(1))
    hits = [name == str(label) for name, label in zip(found.predicted, y.tolist(), strict=True)]
    assert np.mean(hits) == description(file)["accuracy"]
    with pytest.raises(ft.FedtailorError, match=r"have the shape 8×8, but the model .* was made for 1×8×8"):
        ft.predict(file, x[:, 0])


def test_pixels_are_scaled_as_in_training(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x=pixels, y=np.arange(60) % 3)
    own = {"data": tmp_path / "images.npz", "pixels": "signed", "clients": 3}
    (file,) = ft.export(ft.run("fedavg", **{**SMALL, **own}), client=0, to=tmp_path)
    scaled = torch.from_numpy(pixels)[:, None].float() / 255 * 2 - 1
    assert torch.allclose(ft.predict(file, pixels).outputs, ft.load_model(file)(scaled), atol=1e-6)


class Residual(nn.Module):
    """A network of the user's own, with normalisation."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.flat, self.norm, self.head = nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.flat(x)
        out: Tensor = self.head(flat + self.norm(flat))
        return out


@pytest.mark.parametrize("network", ["resnet", Residual])
def test_networks_that_are_no_chain_of_layers_say_what_to_import(
    network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ft.run("fedavg", **{**SMALL, "model": network, "rounds": 1, "epochs": 1})
    (file,) = ft.export(result, client=3, to=tmp_path)
    data = result.data.test(3)
    about = description(file)
    assert about["layers"] is None
    assert accuracy(loaded(file, monkeypatch), data) == about["accuracy"]
    if network == "resnet":
        assert accuracy(ft.load_model(file), data) == about["accuracy"]
        return
    assert about["load"][0].startswith("from tests.model_files.test_exporting import Residual")
    with pytest.raises(ft.FedtailorError, match=r"a class of its own .*, which is code: say which one to use"):
        ft.load_model(file)
    for given in (Residual, "tests.model_files.test_exporting:Residual"):
        assert accuracy(ft.load_model(file, model=given), data) == about["accuracy"]
    with pytest.raises(ft.FedtailorError, match="do not fit together"):
        ft.load_model(file, model="logistic")


def test_a_file_cannot_make_anything_run(tmp_path: Path) -> None:
    (file,) = ft.export(ft.run("fedavg", **SMALL), client=0, to=tmp_path)
    about, state = read_model(file)
    for layers in ("__import__('os').abort()", "nn.Linear(64, 10)", "nn.Sequential(nn.Linear(", ""):
        evil = about.model_copy(update={"layers": layers}).model_dump_json()
        save_file(state, tmp_path / "evil.safetensors", {HEADER: evil})
        with pytest.raises(ft.FedtailorError, match=r"not a network of torch.nn's layers|do not fit together"):
            ft.load_model(tmp_path / "evil.safetensors")
    named = about.model_copy(update={"layers": None, "network": "os:abort"}).model_dump_json()
    save_file(state, tmp_path / "evil.safetensors", {HEADER: named})
    with pytest.raises(ft.FedtailorError, match="which is code"):
        ft.load_model(tmp_path / "evil.safetensors")


def test_broken_files_are_refused(tmp_path: Path) -> None:
    (file,) = ft.export(ft.run("fedavg", **SMALL), client=0, to=tmp_path)
    with pytest.raises(ft.FedtailorError, match="There is no model file"):
        ft.load_model(tmp_path / "other.safetensors")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ft.FedtailorError, match="cannot be read: it is no safetensors file, or a damaged one"):
        ft.load_model(file)
    save_file({"x": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ft.FedtailorError, match="no model that fedtailor exported"):
        ft.load_model(tmp_path / "foreign.safetensors")


def test_onnx_predicts_alike_for_any_number_of_samples(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)]
    own = {"model": nn.Sequential(*layers), "rounds": 1, "clients": 2, "participation": "all"}
    result = ft.run("ditto", **{**SMALL, **own})
    for client, file in enumerate(ft.export(result, to=tmp_path, onnx=True)):
        content = file.with_suffix(".onnx").read_bytes()
        assert str(Path(torch.__file__).parent).encode() not in content  # nothing of this machine
        session = runtime.InferenceSession(content)
        assert json.loads(session.get_modelmeta().custom_metadata_map[HEADER]) == description(file)
        x, _ = result.data.test(client)
        for samples in (x[:1], x):
            (found,) = session.run(None, {"x": samples.numpy()})
            assert torch.allclose(torch.from_numpy(found), ft.predict(file, samples).outputs, atol=1e-5)


def test_onnx_needs_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    with pytest.raises(ft.FedtailorError, match=re.escape(install_command("onnx"))):
        ft.export(ft.run("fedavg", **SMALL), to=tmp_path / "models", onnx=True)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("name", CATALOGUE)
def test_networks_of_the_catalogue_are_lines_of_plain_pytorch(name: str) -> None:
    module = build_model(name, fitting_shape(name), 7, 0).eval()
    text = expression(module)
    if name in ("resnet", "gru", "transformer"):
        assert text is None
        return
    assert text is not None
    again: nn.Module = eval(text, {"nn": nn})
    again.load_state_dict(module.state_dict())
    x = torch.randn(2, *fitting_shape(name))
    assert torch.equal(again.eval()(x), module(x))


def test_a_line_says_all_of_a_layer_or_nothing() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 4, (3, 5), stride=2, padding=(1, 0), bias=False, padding_mode="reflect"),
        nn.BatchNorm2d(4, eps=1e-3),
        nn.LayerNorm((4, 4)),
        nn.Sequential(nn.LeakyReLU(0.2), nn.Dropout(0.3)),
    )
    text = expression(module)
    assert text is not None
    assert repr(build_expression(text)) == repr(module)
    named = nn.Sequential()
    named.add_module("first", nn.Linear(2, 2))
    for other in (named, nn.LSTM(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), Residual((1,), 2)):
        assert expression(other) is None
