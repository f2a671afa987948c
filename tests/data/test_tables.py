"""The user's own tables: how a file is written is found out, and what its columns are."""

import gzip
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtailor._common.errors import FedtailorError
from fedtailor._common.extras import install_command
from fedtailor.data import Dataset, from_list, load
from fedtailor.data.csv_file import CELLS
from fedtailor.data.dataset import TEST, TRAIN, VALIDATION
from fedtailor.data.table import Purpose, from_frame
from fedtailor.engines.preparation import load_dataset
from fedtailor.experiment import experiment_hash, make_experiment

NAN = float("nan")


def read(tmp_path: Path, content: str | bytes, name: str = "own.csv", **settings: Any) -> Dataset:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return load(str(tmp_path / name), **settings)


def kinds(data: Dataset) -> dict[str, str]:
    return {column.name: column.kind for column in data.columns}


def same(x: torch.Tensor, rows: list[list[float]]) -> bool:
    return np.array_equal(x.numpy(), np.array(rows), equal_nan=True)


def column(name: str, cells: list[str]) -> str:
    """A table with these cells in one column, and in another to be left over."""
    return f"{name},z,label\n" + "".join(f"{cell},1.5,{'ab'[k // 2 % 2]}\n" for k, cell in enumerate(cells))


def test_categories_and_missing_cells(tmp_path: Path) -> None:
    data = read(tmp_path, "ward,age,label\nsurgery,61,a\nicu,,b\n?,44.5,a\n surgery ,NA,a\n")
    assert [(c.name, c.kind, c.values) for c in data.columns] == [
        ("ward", "category", ("icu", "surgery")),
        ("age", "number", ()),
    ]
    assert same(data.x, [[1, 61], [0, NAN], [NAN, 44.5], [1, NAN]])
    assert data.x.dtype == torch.float64


@pytest.mark.parametrize("missing", ["", " ", "NA", "N/A", "nan", "NaN", "null", "NULL", "None", "?", "-", "#N/A"])
def test_words_for_missing_cells(tmp_path: Path, missing: str) -> None:
    assert same(read(tmp_path, f"a,b,label\n1,x,p\n{missing},{missing},q\n").x, [[1, 0], [NAN, NAN]])


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_separators_and_encodings_are_found_out(tmp_path: Path, separator: str, encoding: str) -> None:
    lines = [["größe", "note", "label"], ["1.5", "a; b, c | d\te", "später"], ["2", '"x"', "früh"]]
    text = "\r\n".join(separator.join('"' + cell.replace('"', '""') + '"' for cell in line) for line in lines)
    data = read(tmp_path, text.encode(encoding))
    assert kinds(data) == {"größe": "number", "note": "category"}
    assert data.columns[1].values == ('"x"', "a; b, c | d\te")
    assert (data.classes, data.x[:, 0].tolist()) == (("früh", "später"), [1.5, 2])
    assert bool(data.notes) == (encoding == "cp1252")


def test_a_decimal_comma_is_found_out_unless_it_separates(tmp_path: Path) -> None:
    lines = [f"{k};{k * 1000};x{k % 2}" for k in range(100_000)] + ["1;2,5;x1"]  # it comes late
    data = read(tmp_path, "a;b;label\n" + "\n".join(lines))
    assert data.x[-1].tolist() == [1, 2.5]
    assert read(tmp_path, "a;b;label\n1,5;1.5;x\n2.5;2.5;y\n").columns[0].kind == "category"  # mostly points
    assert same(read(tmp_path, "a;label\n1,5;x\n", decimal=",").x, [[1.5]])
    assert read(tmp_path, "a;label\n1,5;x\n", decimal=".").columns[0].values == ("1,5",)
    assert read(tmp_path, "a,b,label\n1,5,x\n").x.tolist() == [[1, 5]]


def test_the_format_can_be_said(tmp_path: Path) -> None:
    data = read(tmp_path, "a:label\n1:später\n2:x\n".encode("latin-1"), separator=":", encoding="latin-1")
    assert (data.x.tolist(), data.classes, data.notes) == ([[1], [2]], ("später", "x"), ())
    for wrong, said in (
        ({"separator": "::"}, "The separator is '::': give one character, or tab"),
        ({"decimal": ";"}, "The decimal mark is ';'"),
        ({"decimal": ",", "separator": ","}, "The decimal mark is ','"),
        ({"encoding": "utf-9"}, "There is no encoding 'utf-9'"),
        ({"encoding": "base64"}, "There is no encoding 'base64'"),
        ({"encoding": "ascii"}, "is not a CSV text in ASCII"),
    ):
        with pytest.raises(FedtailorError, match=said):
            read(tmp_path, "a,label\n1,ä\n", **wrong)


