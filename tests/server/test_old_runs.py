"""Runs that an older version began (old_runs.zip, by commit a9d60d8 of 18 November 2026) go on with this one.

`simulated` was stopped after round 3 of 5, `federation` (its sites in memory, with what they keep) after round 2 of 4.
If a change makes these tests fail, the format of run directories has changed: raise FORMAT in server/run_directory.py,
say so in docs/upgrading.md, and test the refusal here.
"""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import seal
from fedtailor.engines.channel import InMemory
from fedtailor.engines.result import RunResult
from fedtailor.sites.coordinator import Coordinator
from fedtailor.sites.local_site import LocalSite
from fedtailor.sites.plan import read_plan
from fedtailor.sites.site_file import read_site

TOLERANCE = 1e-4  # of losses: another kind of processor rounds differently


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with zipfile.ZipFile(Path(__file__).with_name("old_runs.zip")) as archive:
        archive.extractall(tmp_path / "old")
    return tmp_path / "old"


def samples() -> list[tuple[Any, Any]]:
    """The data of the simulated run."""
    row, column = np.arange(24)[:, None], np.arange(4)[None]
    found = []
    for client in range(3):
        x = (((7 * row + 13 * column + 5 * client) % 17 - 8) / 8).astype(np.float32)
        found.append((x, (x[:, 0] + x[:, 2] > client / 3).astype(np.int64)))
    return found


def losses(result: RunResult) -> list[float | None]:
    return [record.loss for record in result.rounds]


def test_a_simulation_goes_on(old: Path) -> None:
    result = ft.resume(old / "simulated", data=samples())
    settings: dict[str, Any] = {"model": "mlp:3", "rounds": 5, "lr": 0.05, "seed": 1, "epochs": 1}
    anew = ft.run("pgfed", data=samples(), engine="in-process", **settings)
    assert losses(result) == pytest.approx(losses(anew), abs=TOLERANCE)
    assert len(losses(result)) == 5


def test_a_federation_goes_on_with_the_states_of_its_sites(old: Path, tmp_path: Path) -> None:
    root = old / "federation"
    plan = read_plan(root / "federation.toml")

    def run(out: Path, private: str) -> RunResult:
        """Run the plan; `private` is where sites keep their states."""
        sites = {
            name: LocalSite(read_site(root / name / "site.toml").model_copy(update={"directory": private}), plan)
            for name in plan.sites
        }
        return Coordinator(plan, out, InMemory(sites)).run()

    result, anew = run(root / "run", "private"), run(tmp_path / "anew", "elsewhere")
    assert losses(result) == pytest.approx(losses(anew), abs=TOLERANCE)
    assert len(losses(result)) == 4
    assert [record.failed for record in result.rounds] == [[]] * 4
    assert len(list(root.glob("*/private/models/*.safetensors"))) == 3


def test_a_run_in_another_format_is_refused_in_one_sentence(old: Path) -> None:
    file = old / "simulated" / "about.json"
    content = {**json.loads(file.read_text("utf-8")), "format": 2}
    content.pop("checksum")
    file.write_bytes(seal(content, pretty=True))
    with pytest.raises(FedtailorError) as refused:
        ft.resume(old / "simulated", data=samples())
    assert str(refused.value) == (
        f"The run in {old / 'simulated'} was made by fedtailor 0.1.0 in another format (2, not 1): use that version, "
        "or run its experiment.toml again."
    )
