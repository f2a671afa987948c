"""Models of tables: columns are matched by name, and the preprocessing is part of the model file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fedtailor as ft
from fedtailor.data import load
from fedtailor.data.matched_columns import match
from fedtailor.model_files.format import HEADER, Description, read_model
from tests.hospitals import patients, write

pytestmark = pytest.mark.filterwarnings("ignore:The column '(patient_id|admitted)':UserWarning")
SETTINGS: dict[str, Any] = {"label_column": "diagnosis", "client_column": "hospital", "model": "mlp:16", "rounds": 2,
                            "engine": "in-process"}  # fmt: skip
RAW = ["age", "income", "ward", "smoker"]


def columns(rows: list[dict[str, Any]], *names: str) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in names}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ft.RunResult:
    path = tmp_path_factory.mktemp("table")
    write(path / "hospitals.csv", patients(("north", "south", "west"), 60))
    with pytest.warns(UserWarning, match="'patient_id' of hospitals.csv is ignored: it looks like an id"):
        return ft.run("ditto", data=path / "hospitals.csv", **SETTINGS, out=path / "run")


@pytest.fixture(scope="module")
def file(run: ft.RunResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ft.export(run, client="south", to=tmp_path_factory.mktemp("models"))[0]


NEW = patients(("south",), 40, seed=7)


def test_a_path_and_a_loaded_data_set_are_taken_as_on_the_command_line(file: Path, tmp_path: Path) -> None:
    wanted = ft.predict(file, columns(NEW, *RAW)).outputs
    write(tmp_path / "new.csv", NEW)
    loaded = load(tmp_path / "new.csv", label_column="diagnosis", client_column="hospital")
    for given in (tmp_path / "new.csv", str(tmp_path / "new.csv"), loaded):
        found = ft.predict(file, given)
        assert torch.equal(found.outputs, wanted)
        assert found.labels == [row["diagnosis"] for row in NEW]


def test_the_order_of_columns_does_not_matter(file: Path) -> None:
    pandas = pytest.importorskip("pandas")
    wanted = ft.predict(file, columns(NEW, *RAW)).outputs
    for order in (RAW[::-1], ["smoker", "patient_id", "age", "admitted", "ward", "hospital", "income"]):
        assert torch.equal(ft.predict(file, columns(NEW, *order)).outputs, wanted)
    frame = pandas.DataFrame(NEW)
    found = ft.predict(file, frame)
    assert torch.equal(found.outputs, wanted)
    assert found.accuracy == np.mean([row["diagnosis"] == one for row, one in zip(NEW, found.predicted, strict=True)])
    texts = frame[RAW].to_numpy(dtype=object)  # without names: in the order of training
    assert torch.equal(ft.predict(file, texts).outputs, wanted)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"age": None}, "'x' has no column 'age', which the model was trained with"),
        ({"bmi": ["1"] * 40}, "'x' has a column 'bmi', which the model was not trained with"),
        ({"income": ["1"] * 39 + [""]}, "nothing in column 'income' in 1 samples, the first is sample 39"),
        ({"income": np.full(40, np.nan)}, "nothing in column 'income' in 40 samples"),
        ({"ward": ["icu"] * 39 + ["NA"]}, "nothing in column 'ward' in 1 samples"),
        ({"income": ["1"] * 39 + ["much"]}, "Row 39 of the table has 'much' in column 'income': give a number"),
        ({"age": ["inf"] * 40}, "The column 'age' of 'x' has inf in sample 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(file: Path, changes: dict[str, Any], said: str) -> None:
    given = {name: cells for name, cells in {**columns(NEW, *RAW), **changes}.items() if cells is not None}
    with pytest.raises(ft.FedtailorError, match=said):
        ft.predict(file, given)


def test_arrays_have_the_raw_columns_in_their_order(run: ft.RunResult, file: Path, tmp_path: Path) -> None:
    write(tmp_path / "new.csv", NEW)
    table, data = run.data.preprocessing, load(str(tmp_path / "new.csv"), label_column="diagnosis")
    assert table is not None
    named = [column for column in data.columns if column.name in RAW]
    raw, _ = match(table, data.x.numpy()[:, [data.columns.index(column) for column in named]], named, "new")
    wanted = ft.predict(file, columns(NEW, *RAW)).outputs
    assert torch.equal(ft.predict(file, raw).outputs, wanted)
    for other, said in (
        (table.transform(raw), "have the shape 9, but the model was trained with the 4 columns age, income, ward"),
        (np.where(raw == 2, 7, raw), "The column 'ward' of 'x' has 7"),
        (np.where(np.arange(4) == 1, np.nan, raw), "nothing in column 'income' in 40 samples"),
        (np.where(np.arange(4) == 1, np.inf, raw), "The column 'income' of 'x' has inf"),
    ):
        with pytest.raises(ft.FedtailorError, match=said):
            ft.predict(file, other)


def test_a_feature_may_be_called_like_a_label_or_a_client(tmp_path: Path) -> None:
    rows = [{**row, "class": row["ward"], "client": row["income"]} for row in patients(("north", "south"), 40)]
    names = ["age", "class", "client", "diagnosis", "hospital"]
    write(tmp_path / "own.csv", rows, names)
    (file, _) = ft.export(ft.run("fedavg", data=tmp_path / "own.csv", **SETTINGS), to=tmp_path)
    wanted = ft.predict(file, columns(rows, *names))
    assert torch.equal(ft.predict(file, columns(rows, "client", "class", "age")).outputs, wanted.outputs)


def test_values_that_training_did_not_have_are_said(file: Path) -> None:
    strange = {**columns(NEW, *RAW), "ward": ["tent"] * 3 + ["icu"] * 37}
    with pytest.warns(UserWarning, match=r"'ward' have values that training did not have \(3 cells: tent\)"):
        found = ft.predict(file, strange)
    table = read_model(file)[0].table
    assert table is not None
    raw = np.array([[np.nan, float(row["income"]), -1, np.nan] for row in NEW[:1]])
    x = torch.from_numpy(table.transform(raw)).float()
    with pytest.warns(UserWarning, match="did not have"):
        blank = ft.predict(file, {**columns(NEW[:1], *RAW), "age": [""], "ward": ["tent"], "smoker": [""]})
    assert torch.equal(blank.outputs, ft.load_model(file)(x).detach())
    assert len(found.outputs) == 40


def test_the_file_alone_is_enough_for_plain_pytorch(run: ft.RunResult, file: Path) -> None:
    """By the words of its description, and no code of ours."""
    about = json.loads(file.with_suffix(".json").read_text())
    assert about["table"]["ignored"] == ["patient_id", "admitted"]
    assert "the features that `table` describes" in about["load"][2]
    assert about["preprocessing"].endswith(
        "In this order: age, income, age is missing, ward=icu, ward=medicine, ward=surgery, smoker=no, smoker=yes, "
        "smoker is missing."
    )
    named = {column["name"]: column for column in about["table"]["columns"]}
    x = []
    for row in NEW:
        scaled = [
            (float(row[name]) - named[name]["mean"]) / named[name]["scale"] if row[name] else 0.0
            for name in ("age", "income")
        ]
        ward = [float(row["ward"] == value) for value in named["ward"]["values"]]
        smoker = [float(row["smoker"] == value) for value in [*named["smoker"]["values"], "NA"]]
        x.append([*scaled, float(not row["age"]), *ward, *smoker])
    names: dict[str, Any] = {}
    lines = [line.replace(file.name, str(file)) for line in about["load"]]
    exec("\n".join(lines), names)
    assert torch.equal(names["model"](torch.tensor(x)), ft.predict(file, columns(NEW, *RAW)).outputs)


def test_onnx_takes_the_columns_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    write(tmp_path / "hospitals.csv", patients(("north", "south"), 60))
    settings = {**SETTINGS, "data": tmp_path / "hospitals.csv", "preprocessing": "per-client"}
    for file in ft.export(ft.run("fedavg", **settings), to=tmp_path, onnx=True):
        session = runtime.InferenceSession(file.with_suffix(".onnx").read_bytes())
        about = Description.model_validate_json(session.get_modelmeta().custom_metadata_map[HEADER])
        assert about.table is not None
        places = [
            {"": np.nan, "NA": np.nan, **{value: code for code, value in enumerate(column.values)}}
            for column in about.table.columns
        ]
        names = [column.name for column in about.table.columns]
        raw = [
            [of[row[n]] if row[n] in of else float(row[n]) for n, of in zip(names, places, strict=True)] for row in NEW
        ]
        wanted = ft.predict(file, columns(NEW, *RAW)).outputs
        for samples in (1, 40):
            (found,) = session.run(None, {"x": np.array(raw[:samples])})
            assert torch.allclose(torch.from_numpy(found), wanted[:samples], atol=1e-5)


def test_each_hospital_may_have_its_own_constants(tmp_path: Path) -> None:
    write(tmp_path / "hospitals.csv", patients(("north", "south", "west"), 60))
    settings = {**SETTINGS, "data": tmp_path / "hospitals.csv", "preprocessing": "per-client"}
    result = ft.run("fedavg", **settings)
    north, south, west = ft.export(result, to=tmp_path / "models")
    (whole,) = ft.export(result, global_model=True, to=tmp_path / "models")
    means = [read_model(file)[0].table.columns[1].mean for file in (north, south, west, whole)]  # type: ignore[union-attr]
    assert len(set(means)) == 4
    assert means[3] == pytest.approx(np.mean(means[:3]), rel=1e-12)  # equally large
    new = patients(("east",), 50, seed=3)
    for row in new:
        row["income"] = str(10 * float(row["income"]))  # in another currency
    write(tmp_path / "east.csv", new)
    adapted = ft.adapt(result, data=tmp_path / "east.csv", epochs=1, to=tmp_path / "new").per_client[0]
    about = read_model(tmp_path / "new" / "adapted-0-east.safetensors")[0]
    assert about.table is not None
    assert 8 < about.table.columns[1].mean / means[3] < 12
    assert adapted.name == "east"


def test_a_new_hospital_gets_the_runs_constants(run: ft.RunResult, file: Path, tmp_path: Path) -> None:
    rows = patients(("east",), 50, seed=3)
    write(tmp_path / "east.csv", rows, ["ward", "diagnosis", "income", "smoker", "age", "hospital"], ";")
    outcome = ft.adapt(run, data=tmp_path / "east.csv", epochs=1, to=tmp_path / "new")
    model = tmp_path / "new" / "adapted-0-east.safetensors"
    assert read_model(model)[0].table == read_model(file)[0].table
    assert outcome.per_client[0].n_train == 35
    assert torch.equal(torch.isfinite(ft.predict(model, columns(rows, *RAW)).outputs), torch.ones(50, 2).bool())
    pandas = pytest.importorskip("pandas")
    again = ft.adapt(run, data=pandas.DataFrame(rows), epochs=1)
    assert again.per_client == outcome.per_client
    write(tmp_path / "east.csv", rows, ["ward", "diagnosis", "smoker", "age", "hospital"])
    with pytest.raises(ft.FedtailorError, match=r"'east.csv' has no column 'income'"):
        ft.adapt(run, data=tmp_path / "east.csv")


def test_a_run_goes_on_with_the_same_constants_alone(run: ft.RunResult, tmp_path: Path) -> None:
    assert run.path is not None
    recorded = json.loads((run.path / "partition.json").read_text())["preprocessing"]
    assert run.data.preprocessing is not None
    assert recorded == run.data.preprocessing.model_dump(mode="json")
    write(tmp_path / "hospitals.csv", patients(("north", "south", "west"), 60))
    ft.run("fedavg", data=tmp_path / "hospitals.csv", **SETTINGS, out=tmp_path / "run")
    longer = ft.resume(tmp_path / "run", rounds=4)
    assert longer.accuracy == ft.run("fedavg", data=tmp_path / "hospitals.csv", **{**SETTINGS, "rounds": 4}).accuracy
    rows = patients(("north", "south", "west"), 60)
    for row in rows:
        row["income"] = str(float(row["income"]) + 1)
    write(tmp_path / "hospitals.csv", rows)
    with pytest.raises(ft.FedtailorError, match="The preprocessing is not that of the run"):
        ft.resume(tmp_path / "run", rounds=6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"columns": []},
        {"how": "odd"},
        {"columns": [{"name": "a", "kind": "number"}]},
        {"columns": [{"name": "a", "kind": "number", "scale": 0}] * 9},
        {"columns": [{"name": f"{k}", "kind": "number", "scale": 0} for k in range(9)]},
        {"columns": [{"name": f"{k}", "kind": "number", "mean": 1e999} for k in range(9)]},
        {"columns": [{"name": "a", "kind": "category", "values": ["x"] * 9}]},
        {"columns": [{"name": "a", "kind": "category"}]},
        {"columns": [{"name": "a", "kind": "text", "values": list("abcdefghi")}]},
    ],
)
def test_tables_that_cannot_be_are_refused(file: Path, tmp_path: Path, wrong: dict[str, Any]) -> None:
    about, state = read_model(file)
    plain = json.loads(about.model_dump_json())
    plain["table"] = {**plain["table"], **wrong}
    save_file(state, tmp_path / "wrong.safetensors", {HEADER: json.dumps(plain)})
    with pytest.raises(ft.FedtailorError, match="is no model that fedtailor exported"):
        ft.predict(tmp_path / "wrong.safetensors", columns(NEW, *RAW))


@pytest.mark.parametrize("engine", ["in-process", "processes"])
def test_real_tables_are_learned(tmp_path: Path, engine: Any) -> None:
    """Columns from 0.001 to 4,000: without standardisation this was a constant predictor."""
    from sklearn.datasets import load_breast_cancer

    pytest.importorskip("pandas")
    load_breast_cancer(as_frame=True).frame.to_csv(tmp_path / "cancer.csv", index=False)
    result = ft.run("fedavg", data=tmp_path / "cancer.csv", clients=5, rounds=8, engine=engine, workers=2)
    assert result.accuracy is not None
    assert result.accuracy > 0.93
