"""The example of a federation: its tables are as documented, its files are valid, and all of it runs."""

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import fedtailor as ft
from examples.hospitals.make_data import COLUMNS, HOSPITALS, LABEL, LATER, NEW, draw, log_odds, make, probability
from fedtailor.engines.channel import InMemory
from fedtailor.sites.coordinator import Coordinator
from fedtailor.sites.local_site import LocalSite
from fedtailor.sites.plan import read_plan
from fedtailor.sites.site_file import read_site
from tests.cli.calling import Call, call
from tests.sites.loopback import impossible

__all__ = ["call"]

EXAMPLE = Path(__file__).parent.parent / "examples" / "hospitals"
SITES = [name for name in HOSPITALS if name not in LATER]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hospitals")
    make(directory)
    return directory


def read(path: Path, separator: str = ",") -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter=separator))


@pytest.mark.parametrize("name", HOSPITALS)
def test_tables_are_as_documented(made: Path, name: str) -> None:
    hospital = HOSPITALS[name]
    rows = read(made / name / "patients.csv", hospital.separator)
    assert len(rows) == hospital.patients
    assert len(read(made / name / "new-patients.csv", hospital.separator)) == NEW
    assert {*rows[0]} - {"patient_id"} == {*COLUMNS, LABEL}
    assert abs(np.mean([row[LABEL] == "yes" for row in rows]) - hospital.ill) < 0.1
    for column in COLUMNS:
        missing = np.mean([row[column] == "" for row in rows])
        expected = hospital.missing.get(column, 0)
        assert abs(missing - expected) < 0.1
        assert (missing > 0) == (expected > 0)


def test_hospitals_write_in_their_own_ways(made: Path) -> None:
    assert [hospital.patients for hospital in HOSPITALS.values()] == [300, 290, 120, 200, 90]
    hill = (made / "hill" / "patients.csv").read_text("utf-8")
    assert ";" in hill.splitlines()[0]
    assert all("," in row["st_depression"] or row["st_depression"].isdigit() for row in read_hill(made))
    assert np.mean([row["vessels"] == "" for row in read(made / "lake" / "patients.csv")]) > 0.7
    valley = read(made / "valley" / "patients.csv")
    assert [*valley[0]] == ["patient_id", LABEL, *reversed(COLUMNS)]
    assert len({row["patient_id"] for row in valley}) == len(valley)
    for name, rows in (("harbour", read(made / "harbour" / "patients.csv")), ("valley", valley)):
        mean = np.mean([float(row["cholesterol"]) for row in rows])
        assert (mean > 200) == (name == "harbour")
        assert (mean < 10) == (name == "valley")  # mmol/l


def read_hill(made: Path) -> list[dict[str, str]]:
    return read(made / "hill" / "patients.csv", ";")


def test_the_table_for_simulations_has_the_same_patients(made: Path) -> None:
    together = read(made / "all.csv")
    assert [row["hospital"] for row in together] == [n for n in SITES for _ in range(HOSPITALS[n].patients)]
    of_hill = [row for row in together if row["hospital"] == "hill"]
    assert [row["st_depression"] for row in of_hill] == [
        row["st_depression"].replace(",", ".") for row in read_hill(made)
    ]
    of_valley = [row for row in together if row["hospital"] == "valley"]
    assert [row["age"] for row in of_valley] == [row["age"] for row in read(made / "valley" / "patients.csv")]


def test_the_same_seed_gives_the_same_files(made: Path, tmp_path: Path) -> None:
    make(tmp_path)
    for path in made.rglob("*.csv"):
        assert path.read_bytes() == (tmp_path / path.relative_to(made)).read_bytes()