def test_packed_files_are_read_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read(tmp_path, gzip.compress(b"a,label\n1,x\n2,y\n"), "own.csv.gz")
    assert data.x.tolist() == [[1], [2]]
    monkeypatch.setenv("FEDTAILOR_DATA_LIMIT", "0.01")
    with pytest.raises(FedtailorError, match=r"0\.01 GB is the most"):
        read(tmp_path, gzip.compress(b"a,label\n" + b"1" * 20_000_000), "own.csv.gz")


@pytest.mark.slow
def test_texts_may_come_after_many_numbers(tmp_path: Path) -> None:
    lines = [f"{k % 3},{k}.5,p" for k in range(CELLS)] + ["unknown,7,q"]
    data = read(tmp_path, "grade,b,label\n" + "\n".join(lines))
    assert data.columns[0].values == ("0", "1", "2", "unknown")
    assert data.x[[0, 1, -1]].tolist() == [[0, 0.5], [1, 1.5], [3, 7]]


@pytest.mark.parametrize(
    ("name", "cells", "kind"),
    [
        ("a", [str(k) for k in range(5)], "number"),
        ("grade", ["1", "2", "1", "2"], "number"),
        ("smoker", ["yes", "no", "yes"], "category"),
        ("fluid", [str(7 * k) for k in range(50)], "number"),
        ("id", [str(7 * k) for k in range(50)], "looks like an id"),
        ("patient_id", [str(k % 40) for k in range(50)], "looks like an id"),
        ("patientID", ["3", "1", "2"], "looks like an id"),
        ("group id", ["1", "2"] * 9, "number"),
        ("x", [f"P{k:04}" for k in range(50)], "looks like an id"),
        ("city", [f"c{k % 50}" for k in range(400)], "category"),
        ("zip", [f"z{k % 150}" for k in range(400)], "has 150 different texts .*--columns zip=category"),
        ("seen", ["2020-01-01", "2021-05-06"] * 5, "holds dates"),
        ("seen", ["2020-01-01T10:30:00Z", ""], "holds dates"),
        ("seen", ["31.12.2020", "1.1.2021"], "holds dates"),
        ("a", ["", "NA"], "is empty"),
        ("note", ["x" * 2_000, "y"], "looks like an id or free text|different texts"),
    ],
)
def test_what_a_column_is(tmp_path: Path, name: str, cells: list[str], kind: str) -> None:
    data = read(tmp_path, column(name, cells))
    if kind in ("number", "category"):
        assert kinds(data) == {name: kind, "z": "number"}
        assert data.ignored == data.notes == ()
    else:
        assert (kinds(data), data.ignored) == ({"z": "number"}, (name,))
        (note,) = data.notes
        assert re.search(kind, note)


def test_a_column_that_counts_the_lines_is_pointed_out(tmp_path: Path) -> None:
    data = read(tmp_path, column("case", [str(k) for k in range(1, 41)]))
    assert kinds(data)["case"] == "number"
    assert "it counts the lines" in data.notes[0]


def test_a_slip_among_numbers_is_refused_with_its_line(tmp_path: Path) -> None:
    cells = [f"{k}.5" for k in range(40)]
    with pytest.raises(FedtailorError, match=r"Line 39 of .* has '12o' in column 'age', where most cells are numbers"):
        read(tmp_path, column("age", [*cells[:37], "12o", *cells[38:]]))


def test_columns_are_what_the_user_says(tmp_path: Path) -> None:
    text = column("id", [str(k) for k in range(30)])
    assert kinds(read(tmp_path, text, columns="id=number"))["id"] == "number"
    data = read(tmp_path, text, columns="id=category, z=ignore")
    assert (kinds(data), data.ignored, data.notes) == ({"id": "category"}, ("z",), ())
    assert data.columns[0].values == tuple(sorted(map(str, range(30))))
    assert kinds(read(tmp_path, '"a, b",c,y\n1,2,x\n', columns='"a, b=category"')) == {
        "a, b": "category",
        "c": "number",
    }
    numbers = read(tmp_path, column("grade", ["1", "1.0", "2"]), columns="grade=category")
    assert (numbers.columns[0].values, numbers.x[:, 0].tolist()) == (("1", "2"), [0, 0, 1])
    for said, sentence in (
        ("age=number", r"has no column 'age': its columns are id, z, label"),
        ("id=text", "There is no kind of column 'text'"),
        ("id", "write name=number"),
        ("id=number, id=ignore", "say two things of 'id'"),
        ("label=ignore", "has the label in column 'label'"),
        ("id=ignore, z=ignore", "it needs features"),
    ):
        with pytest.raises(FedtailorError, match=sentence):
            read(tmp_path, text, columns=said)
    with pytest.raises(FedtailorError, match=r"Line 3 of .* has 'old' in column 'a': give a number"):
        read(tmp_path, "a,label\n1,x\nold,y\n", columns="a=number")
    assert make_experiment({"columns": {"age": "number", "a, b": "ignore"}}).columns == 'age=number, "a, b=ignore"'


