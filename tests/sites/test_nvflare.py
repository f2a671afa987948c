"""A federation over NVFlare, with mutual TLS on loopback: two sites, from kits to model files."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedtailor.cli import app
from fedtailor.engines.runs import load
from tests.sites.loopback import Deployed, impossible
from tests.sites.parts import close_metrics, same_server, tables

needs_nvflare = pytest.mark.skipif(find_spec("nvflare") is None, reason="NVFlare is not installed")
needs_namespace = pytest.mark.skipif(bool(impossible()), reason=impossible() or "possible")


@needs_nvflare
@needs_namespace
def test_two_sites_from_kits_to_model_files(tmp_path: Path) -> None:
    with Deployed(tmp_path, tables(("north", "south")), rounds=3) as federation:
        federation.start_sites()
        federation.start_driver()
        federation.wait_for_end()
        told = federation.said("north")
    for words in (
        "Connected to localhost:8002.",
        "Joined the run trial-",
        "Round 3 is done.",
        "Wrote the model of round 3",
    ):
        assert words in told
    assert "Round 3 of 3: accuracy" in federation.said("driver")
    shown = CliRunner().invoke(app, ["deploy", "status", str(tmp_path / "federation.toml")])
    assert "done, round 3 of 3" in shown.output
    assert "south: present" in shown.output
    models = [next((tmp_path / name / "private" / "models").glob("*.safetensors")) for name in federation.data]
    real, simulated = load(federation.directory), federation.simulated()
    assert same_server(real.simulation, simulated.simulation)
    assert close_metrics(real, simulated)
    for number in range(2):
        theta = simulated.simulation.personal_model(number)
        assert torch.equal(federation.personal(number, real), theta)
        assert sum(tensor.numel() for tensor in load_file(models[number]).values()) == theta.numel()