def test_hospitals_have_truths_of_their_own() -> None:
    """By the common rule, more than one in ten patients would get another answer at each hospital but the first."""
    common = HOSPITALS["harbour"]
    for name, hospital in HOSPITALS.items():
        table = draw(hospital, 5000, np.random.default_rng(1))
        own = probability(hospital, table)
        assert abs(own.mean() - hospital.ill) < 0.02
        by_common = log_odds(common, table)
        answered = by_common > np.quantile(by_common, 1 - hospital.ill)  # as many ill ones
        others = np.mean(answered != (own > np.quantile(own, 1 - hospital.ill)))
        assert (others > 0.1) == (name != "harbour"), name


def test_the_plan_and_the_sites_files_are_valid() -> None:
    plan = read_plan(EXAMPLE / "federation.toml")
    assert list(plan.sites) == SITES
    assert plan.features is not None
    assert list(plan.features) == COLUMNS
    assert {path.parent.name for path in EXAMPLE.glob("*/site.toml")} == set(SITES)
    for name in SITES:
        assert read_site(EXAMPLE / name / "site.toml").name == name


@pytest.mark.parametrize("name", SITES)
def test_every_hospital_can_join(made: Path, call: Call, tmp_path: Path, name: str) -> None:
    for file in (EXAMPLE / name / "site.toml", EXAMPLE / "federation.toml", made / name / "patients.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    answer = call("site", "check", "site.toml")
    assert answer.code == 0, answer.out + answer.err
    assert "The site can join." in answer.out


def test_the_federation_learns_what_a_simulation_of_the_same_tables_does(made: Path, tmp_path: Path) -> None:
    """Other separators, other columns' order and an id make no difference: the same models, to the bit."""
    plan_text = (EXAMPLE / "federation.toml").read_text("utf-8").replace("rounds = 30", "rounds = 3")
    sites = {}
    for name in SITES:
        here = tmp_path / name
        here.mkdir()
        (here / "federation.toml").write_text(plan_text, "utf-8")
        for file in (EXAMPLE / name / "site.toml", made / name / "patients.csv"):
            (here / file.name).write_bytes(file.read_bytes())
        sites[name] = LocalSite(read_site(here / "site.toml"))
    plan = read_plan(tmp_path / SITES[0] / "federation.toml")
    Coordinator(plan, tmp_path / "run", InMemory(sites)).run()

    tables = {name: pd.read_csv(made / name / "patients.csv", sep=None, engine="python") for name in SITES}
    tables["hill"]["st_depression"] = tables["hill"]["st_depression"].str.replace(",", ".").astype(float)
    same = {name: table[[*COLUMNS, LABEL]] for name, table in tables.items()}
    settings = {**plan.experiment, "split": "hash", "rare": plan.privacy.rare, "engine": "in-process"}
    simulated = ft.run(data=same, label_column=LABEL, **settings)
    for number, name in enumerate(SITES):
        (file,) = (tmp_path / name / "private" / "models").glob("*.safetensors")
        own = simulated.personal(number)
        assert {key: torch.equal(value, own[key]) for key, value in load_file(file).items()} == dict.fromkeys(own, True)


@pytest.mark.sites
@pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="NVFlare is not installed")
@pytest.mark.skipif(bool(impossible()), reason=impossible())
def test_the_whole_federation_runs_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """What `make hospitals` does."""
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "COLUMNS": "110"}
    run = [sys.executable, str(EXAMPLE / "run.py"), str(tmp_path / "run")]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Done: 30 rounds." in done.stdout
    assert done.stdout.count("Accuracy: ") == 2
    for name in SITES:
        assert len(list((tmp_path / "run" / name / "private" / "models").glob("*.safetensors"))) == 1
    assert (tmp_path / "run" / "coordinator" / "runs" / "heart" / "result.json").is_file()
    assert not (tmp_path / "home" / ".nvflare").exists()
    assert processes_of(tmp_path) == []


def processes_of(directory: Path) -> list[str]:
    """The processes that work in a directory, or name it."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
            here = os.readlink(process / "cwd")
        except OSError:  # it has ended, or is no process
            continue
        if str(directory) in words or here.startswith(str(directory)):
            found.append(words)
    return found