def test_numbers_to_predict(tmp_path: Path) -> None:
    text = "a,label\n1,0.5\n2,3\n"
    with pytest.raises(FedtailorError, match=r"hold fractions or NaN: .*; for a regression say --loss mse"):
        read(tmp_path, text)
    data = read(tmp_path, text, columns="label=number")
    assert (data.y.tolist(), data.classes) == ([[0.5], [3]], ())
    experiment = make_experiment({"data": str(tmp_path / "own.csv"), "loss": "mse"})
    assert load_dataset(experiment).y.tolist() == [[0.5], [3]]
    with pytest.raises(FedtailorError, match=r"Line 3 of .* has 'ill' in column 'label': give a number"):
        read(tmp_path, "a,label\n1,0.5\n2,ill\n", regression=True)
    for missing, what in (("NA", "'NA'"), ("nan", "'nan'"), ("", "nothing")):
        with pytest.raises(FedtailorError, match=rf"Line 3 of .* has {what} in column 'label': give a number"):
            read(tmp_path, f"a,label\n1,0.5\n2,{missing}\n", regression=True)


def test_labels_that_are_missing_are_refused(tmp_path: Path) -> None:
    for missing in ("NA", "?", "nan", "null"):
        with pytest.raises(
            FedtailorError, match=r"Line 3 of .* in column 'label': fill it in, or say --drop-unlabelled"
        ):
            read(tmp_path, f"a,label\n1,ill\n2,{missing}\n")
    assert read(tmp_path, "a,label\n1,none\n2,-\n").classes == ("-", "none")


def test_groups_and_splits_are_columns_too(tmp_path: Path) -> None:
    text = "a,patient,part,label\n1,p2,Train,x\n2,p1,val,y\n3,p2,train,x\n4,p3,TEST,y\n"
    data = read(tmp_path, text, group="patient", split_column="part")
    assert data.group is not None
    assert data.part is not None
    assert data.group.tolist() == [1, 0, 1, 2]
    assert data.part.tolist() == [TRAIN, VALIDATION, TRAIN, TEST]
    assert (kinds(data), data.ignored) == ({"a": "number"}, ("patient", "part"))
    with pytest.raises(FedtailorError, match=r"Line 2 of .* has 'x' in the split column: write train, validation"):
        read(tmp_path, text, split_column="label", label_column="part")
    with pytest.raises(FedtailorError, match="one column for two of label, client, group and split"):
        read(tmp_path, text, split_column="part", group="part")
    with pytest.raises(FedtailorError, match="has no column 'nobody'"):
        read(tmp_path, text, group="nobody")


def test_parquet_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FedtailorError, match=re.escape(install_command("parquet"))):
        read(tmp_path, b"PAR1", "own.parquet")


def test_pandas_tables_are_read_like_their_files(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "age": [61, 44.5, None, 50],
            "beds": pandas.array([3, None, 4, 5], dtype="Int64"),
            "ward": ["icu", None, "surgery", "icu"],
            "smoker": [True, False, True, True],
            "kind": pandas.Categorical(["b", "a", "b", "b"]),
            "seen": pandas.to_datetime(["2020-01-01"] * 4),
            "label": [1, 0, 1, 0],
        }
    )
    frame.to_csv(tmp_path / "own.csv", index=False)
    wanted = load(str(tmp_path / "own.csv"))
    found = load_dataset(make_experiment({}), frame)
    assert (found.columns, found.ignored, found.classes) == (wanted.columns, wanted.ignored, wanted.classes)
    assert same(found.x, wanted.x.tolist())
    assert wanted.columns[3].values == ("False", "True")
    several = from_list([frame[:1], frame[1:]])
    assert same(several.x, wanted.x.tolist())
    assert several.client is not None
    assert (several.client.tolist(), several.client_names) == ([0, 1, 1, 1], ("0", "1"))
    with pytest.raises(FedtailorError, match="tables of clients 0 and 1 differ: one has no column 'age'"):
        from_list([frame, frame.drop(columns="age")])
    with pytest.raises(FedtailorError, match="Row 1 of the table has 'x' in column 'ward'"):
        load_dataset(make_experiment({"columns": "ward=number"}), frame.assign(ward=["1", "x", "2", "3"]))


