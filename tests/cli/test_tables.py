"""From a hospital's file to its model and to predictions, with commands alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.calling import Call, done, refusal
from tests.hospitals import patients, write

COLUMNS = ("--label-column", "diagnosis", "--client-column", "hospital")
RUN = ("run", "ditto", "--data", "hospitals.csv", *COLUMNS, "--rounds", 6, "--engine", "in-process", "--out", "runs/it")


@pytest.fixture
def hospitals(call: Call) -> list[dict[str, Any]]:
    rows = patients(("north", "south", "west"), 80)
    write("hospitals.csv", rows, separator=";")
    return rows


def test_from_a_file_to_a_hospitals_model_and_its_predictions(hospitals: list[dict[str, Any]], call: Call) -> None:
    said = done(call("data", "hospitals.csv", *COLUMNS))
    for part in (
        "age         number",
        "ward        category  ",
        "patient_id  ignored",
        "'admitted' of hospitals.csv is",
    ):
        assert part in said
    said = done(call(*RUN))
    wanted = (
        "Table hospitals.csv: numbers age, income; categories ward (3 values), smoker (2 values); ignored patient_id"
    )
    assert wanted in said
    assert "'patient_id' of hospitals.csv is ignored: it looks like an id" in said
    done(call("export", "runs/it", "--client", "south", "--to", "models"))
    model = "models/client-1-south.safetensors"
    new = patients(("south",), 50, seed=9)
    write("new.csv", new)
    answer = json.loads(done(call("predict", model, "--data", "new.csv", "--json")))
    assert answer["accuracy"] > 0.8  # most diagnoses are one of two
    write("reordered.csv", new, ["smoker", "hospital", "ward", "income", "diagnosis", "age"])
    again = json.loads(done(call("predict", model, "--data", "reordered.csv", "--json")))
    assert again["predictions"] == answer["predictions"]  # to the bit
    write("less.csv", new, ["smoker", "ward", "age"])
    assert "'less.csv' has no column 'income'" in refusal(call, "predict", model, "--data", "less.csv")
    for row in new:
        row["bmi"] = "20"
    write("more.csv", new)
    said = refusal(call, "predict", model, "--data", "more.csv")
    assert (
        "has a column 'bmi', which the model was not trained with: leave it out, or say --columns 'bmi=ignore'" in said
    )
    ignored = json.loads(done(call("predict", model, "--data", "more.csv", "--columns", "bmi=ignore", "--json")))
    assert ignored["predictions"] == answer["predictions"]
    write("east.csv", patients(("east",), 60, seed=5), ["hospital", "diagnosis", "ward", "income", "smoker", "age"])
    said = done(call("adapt", "runs/it", "--data", "east.csv", "--epochs", 1, "--to", "east"))
    assert "1 new client" in said
    adapted = json.loads(done(call("predict", "east/adapted-0-east.safetensors", "--data", "new.csv",
                                   "--columns", "admitted=ignore", "--json")))  # fmt: skip
    assert adapted["accuracy"] > 0.8
    same = ("predict", model, "--run", "runs/it", "--client", "south", "--part", "test", "--json")
    assert (
        json.loads(done(call(*same)))["accuracy"]
        == json.loads(Path("models/client-1-south.json").read_text())["accuracy"]
    )


def test_columns_client_by_client_and_for_programs(hospitals: list[dict[str, Any]], call: Call) -> None:
    answer = json.loads(done(call("data", "hospitals.csv", *COLUMNS, "--json")))
    age, income, ward, smoker = answer["columns"]
    present = [float(row["age"]) for row in hospitals if row["age"]]
    assert age["missing"] == len(hospitals) - len(present)
    assert (age["min"], age["max"]) == (min(present), max(present))
    assert age["mean"] == pytest.approx(sum(present) / len(present))
    assert ward["values"] == {
        name: sum(row["ward"] == name for row in hospitals) for name in ("icu", "medicine", "surgery")
    }
    assert (income["missing"], smoker["missing"]) == (0, sum(row["smoker"] == "NA" for row in hospitals))
    assert answer["ignored"] == ["patient_id", "admitted"]
    declared = answer["by_client"]["south"][0]
    assert declared["count"] + declared["missing"] == sum(answer["train"][answer["clients"].index("south")])
    said = done(call("data", "hospitals.csv", *COLUMNS, "--client", "south"))
    assert f"{declared['mean']:.6g} ± " in said
    assert "icu, medicine, surgery" in said
    assert "There is no client 'east'" in refusal(call, "data", "hospitals.csv", *COLUMNS, "--client", "east")
    assert "--client shows the columns of a table" in refusal(call, "data", "digits", "--client", "0")


def test_compare_and_advise_say_what_the_columns_are(hospitals: list[dict[str, Any]], call: Call) -> None:
    words = ("--data", "hospitals.csv", *COLUMNS, "--engine", "in-process", "--columns", "smoker=ignore")
    said = done(call("advise", *words, "--budget", 1, "--method", "local"))
    assert "Table hospitals.csv: numbers age, income; categories ward (3 values); ignored smoker, patient_id" in said
    said = done(call("compare", "local", "fedavg", *words, "--seeds", "0", "--rounds", 1, "--out", "table"))
    assert "Table hospitals.csv: numbers age, income; categories ward (3 values); ignored smoker" in said


@pytest.mark.parametrize("how", ["federated", "per-client"])
def test_a_hospital_joins_with_a_table_of_its_own(how: str, hospitals: list[dict[str, Any]], call: Call) -> None:
    done(call(*RUN, "--preprocessing", how))
    before = json.loads(Path("runs/it/partition.json").read_text())["preprocessing"]
    write("east.csv", patients(("east",), 60, seed=5), ["hospital", "diagnosis", "ward", "income", "smoker", "age"])
    done(call("resume", "runs/it", "--add-client", "east.csv", "--rounds", 8))
    assert json.loads(Path("runs/it/partition.json").read_text())["preprocessing"] == before  # nobody else's changes
    done(call("export", "runs/it", "--client", "east", "--to", "models"))
    model = "models/client-3-east.safetensors"
    table = json.loads(Path("models/client-3-east.json").read_text())["table"]
    own = {column["name"]: column["mean"] for column in table["columns"]}
    assert (own == {column["name"]: column["mean"] for column in before["columns"]}) == (how == "federated")
    of_run = json.loads(done(call("predict", model, "--run", "runs/it", "--client", "east", "--json")))
    of_file = json.loads(done(call("predict", model, "--data", "east.csv", "--json")))

    def rows(answer: dict[str, Any]) -> list[tuple[str, float]]:
        return sorted((row["label"], row["probability"]) for row in answer["predictions"])

    for one, other in zip(rows(of_run), rows(of_file), strict=True):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1], abs=1e-6)


def test_a_regressions_table_is_looked_at_as_one(hospitals: list[dict[str, Any]], call: Call) -> None:
    rows = [{**row, "days": str(number % 9 + 0.5) if number else "NA"} for number, row in enumerate(hospitals)]
    write("stays.csv", rows, separator=";")
    words = (
        "data",
        "stays.csv",
        "--label-column",
        "days",
        "--client-column",
        "hospital",
        "--columns",
        "diagnosis=ignore",
    )
    assert "has 'NA' in column 'days': give a number" in refusal(call, *words, "--loss", "mse")
    assert "hold fractions or NaN" in refusal(call, *words, "--drop-unlabelled")
    asked = (*words, "--loss", "mse", "--drop-unlabelled")
    answer = json.loads(done(call(*asked, "--json")))
    own = [float(row["days"]) for row in rows[1:] if row["hospital"] == "south"]
    (target,) = answer["targets"]["south"]
    assert (target["min"], target["max"]) == (min(own), max(own))
    assert target["mean"] == pytest.approx(sum(own) / len(own))
    said = done(call(*asked))
    assert "Numbers to predict: mean, standard deviation and range" in said
    assert f"1 of the {len(rows)} lines of stays.csv has no label and is left out" in said
    assert any(line.split()[:1] == ["south"] and f"{target['mean']:.6g}" in line for line in said.splitlines())
    assert "There is no loss 'msee'" in refusal(call, *words, "--loss", "msee")
    assert "These options say how a data set is partitioned" in refusal(call, "data", "--loss", "mse")
