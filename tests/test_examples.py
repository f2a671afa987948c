"""The examples of the documentation run."""

import re
from pathlib import Path

import pytest
import torch

import fedtailor as ft
from examples.halfway import Halfway
from tests.helpers import assert_same, final

ROOT = Path(__file__).parent.parent
SMALL = {"data": "digits", "clients": 4, "rounds": 2, "engine": "in-process"}


def test_the_method_of_ones_own() -> None:
    by_name = ft.run("examples.halfway:Halfway", own=0.7, **SMALL)
    assert_same(final(by_name), final(ft.run(Halfway(own=0.7), **SMALL)))
    average = ft.run("fedavg", **SMALL)
    for own, expected in ((0, by_name.server_state["theta"]), (1, by_name.client_state(3)["local"])):
        assert torch.equal(ft.run(Halfway(own=own), **SMALL).personal_vector(3), expected)
    assert_same(average.server_state, by_name.server_state)
    assert ft.run(Halfway(own=0), **SMALL).accuracy == average.accuracy
    mix = 0.7 * by_name.client_state(3)["local"] + 0.3 * by_name.server_state["theta"]
    torch.testing.assert_close(by_name.personal_vector(3), mix)
    with pytest.raises(ft.FedtailorError, match=r"'own' of examples\.halfway:Halfway is 2"):
        ft.run("examples.halfway:Halfway", own=2, **SMALL)


def test_the_readmes_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(import fedtailor.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, object] = {}
    exec(code[1], names)
    assert isinstance(names["result"], ft.RunResult)
    assert names["result"].experiment.parameters == {"lam": 0.5}
    assert (tmp_path / "models/client-3.safetensors").is_file()


def test_the_readmes_method_is_the_one_in_the_catalogue() -> None:
    """What is shown is what runs, but for the type hints."""
    shown = re.search(r"```python\n(class FedPer.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    source = (ROOT / "fedtailor/methods/fedper.py").read_text()
    bare = re.sub(r"(\w): (Server|Client|Message|Total|ClassVar\[\w+\])", r"\1", source)
    bare = re.sub(r" -> (None|Message|Tensor):", ":", bare)
    for line in shown[1].splitlines()[2:]:
        assert line in bare


def test_the_page_on_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs/your-own-network.md").read_text(), re.DOTALL):
        exec(code, names)
    assert isinstance(names["model"], torch.nn.Module)


def test_the_backbone_is_what_the_page_says() -> None:
    settings = {"clients": 4, "max_train": 5, "steps": 1, "rounds": 1, "engine": "in-process", "evaluate_every": 0}
    result = ft.run("fedavg", model="examples.backbone:Backbone", lora=8, **settings)
    assert result.rounds[-1].bytes_up == 4 * 4 * 338_762
    assert sum(tensor.numel() for tensor in result.personal(0).values()) == 10_657_930