def test_parquet_is_read_like_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "age": [61.5, None, 44.0, 50.0],
        "beds": [3, None, 4, 5],
        "ward": ["icu", None, "surgery", "icu"],
        "smoker": [True, False, None, True],
        "label": ["ill", "ill", "healthy", "ill"],
    }
    parquet.write_table(arrow.table(columns), tmp_path / "own.parquet")
    data = load(str(tmp_path / "own.parquet"))
    assert [(c.name, c.kind, c.values) for c in data.columns] == [
        *(("age", "number", ()), ("beds", "number", ())),
        *(("ward", "category", ("icu", "surgery")), ("smoker", "category", ("False", "True"))),
    ]
    assert same(data.x, [[61.5, 3, 0, 1], [NAN, NAN, NAN, 0], [44, 4, 1, NAN], [50, 5, 0, 1]])
    content = (tmp_path / "own.parquet").read_bytes()
    with pytest.raises(FedtailorError, match="cannot be read"):
        read(tmp_path, content[:-10], "own.parquet")
    parquet.write_table(arrow.table({"a": [1.0] * 3_000_000, "label": [1] * 3_000_000}), tmp_path / "own.parquet")
    monkeypatch.setenv("FEDTAILOR_DATA_LIMIT", "0.01")
    with pytest.raises(FedtailorError, match=r"0\.01 GB is the most"):
        load(str(tmp_path / "own.parquet"))


