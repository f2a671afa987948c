"""Models as folders that Hugging Face's hub takes: tried with huggingface_hub itself, where it is installed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor.model_files.format import read_model

SMALL: dict[str, Any] = {"data": "digits", "clients": 3, "model": "mlp:16", "rounds": 1, "engine": "in-process"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each model, by kind."""
    to, result = tmp_path_factory.mktemp("hub"), ft.run("ditto", **SMALL)
    personal = ft.export(result, to=to, client=2, hugging_face=True, onnx=True)
    shared = ft.export(result, to=to, global_model=True, hugging_face=True)
    return {"personal": personal[0].parent, "global": shared[0].parent}


def test_a_folder_has_the_names_that_a_hub_looks_for(folders: dict[str, Path]) -> None:
    assert {kind: folder.name for kind, folder in folders.items()} == {"personal": "client-2", "global": "global"}
    assert {path.name for path in folders["global"].iterdir()} == {"model.safetensors", "config.json", "README.md"}
    assert {path.name for path in folders["personal"].iterdir()} - {"model.onnx"} == {
        "model.safetensors", "config.json", "README.md"
    }  # fmt: skip
    about, state = read_model(folders["personal"])
    assert json.loads((folders["personal"] / "config.json").read_text()) == json.loads(about.model_dump_json())
    for other in ("config.json", "model.safetensors"):
        there = read_model(folders["personal"] / other)[1]
        assert all(torch.equal(state[name], tensor) for name, tensor in there.items())
    with pytest.raises(ft.FedtailorError, match=r"README\.md exists already|model\.safetensors exists already"):
        ft.export(ft.run("ditto", **SMALL), to=folders["global"].parent, global_model=True, hugging_face=True)


def test_the_lines_on_the_card_load_the_model(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders["personal"])
    names: dict[str, Any] = {}
    exec((folders["personal"] / "README.md").read_text().partition("```python\n")[2].partition("```")[0], names)
    x = ft.load_data("digits").x[:5]
    expected = ft.predict(folders["personal"], x.numpy()).probabilities  # type: ignore[union-attr]
    assert names["model"](x).softmax(1).detach().numpy() == pytest.approx(expected, abs=1e-6)


def test_the_hubs_own_package_reads_the_card_and_loads_the_model(folders: dict[str, Path]) -> None:
    hub = pytest.importorskip("huggingface_hub")
    folder = folders["personal"]
    about, state = read_model(folder)
    card = hub.ModelCard.load(folder / "README.md")
    assert card.data.library_name == "fedtailor"
    assert (card.data.pipeline_tag, card.data.tags[-1]) == ("image-classification", "ditto")
    (result,) = card.data.eval_results
    assert (result.metric_type, result.dataset_name, result.metric_value) == ("accuracy", "digits", about.value)
    assert card.data.to_dict() == hub.ModelCard(str(card)).data.to_dict()
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    hub.load_torch_model(module, folder)
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


def test_the_hubs_own_package_prepares_every_file_for_upload(folders: dict[str, Path]) -> None:
    """All that `upload_folder` does before its first request."""
    hub = pytest.importorskip("huggingface_hub")
    folder = folders["global"]
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert list(hub.utils.filter_repo_objects(names)) == names
    for name in names:
        change = hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(folder / name))
        assert change.upload_info.size == (folder / name).stat().st_size
