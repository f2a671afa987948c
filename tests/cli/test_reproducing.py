"""`fedtailor presets` and `fedtailor reproduce`, on a small file in Fashion-MNIST's format."""

import json
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedtailor.cli import display
from fedtailor.studies.presets import find_preset, presets
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


@pytest.mark.parametrize("name", presets())
def test_a_preset_fits_a_terminal_of_80_columns(name: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """No number is broken in two."""
    monkeypatch.setattr(display.out, "width", 80)
    shown = done(call("presets", name)).split("Settings:")[0].replace("±", " ± ").replace("  ", " ").splitlines()
    preset = find_preset(name)
    assert max(map(len, done(call("presets", name)).splitlines())) <= 80
    for row in preset.rows:
        title, numbers = row.title, [number for number in row.theirs if number]
        assert any(title in line and all(" ".join(number.split()) in " ".join(line.split()) for number in numbers)
                   for line in shown), title  # fmt: skip


def test_speedups_and_rows_that_are_not_in_the_paper_are_shown(call: Call) -> None:
    assert "31 (1.0×)  47 (1.0×)  63 (1.0×)" in done(call("presets", "pgfed/table2"))
    assert "Not in the paper's table or figure: fedavg, fine-tuned" in done(call("presets", "fedacs/figure1a-cifar10"))


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


def test_tables_beside_the_main_one_are_printed(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a preset on small data: both curves of Figure 4, the figure's files, and the last round of a table."""
    small = {"data": "digits", "model": "mlp:8", "rounds": 2, "max_train": 20, "engine": "in-process"}
    evaluation = {"model": "global", "clients": "new", "fine_tune": 2, "every": 2, "choose": "last"}
    figure = find_preset("pgfed/figure4-cifar10").of_rows(["local", "fedavg"])
    figure = replace(figure, settings={**small, "clients": 4, "new_clients": 2, "evaluation": evaluation})
    table = find_preset("pgfed/table1-cifar10-25").of_rows(["fedper", "pgfed-mu0"])
    table = replace(table, settings={**small, "evaluation": {"choose": "best-test"}}, columns={"25": {"clients": 4}})
    monkeypatch.setattr("fedtailor.studies.presets.find_preset", {"figure": figure, "table": table}.__getitem__)
    printed = done(call("reproduce", "figure"))
    assert "Mean test accuracy in % after each epoch" in printed
    curve = json.loads(Path("reproductions/pgfed-figure4-cifar10.json").read_text())["rows"][1]["curve"]
    assert len(curve) == 3
    assert all(f"{value:.2f}" in printed for value in curve)
    if find_spec("matplotlib"):
        assert "Recorded in reproductions/pgfed-figure4-cifar10.md, .json, .png, .pdf, .svg" in printed
        assert Path("reproductions/pgfed-figure4-cifar10.pdf").is_file()
    printed = done(call("reproduce", "table"))
    assert "Ours in the last round, not the best on test data" in printed
    last = json.loads(Path("reproductions/pgfed-table1-cifar10-25.json").read_text())["rows"][0]["cells"][0]["last"]
    assert f"{last:.2f}" in printed.partition("Ours in the last round")[2]
    assert "Not in the paper's table or figure: pgfed, μ = 0." in printed


def test_settings_over_a_preset_are_in_its_runs_and_said(fashion: Call, tmp_path: Path) -> None:
    words = ["reproduce", HIGH, "--only", "pflego", "--rounds", "2", "--out", str(tmp_path / "out")]
    shown = done(fashion(*words, "--set", "max_train=20", "--set", "inner_steps=3", "--set", "model=mlp:8"))
    said = "Shortened: 2 of 200 rounds. Changed: max_train = 20, parameters.inner_steps = 3, model = mlp:8."
    assert said in " ".join(shown.split())
    (run,) = (tmp_path / "out" / "pflego").iterdir()
    experiment = tomllib.loads((run / "experiment.toml").read_text())
    assert experiment["max_train"] == 20
    assert experiment["model"] == "mlp:8"
    assert experiment["parameters"]["inner_steps"] == 3
    assert experiment["parameters"]["head_lr"] == 0.007  # what is not set stays the preset's
    assert json.loads((tmp_path / "out" / "pflego-table1-fmnist-high.json").read_text())["changed"]["max_train"] == 20


@pytest.mark.parametrize(("assignment", "said"), [
    ("inner_step=3", "did you mean 'inner_steps'"), ("seed=1", "seeds by --seeds"), ("lr", "name=value"),
    ("max_train=-1", "max_train"),
])  # fmt: skip
def test_wrong_settings_over_a_preset(assignment: str, said: str, fashion: Call) -> None:
    assert said in refusal(fashion, "reproduce", HIGH, "--only", "pflego", "--set", assignment)