def test_numbers_that_count_as_classes_are_pointed_out(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("x,y\n" + "".join(f"{k},{k % 25}\n" for k in range(100)))
    (note,) = load(str(path)).notes[-1:]
    assert "'y' of own.csv has 25 different numbers in 100 samples, and each counts as a class" in note
    path.write_text("x,y\n" + "".join(f"{k % 7},{k % 25}\n" for k in range(200)))
    assert not any("counts as a class" in note for note in load(str(path)).notes)  # 8 samples of each


@pytest.mark.parametrize(
    ("regression", "labels"), [(False, ["ill", "NA", "well", "", "?"]), (True, ["1", "NA", "2", "", "?"])]
)
def test_lines_without_a_label_can_be_dropped(tmp_path: Path, regression: bool, labels: list[str]) -> None:
    lines = zip("12345", ["x", "gone", "y", "x", "gone"], ["p", "q", "r", "p", "q"], labels, strict=True)
    text = "a,ward,client,label\n" + "".join(",".join(line) + "\n" for line in lines)
    with pytest.raises(FedtailorError, match="say --drop-unlabelled"):
        read(tmp_path, text, regression=regression)
    data = read(tmp_path, text, regression=regression, drop_unlabelled=True)
    assert data.notes[0] == "3 of the 5 lines of own.csv have no label and are left out (--drop-unlabelled)."
    assert same(data.x, [[1, 0], [3, 1]])
    assert (data.columns[1].values, data.client_names) == (("x", "y"), ("p", "r"))
    assert (data.y.tolist(), data.classes) == (([[1], [2]], ()) if regression else ([0, 1], ("ill", "well")))
    one = read(tmp_path, "a,label\n1,x\n2,\n3,y\n", drop_unlabelled=True)
    assert one.notes[0] == "1 of the 3 lines of own.csv has no label and is left out (--drop-unlabelled)."
    assert read(tmp_path, "a,label\n1,x\n3,y\n", drop_unlabelled=True).notes == ()
    with pytest.raises(FedtailorError, match="has no label in column 'label'"):
        read(tmp_path, "a,label\n1,\n2,NA\n", drop_unlabelled=True)
    frame = {"a": np.arange(3.0), "label": np.array([0.5, NAN, 2.0])}
    experiment = make_experiment({"loss": "mse", "drop_unlabelled": True})
    pandas = pytest.importorskip("pandas")
    assert load_dataset(experiment, pandas.DataFrame(frame)).y.tolist() == [[0.5], [2.0]]


def test_dropping_nothing_leaves_a_runs_name_as_it_was() -> None:
    """Runs that were recorded before there was this setting are found again."""
    usual, drops = (make_experiment({"drop_unlabelled": drop}) for drop in (False, True))
    assert experiment_hash(usual, {}) == "6c44d94e0d92c28937b1393fb410a52149f23cddb9f65d0e6f261b23677d2a4a"
    assert experiment_hash(drops, {}) != experiment_hash(usual, {})


def table_of_columns(**columns: Any) -> dict[str, Any]:
    """Forty lines of four clients; the labels and `free` are at random."""
    drawn = np.random.default_rng(0)
    usual = {"client": np.repeat(list("abcd"), 10), "label": drawn.integers(0, 2, 40), "free": drawn.integers(0, 4, 40)}
    return {**usual, **columns}


def noted(table: dict[str, Any], mse: bool = False, columns: str | None = None) -> str:
    return " ".join(from_frame(table, {"columns": columns}, Purpose(regression=mse)).notes)


def test_columns_that_are_functions_of_the_client_are_named() -> None:
    store, missing = np.repeat([3.0, 7.0, 1.0, 3.0], 10), np.repeat([NAN, 1.0, NAN, 1.0], 10)
    copies = table_of_columns(store=store, region=np.repeat(list("nnss"), 10), missing=missing)
    said = "The columns store, region, missing of table have one value in each client"
    assert noted(copies).startswith(said)
    assert noted(copies).endswith("say --columns store=ignore,region=ignore,missing=ignore.")
    assert noted(copies, columns="store=number, region=category, missing=number") == ""  # the user says so
    store[5] = 4
    assert noted(table_of_columns(store=store)) == ""
    assert noted(table_of_columns(constant=np.ones(40))) == ""  # it does not tell the clients apart
    few = {name: values[::5] for name, values in copies.items()}  # two lines a client are no proof
    assert "one value in each client" not in noted(few)


def test_columns_that_give_the_label_away_are_named() -> None:
    usual = table_of_columns()
    label = usual["label"]
    code = np.where(label == 1, 10.0, np.where(usual["free"] == 0, 20.0, NAN))  # a missing cell is a value too
    assert noted({**usual, "code": code}).startswith("The column code of table gives the label 'label' away")
    told = np.array(["ill", "well"])[label]
    assert "The column told, of table gives" in noted({**usual, "told,": told})
    assert noted({**usual, "told,": told}).endswith("""say --columns '"told,=ignore"'.""")
    wrong = code.copy()
    wrong[np.flatnonzero(label == 0)[0]] = 10.0
    assert noted({**usual, "code": wrong}) == ""


def test_an_id_does_not_give_the_label_away() -> None:
    usual, drawn = table_of_columns(), np.random.default_rng(1)
    number, measured = drawn.permutation(40) * 7.0, drawn.normal(size=40)  # each value once
    twice = np.repeat(drawn.permutation(20) * 3.0, 2)  # and pairs of lines, as of doubled samples
    labels = np.repeat(drawn.integers(0, 2, 20), 2)
    assert noted({**usual, "number": number, "measured": measured}) == ""
    assert noted({**usual, "twice": twice, "label": labels}) == ""
    rare = np.zeros(40, dtype=int)
    rare[3] = 1  # one sample of a class may have a value of its own by chance
    assert noted({**usual, "ward": np.where(rare == 1, 2.0, 5.0), "label": rare}) == ""


def test_a_number_that_is_the_target_in_another_unit_is_named() -> None:
    usual, drawn = table_of_columns(), np.random.default_rng(2)
    target = drawn.normal(size=40)
    assert "The column cents of table gives" in noted({**usual, "label": target, "cents": 100 * target + 3}, mse=True)
    assert noted({**usual, "label": target, "near": target + 0.1 * drawn.normal(size=40)}, mse=True) == ""
    assert noted({**usual, "label": target, "constant": np.ones(40)}, mse=True) == ""


def test_a_column_of_nearly_this_name_is_proposed(tmp_path: Path) -> None:
    text = "Width,Species\n1,x\n2,y\n"
    for asked in ({"label_column": "species"}, {"label_column": "Species", "client_column": "width"}):
        with pytest.raises(FedtailorError, match=r"did you mean '(Species|Width)'\?$"):
            read(tmp_path, text, **asked)
    with pytest.raises(FedtailorError, match="its columns are Width, Species"):
        read(tmp_path, text, label_column="Region")
