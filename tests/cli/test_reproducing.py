"""`fedtailor presets` and `fedtailor reproduce`, on a small file in Fashion-MNIST's format."""

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.cli.calling import Call, done, refusal
from tests.data.files import write_idx

HIGH = "pflego/table1-fmnist-high"


@pytest.fixture
def fashion(tmp_path: Path, call: Call) -> Call:
    """The digits as Fashion-MNIST would be published; `call` looks for data there."""
    x, y = load_digits(return_X_y=True)
    images = np.zeros((len(x), 28, 28), dtype=np.uint8)
    images[:, 2:26, 2:26] = (x.reshape(-1, 8, 8) * 15).astype(np.uint8).repeat(3, 1).repeat(3, 2)
    for name, piece in (("train", slice(0, 1500)), ("t10k", slice(1500, None))):
        folder = tmp_path / "data" / "fashion-mnist"
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", images[piece], packed=True)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", y[piece].astype(np.uint8), packed=True)
    return call


def test_presets_are_listed_and_shown(call: Call) -> None:
    listed = done(call("presets"))
    assert "pgfed/table2" in listed
    assert "rounds to a mean personalized accuracy of 70 %" in listed
    shown = done(call("presets", HIGH))
    assert "96.34 ± 0.43" in shown
    assert 'partition": "classes:2"' in shown or "'partition': 'classes:2'" in shown
    names = {preset["name"] for preset in json.loads(done(call("presets", "--json")))}
    assert {"pgfed/figure2", "pfedmb/table1", "fedacs/table1", "pflego/figure6"} <= names


def test_reproduce_says_its_cost_then_prints_ours_beside_theirs(fashion: Call) -> None:
    told = done(fashion("reproduce", HIGH, "--rounds", 2, "--cost"))
    assert "3 runs of 2 rounds. To be trained on: " in told
    assert not Path("reproductions").exists()
    printed = done(fashion("reproduce", HIGH, "--rounds", 2, "--workers", 1, "--only", "pflego", "--only", "fedper"))
    assert "Shortened: 2 of 200 rounds" in printed
    outcome = json.loads(Path("reproductions/pflego-table1-fmnist-high.json").read_text())
    assert [row["row"] for row in outcome["rows"]] == ["fedper", "pflego"]
    ours, paper = outcome["rows"][1]["cells"][0]["ours"], outcome["rows"][1]["cells"][0]["paper"]
    assert paper == "96.34 ± 0.43"
    assert f"{ours:.2f}" in printed
    assert f"| pflego | {ours:.2f} | {paper} |" in Path("reproductions/pflego-table1-fmnist-high.md").read_text()
    again = done(fashion("reproduce", HIGH, "--rounds", 2, "--only", "pflego"))
    assert "1 run of 2 rounds, 1 of them done already. To be trained on: 0 samples, about 0 s" in again
    assert f"{ours:.2f}" in again


def test_mistakes_are_refused(call: Call) -> None:
    assert "did you mean 'pgfed/table2'" in refusal(call, "reproduce", "pgfed/table22")
    assert "did you mean 'pgfedmo'" in refusal(call, "reproduce", "pgfed/table2", "--only", "pgfedm0")
    assert "fashion-mnist" in refusal(call, "reproduce", HIGH, "--rounds", 2)  # the data are not there
    assert "OfficeHome" in refusal(call, "reproduce", "pgfed/office-home", "--only", "local")
