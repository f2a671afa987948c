"""`fedtailor export`, `predict` and `adapt`, as a user calls them."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits

import fedtailor as ft
from fedtailor.model_files.format import HEADER
from fedtailor.server.records import RoundRecord
from tests.cli.calling import Call, contents, done, refusal

SMALL: dict[str, Any] = {"data": "digits", "clients": 6, "new_clients": 2, "model": "mlp:16", "rounds": 2,
                         "engine": "in-process", "seed": 1}  # fmt: skip


@pytest.fixture
def run(call: Call) -> ft.RunResult:
    """A run in runs/ditto, below the current directory."""
    return ft.run("ditto", **SMALL, out="runs/ditto")


def test_export_then_predict_gives_the_accuracy_that_show_prints(run: ft.RunResult, call: Call) -> None:
    shown = json.loads(done(call("show", "runs/ditto", "--json")))
    recorded = next(one["accuracy"] for one in shown["per_client"] if one["client"] == 3)
    said = done(call("export", "runs/ditto", "--client", 3, "--to", "models"))
    assert f"accuracy {100 * recorded:.2f} % on the client's own test samples, as the run recorded it" in said
    lines = [line.strip() for line in said.splitlines() if line.startswith("  ")]
    assert lines[2] == "model.load_state_dict(load_file('models/client-3.safetensors'))"
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)  # as printed, from here
    x, y = run.data.client(3).test
    assert (names["model"](x).argmax(1) == y).double().mean().item() == recorded
    words = ("predict", "models/client-3.safetensors", "--run", "runs/ditto", "--client", 3, "--part", "test")
    assert json.loads(done(call(*words, "--json")))["accuracy"] == recorded
    assert f"Accuracy: {100 * recorded:.2f} % of {len(y)} samples" in done(call(*words))


def test_export_of_all_and_of_the_global_model(run: ft.RunResult, call: Call) -> None:
    said = done(call("export", "runs/ditto", "--to", "models"))
    assert f"4 models of ditto in models, mean accuracy {100 * run.accuracy:.2f} %." in said  # type: ignore[operator]
    assert sorted(contents(Path("models"))) == [
        f"client-{number}.{kind}" for number in range(4) for kind in ("json", "safetensors")
    ]
    assert done(call("export", "runs/ditto", "--all", "--to", "models", "--overwrite")) == said
    assert "The global model: ditto, round 2; accuracy" in done(
        call("export", "runs/ditto", "--global", "--to", "models")
    )


def test_an_unfinished_run_is_exported_and_adapted_with_a_note(call: Call) -> None:
    def stop(record: RoundRecord) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.run("ditto", **SMALL, out="runs/short", on_round=stop)
    note = "Note: the run is not finished: this is round 1 of 2, its last checkpoint. Continue with: fedtailor resume"
    assert note in done(call("export", "runs/short", "--to", "models"))
    assert note in done(call("adapt", "runs/short", "--epochs", 1, "--to", "new"))


def test_predictions_of_files_with_and_without_labels(run: ft.RunResult, call: Call) -> None:
    done(call("export", "runs/ditto", "--client", 0, "--to", "."))
    images, labels = load_digits().images / 16, load_digits().target
    np.savez("known.npz", x=images[:30, None], y=labels[:30], client=np.array(["a", "b"])[np.arange(30) % 2])
    np.savez("unknown.npz", x=images[:30, None])
    said = done(call("predict", "client-0.safetensors", "--data", "known.npz", "--out", "out/known.csv"))
    rows = list(csv.DictReader(Path("out/known.csv").read_text().splitlines()))
    assert [row["label"] for row in rows] == [str(label) for label in labels[:30]]
    right = np.mean([row["label"] == row["prediction"] for row in rows])
    assert f"Accuracy: {100 * right:.2f} % of 30 samples" in said
    assert "known.npz: 30 samples, the first 10" in said
    for row in rows:
        each = {name: float(row[f"p({name})"]) for name in "0123456789"}
        assert sum(each.values()) == pytest.approx(1, abs=1e-5)
        assert max(each, key=lambda name: each[name]) == row["prediction"]
        assert float(row["probability"]) == max(each.values())
    answer = json.loads(done(call("predict", "client-0.json", "--data", "unknown.npz", "--json")))
    assert answer["accuracy"] is None
    assert [one["prediction"] for one in answer["predictions"]] == [row["prediction"] for row in rows]
    assert "label" not in answer["predictions"][0]
    half = json.loads(done(call("predict", "client-0.safetensors", "--data", "known.npz", "--client", "b", "--json")))
    assert [one["label"] for one in half["predictions"]] == [str(label) for label in labels[1:30:2]]


def test_predictions_of_tables_and_images_without_labels(call: Call) -> None:
    header = ",".join(f"pixel{number}" for number in range(64))
    rows = [",".join(map(str, row)) for row in load_digits().data[:80]]
    labelled = [
        f"{row},{'odd' if label % 2 else 'even'}" for row, label in zip(rows, load_digits().target, strict=False)
    ]
    Path("train.csv").write_text("\n".join([f"{header},label", *labelled]) + "\n")
    Path("new.csv").write_text("\n".join([header, *rows[:5]]) + "\n")
    ft.run("fedavg", **{**SMALL, "data": "train.csv", "partition": "iid"}, out="runs/table")
    done(call("export", "runs/table", "--global", "--to", "."))
    said = done(call("predict", "global.safetensors", "--data", "new.csv"))
    assert re.search(r"Predicted: (odd|even) \(\d\)", said)
    assert "Accuracy" not in said
    for folder, count in (("images/here/dark", 6), ("images/here/light", 6), ("loose", 2)):
        Path(folder).mkdir(parents=True)
        for number in range(count):
            pixels = np.full((8, 8), 40 * number if folder == "loose" else 200 * ("light" in folder) + number)
            Image.fromarray(pixels.astype(np.uint8)).save(f"{folder}/{number}.png")
    ft.run("fedavg", **{**SMALL, "data": "images", "clients": None, "new_clients": 0}, out="runs/images")
    done(call("export", "runs/images", "--client", "here", "--to", "."))
    said = done(call("predict", "client-0-here.safetensors", "--data", "loose"))
    assert "loose: 2 samples" in said
    assert "dark" in said


def table(file: str, columns: dict[str, Any], rows: range) -> None:
    """Write digits as a CSV file, with other columns before the pixels."""
    x = load_digits().data
    header = ",".join([*columns, *(f"pixel{number}" for number in range(64))])
    lines = [",".join(map(str, [*(column[row] for column in columns.values()), *x[row]])) for row in rows]
    Path(file).write_text("\n".join([header, *lines]) + "\n")


def test_label_and_client_columns_are_remembered(call: Call) -> None:
    """Neither is a feature of new tables: names of classes or hospitals would be refused, numbers taken for inputs."""
    diagnosis, hospital = load_digits().target % 2, np.arange(1797) % 3
    table("train.csv", {"diagnosis": diagnosis, "hospital": hospital}, range(90))
    own = {"data": "train.csv", "label_column": "diagnosis", "client_column": "hospital", "clients": None}
    ft.run("fedavg", **{**SMALL, **own, "new_clients": 0}, out="runs/table")
    done(call("export", "runs/table", "--global", "--to", "."))
    about = json.loads(Path("global.json").read_text())
    assert (about["label_column"], about["client_column"]) == ("diagnosis", "hospital")
    rows, answers = range(100, 120), {}
    both: dict[str, Any] = {"diagnosis": diagnosis, "hospital": hospital}
    for name, columns in (
        ("both", both),
        ("label", {"diagnosis": diagnosis}),
        ("client", {"hospital": hospital}),
        ("none", {}),
    ):
        table(f"{name}.csv", columns, rows)
        answers[name] = json.loads(done(call("predict", "global.safetensors", "--data", f"{name}.csv", "--json")))
    predicted = [[one["prediction"] for one in answer["predictions"]] for answer in answers.values()]
    assert predicted == [predicted[0]] * 4
    right = np.mean([one == str(diagnosis[row]) for one, row in zip(predicted[0], rows, strict=True)])
    assert [answer["accuracy"] for answer in answers.values()] == [right, right, None, None]
    words = ("predict", "global.safetensors", "--data", "both.csv", "--json")
    assert len(json.loads(done(call(*words, "--client", "1")))["predictions"]) == 7
    table("renamed.csv", {"truth": diagnosis, "hospital": hospital}, rows)
    said = refusal(call, "predict", "global.safetensors", "--data", "renamed.csv")
    assert "'renamed.csv' has a column 'truth', which the model was not trained with" in said
    words = ("predict", "global.safetensors", "--data", "renamed.csv", "--label-column", "truth", "--json")
    assert json.loads(done(call(*words)))["accuracy"] == right
    Path("new").mkdir()
    Path("both.csv").rename("new/both.csv")
    words = ("adapt", "runs/table", "--data", "both.csv", "--data-dir", "new", "--epochs", 1, "--engine", "in-process")
    Path("new/train.csv").symlink_to(Path("train.csv").resolve())
    assert "3 new clients" in done(call(*words, "--to", "theirs"))
    said = done(call("adapt", "runs/table", "--data", "label.csv", "--epochs", 1, "--to", "one"))
    assert "1 new client" in said
    words = ("adapt", "runs/table", "--data", "renamed.csv", "--label-column", "truth", "--epochs", 1, "--to", "named")
    done(call(*words))
    about = json.loads(Path("named/adapted-0.json").read_text())
    assert (about["label_column"], about["client_column"]) == ("truth", "hospital")
    assert "no label column" in refusal(call, "adapt", "runs/table", "--data", "client.csv", "--to", "none")


def test_a_model_file_of_an_older_version_is_read(run: ft.RunResult, call: Call) -> None:
    done(call("export", "runs/ditto", "--client", 0, "--to", "."))
    about = json.loads(Path("client-0.json").read_text())
    older = {name: value for name, value in about.items() if name not in ("label_column", "client_column")}
    assert len(older) == len(about) - 2
    save_file(load_file("client-0.safetensors"), "older.safetensors", {HEADER: json.dumps(older)})
    now, before = (
        done(call("predict", file, "--run", "runs/ditto", "--client", 0))
        for file in ("client-0.safetensors", "older.safetensors")
    )
    assert now == before


def test_labels_that_the_model_does_not_know_count_as_wrong(run: ft.RunResult, call: Call) -> None:
    done(call("export", "runs/ditto", "--client", 0, "--to", "."))
    np.savez("odd.npz", x=load_digits().images[:4, None] / 16, y=np.array(["0", "1", "cat", "dog"]))
    said = done(call("predict", "client-0.safetensors", "--data", "odd.npz"))
    assert "the model does not know the labels cat, dog: these samples count as wrong" in said


def test_adapt_prints_both_curves_and_writes_what_it_found(run: ft.RunResult, call: Call) -> None:
    said = done(call("adapt", "runs/ditto", "--epochs", 2, "--engine", "in-process", "--to", "new"))
    outcome = ft.adapt("runs/ditto", epochs=2)
    assert "2 new clients" in said
    for epoch in range(3):
        mine, local = outcome.adapted[epoch], outcome.local[epoch]
        shown = [f"{100 * one.accuracy:.2f} ± {100 * one.accuracy_std:.2f}" for one in (mine, local)]
        assert re.search(rf"^ *{epoch} +{shown[0]} +{shown[1]}", said, re.MULTILINE)
    assert json.loads(Path("new/adapt.json").read_text())["adapted"][2]["accuracy"] == outcome.adapted[2].accuracy
    predicted = ("predict", "new/adapted-5.safetensors", "--run", "runs/ditto", "--client", 5, "--part", "test")
    accuracy = outcome.per_client[5].adapted[2].accuracy
    assert json.loads(done(call(*predicted, "--json")))["accuracy"] == accuracy
    x, y = load_digits().images[:60, None] / 16, load_digits().target[:60]
    np.savez("clinics.npz", x=x, y=y, client=np.array(["a", "b"])[np.arange(60) % 2])
    said = done(call("adapt", "runs/ditto", "--data", "clinics.npz", "--epochs", 1, "--workers", 1, "--to", "theirs"))
    assert "In theirs: 2 models, adapt.json, adapt.csv" in said
    assert Path("theirs/adapted-1-b.safetensors").is_file()
    said = done(call("adapt", "runs/ditto", "--data", "digits", "--clients", 3, "--epochs", 1, "--to", "more"))
    assert "3 new clients" in said


def test_one_client_has_no_spread(run: ft.RunResult, call: Call) -> None:
    np.savez("clinic.npz", x=load_digits().images[:60, None] / 16, y=load_digits().target[:60])
    said = done(call("adapt", "runs/ditto", "--data", "clinic.npz", "--epochs", 1, "--to", "one"))
    record = json.loads(Path("one/adapt.json").read_text())
    for epoch in range(2):
        mine, local = (f"{100 * record[whose][epoch]['accuracy']:.2f}" for whose in ("adapted", "local"))
        assert re.search(rf"^ *{epoch} +{mine} +{local} *$", said, re.MULTILINE)
        assert record["adapted"][epoch]["accuracy_std"] is None
    assert "±" not in said
    rows = list(csv.DictReader(Path("one/adapt.csv").read_text().splitlines()))
    assert [row["adapted_accuracy_std"] for row in rows] == ["", ""]
    alone = {**SMALL, "data": "clinic.npz", "clients": 1, "partition": "iid", "new_clients": 0}
    ft.run("local", **alone, out="runs/alone")
    text = done(call("show", "runs/alone"))
    assert re.search(r"^ *2 +[\d.]+ +– ", text, re.MULTILINE)  # the last round
    assert re.search(r"^ *local +[\d.]+ +– ", text, re.MULTILINE)
    assert [record.accuracy_std for record in ft.load("runs/alone").rounds] == [None, None]


def test_mistakes_are_refused(run: ft.RunResult, call: Call) -> None:
    done(call("export", "runs/ditto", "--client", 0, "--to", "models"))
    np.savez("flat.npz", x=np.zeros((20, 64)), y=np.arange(20) % 2)
    Path("damaged.safetensors").write_bytes(b"nothing")
    Path("file").touch()
    model = "models/client-0.safetensors"
    for words, said in (
        (("export", "runs/ditto", "--client", 9, "--to", "m"), "There is no client 9: they are numbered from 0 to 5"),
        (("export", "runs/ditto", "--client", "nina", "--to", "m"), "There is no client 'nina'"),
        (("export", "runs/ditto", "--client", 0, "--all", "--to", "m"), "--client, --all and --global exclude"),
        (("export", "runs/ditto", "--client", 0, "--to", "models"), f"{model} exists already"),
        (("export", "runs/ditto", "--to", "file"), "file is a file: choose a directory"),
        (("export", "runs", "--to", "m"), "runs is not a run directory"),
        (("predict", model), "Say which samples to predict"),
        (("predict", model, "--data", "digits", "--run", "runs/ditto"), "Say which samples to predict"),
        (("predict", model, "--data", "flat.npz"), "have the shape 64, but the model models/client-0.safetensors was"),
        (("predict", model, "--data", "nothing.npz"), "There is no file nothing.npz"),
        (("predict", model, "--data", "digits", "--part", "test"), "has no official split: leave --part out"),
        (("predict", model, "--data", "digits", "--client", "a"), "names no clients: leave --client out"),
        (("predict", model, "--run", "runs/ditto", "--part", "tset"), "no part 'tset': did you mean 'test'"),
        (("predict", model, "--data", "digits", "--out", "flat.npz"), "flat.npz exists already"),
        (("predict", "damaged.safetensors", "--data", "digits"), "no safetensors file, or a damaged one"),
        (("predict", "models/client-1.safetensors", "--data", "digits"), "There is no model file models/client-1"),
        (("adapt", "runs/ditto", "--data", "flat.npz", "--to", "m"), "have the shape 64, but the run's have 1×8×8"),
        (("adapt", "runs/ditto", "--clients", 2, "--to", "m"), "says something of new data"),
        (("adapt", "runs/ditto", "--to", "m", "--engine", "foo"), "The setting 'engine' is 'foo'"),
    ):
        assert said in refusal(call, *words)


def test_broken_runs_are_refused(run: ft.RunResult, call: Call) -> None:
    checkpoint = Path("runs/ditto/checkpoint")
    whole = contents(Path("runs/ditto"))
    for file, broken, said in (
        (checkpoint / "server-round-2.safetensors", b"broken", "cannot be read"),
        (checkpoint / "manifest.json", b"{", "manifest.json is damaged (it has no checksum)"),
        (Path("runs/ditto/partition.json"), b"{}", "partition.json is damaged (it has no checksum)"),
        (Path("runs/ditto/clients.jsonl"), b"{]\n", "clients.jsonl is damaged (line 1: it has no checksum)"),
    ):
        before = whole[str(file.relative_to("runs/ditto"))]
        assert before is not None
        file.write_bytes(broken)
        for command in ("export", "adapt"):
            assert said in refusal(call, command, "runs/ditto", "--to", "models")
        file.write_bytes(before)


def test_a_run_of_python_objects_is_left_to_python(call: Call) -> None:
    x, y = load_digits().images[:60, None] / 16, load_digits().target[:60]
    parts = [(x[:30].astype(np.float32), y[:30]), (x[30:].astype(np.float32), y[30:])]
    own = {**SMALL, "data": parts, "clients": None, "new_clients": 0}
    result = ft.run("ditto", **own, out="runs/mine")
    assert "got its data as a Python object" in refusal(call, "export", "runs/mine", "--to", "models")
    assert len(ft.export(result, to="models")) == 2
    assert len(ft.export(ft.resume("runs/mine", data=parts), to="models", overwrite=True)) == 2


def test_ctrl_c(run: ft.RunResult, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    import fedtailor.model_files.description

    write = fedtailor.model_files.description.write_model

    def interrupted(stem: Path, *rest: Any) -> Any:
        if stem.name == "client-2":
            raise KeyboardInterrupt
        return write(stem, *rest)

    monkeypatch.setattr(fedtailor.model_files.description, "write_model", interrupted)
    answer = call("export", "runs/ditto", "--to", "models")
    assert (answer.code, answer.err) == (130, "Interrupted: 2 of 4 models are in models.\n")
    assert len(contents(Path("models"))) == 4

    def at_once(*words: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedtailor.model_files.adaptation.make_transport", at_once)
    answer = call("adapt", "runs/ditto", "--to", "new")
    assert (answer.code, answer.err) == (130, "Interrupted: nothing was written.\n")
    assert not Path("new").exists()
