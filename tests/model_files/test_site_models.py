"""A site's own model file: what it writes from its own samples is what `export` writes from those of all."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedtailor as ft
from fedtailor.client.sites import Site
from fedtailor.data import FederatedData
from fedtailor.model_files.description import write_site_model
from fedtailor.model_files.format import read_model
from fedtailor.model_files.prediction import Model
from tests.hospitals import patients, write

pytestmark = pytest.mark.filterwarnings("ignore:The column '(patient_id|admitted)':UserWarning")
NAMES = ("north", "south", "west")
TABLE: dict[str, Any] = {"label_column": "diagnosis", "client_column": "hospital", "model": "mlp:16"}


def alone(data: FederatedData, client: int) -> FederatedData:
    """Keep the samples of one client, and the names of all."""
    start, *_, end = data.places[client]
    bounds = torch.zeros_like(data.bounds)
    bounds[client] = data.bounds[client] - start
    return replace(data, x=data.x[start:end], y=data.y[start:end], bounds=bounds)


def written(result: ft.RunResult, client: int, stem: Path, **more: Any) -> Path:
    """The model file that a site of this run writes."""
    simulation = result.simulation
    theta, own = result.personal_vector(client), alone(result.data, client)
    site = Site(client, own.client(client), simulation.terms)
    measured = site.measure(site.network_at(theta))
    files = write_site_model(
        stem, result.experiment, simulation.terms, own, client, theta, measured, simulation.finished, **more
    )
    assert [file.suffix for file in files] == [".safetensors", ".json"]
    return files[0]


def same_but_for_the_words(one: Path, other: Path) -> None:
    texts = [file.with_suffix(".json").read_text().splitlines() for file in (one, other)]
    assert [(a, b) for a, b in zip(*texts, strict=True) if a != b and '"measured"' not in a] == []
    contents = [file.read_bytes() for file in (one, other)]
    lengths = [int.from_bytes(content[:8], "little") for content in contents]
    assert contents[0][8 + lengths[0] :] == contents[1][8 + lengths[1] :]
    for file, text in zip((one, other), texts, strict=True):
        assert read_model(file)[0].model_dump_json(indent=2) == "\n".join(text)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("ditto", {}),
        ("fedavg", {"fine_tune": 1, "metric": "auc"}),
        ("fedper", {"preprocessing": "per-client", "dtype": "float64"}),
    ],
)
def test_a_site_writes_the_file_that_export_writes(method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "hospitals.csv", patients(NAMES, 60))
    path = tmp_path / "hospitals.csv"
    result = ft.run(method, data=path, **TABLE, rounds=2, engine="in-process", **settings)
    exported = ft.export(result, to=tmp_path / "models")
    for client, name in enumerate(NAMES):
        own = written(result, client, tmp_path / name / f"client-{client}-{name}")
        same_but_for_the_words(own, exported[client])
        assert "at export" not in (words := json.loads(own.with_suffix(".json").read_text())["measured"])
        assert words == "on the site's own test samples, measured there"


def test_labels_of_a_sites_own_are_in_its_file(tmp_path: Path) -> None:
    result = ft.run(
        "fedrep", data="digits", clients=4, partition="classes:2", labels="own", model="mlp:8", rounds=2,
        engine="in-process",
    )  # fmt: skip
    (exported,) = ft.export(result, client=3, to=tmp_path / "models")
    own = written(result, 3, tmp_path / "site" / "client-3")
    same_but_for_the_words(own, exported)
    assert read_model(own)[0].classes == result.data.own_names[3]


def test_a_site_predicts_with_its_own_file(tmp_path: Path) -> None:
    """Its table has the label in a column of another name, which its file says."""
    write(tmp_path / "hospitals.csv", patients(NAMES, 60))
    result = ft.run("ditto", data=tmp_path / "hospitals.csv", **TABLE, rounds=2, engine="in-process")
    own = {"label_column": "outcome", "client_column": None}
    file = written(result, 1, tmp_path / "site" / "trial", columns=own)
    rows = [{**row, "outcome": row["diagnosis"]} for row in patients(("south",), 30, seed=5)]
    write(tmp_path / "new.csv", rows, ["outcome", "smoker", "ward", "patient_id", "age", "income"])
    reader = Model(file)
    samples = reader.of_data(reader.load(str(tmp_path / "new.csv"), None))
    found = reader.predict(samples.inputs, samples.labels)
    assert found.accuracy == sum(row["outcome"] == one for row, one in zip(rows, found.predicted, strict=True)) / 30
    assert load_file(file).keys() == result.personal(1).keys()
    assert read_model(file)[0].experiment == result_hash(result, tmp_path)


def result_hash(result: ft.RunResult, path: Path) -> str:
    """The checksum of the experiment in an exported file."""
    return read_model(ft.export(result, client=1, to=path / "exported")[0])[0].experiment
