"""Splits by content: a new row moves no other, and a site alone has the split that it has in the federation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.data import FederatedData, from_list, load
from fedtailor.data.table import Purpose, TableSettings, from_frame
from fedtailor.training.inputs import held

from .large import Items

pandas = pytest.importorskip("pandas")
WARDS = ("icu", "surgery", "7", "07b")
PARTS = ("train", "validation", "test")


def table(n: int = 120, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return pandas.DataFrame(
        {
            "age": np.where(rng.random(n) < 0.2, np.nan, rng.integers(20, 90, n) + 0.5),
            "beds": rng.integers(0, 9, n),
            "ward": np.where(rng.random(n) < 0.1, None, rng.choice(WARDS, n)),
            "weight": rng.normal(size=n) / 3,
            "patient": [f"{patient:03}" for patient in rng.integers(0, n // 3, n)],
            "label": rng.choice(["ill", "well"], n),
        }
    )


def rows(data: FederatedData, client: int = 0) -> dict[str, list[float]]:
    """The samples of each part by their weight, which no two of them share, without the order."""
    assert data.preprocessing is not None
    names, column = data.preprocessing.feature_names, data.preprocessing_of(client)
    assert column is not None
    weight = next(one for one in column.columns if one.name == "weight")
    raw = {part: getattr(data, part)(client)[0][:, names.index("weight")] for part in PARTS}
    return {
        part: sorted(round(x, 9) for x in (values * weight.scale + weight.mean).tolist())
        for part, values in raw.items()
    }


def split(data: Any, group: str | None = None, **options: Any) -> FederatedData:
    settings: TableSettings = {"columns": None if group == "patient" else "patient=ignore", "group": group}
    frames = from_frame(data, settings, Purpose()) if not isinstance(data, str) else load(data, **settings)
    partition = {"partition": "natural"} if frames.client is not None else {"partition": "iid", "clients": 1}
    return ft.federate(frames, split="hash", dtype=torch.float64, **{**partition, **options})


@pytest.mark.parametrize("group", [None, "patient"])
def test_each_table_alone_has_the_split_of_all_together(group: str | None) -> None:
    tables = {name: table(90 + 10 * seed, seed) for seed, name in enumerate(("north", "south", "east"))}
    tables["south"]["ward"] = "7"  # a number there, a category at the others
    tables["east"]["beds"] = "some"
    tables["north"]["age"] = np.nan  # no column there
    tables["east"] = tables["east"][list(reversed(tables["east"].columns))]
    tables["east"]["patient"] = [str(int(patient)) for patient in tables["east"]["patient"]]  # without zeros in front
    together = split(tables, group)
    for client, (name, alone) in enumerate(tables.items()):
        assert rows(together, client) == rows(split({name: alone}, group)) == rows(split(alone, group))


def test_shares_are_those_asked_for() -> None:
    sizes = split(table(5000)).bounds[0].diff() / 5000
    assert torch.allclose(sizes, torch.tensor([0.7, 0.1, 0.2]), atol=0.02)


def test_no_row_is_moved_by_another_or_by_the_order() -> None:
    whole, before = table(), rows(split(table()))
    for changed in (whole[::-1], whole[whole.columns[::-1]], whole[40:], pandas.concat([whole, table(60, 5)])):
        after = rows(split(changed))
        here = set(np.round(changed["weight"], 9))
        for part in PARTS:
            kept = [weight for weight in after[part] if weight in set(np.round(whole["weight"], 9))]
            assert kept == [weight for weight in before[part] if weight in here]
    twice = split(pandas.concat([whole, whole]))
    assert rows(twice) == {part: sorted(weights * 2) for part, weights in before.items()}
    assert rows(split(whole, seed=1)) != before
    thinner = rows(split(whole, test=0.1))
    assert set(thinner["test"]) < set(before["test"])


def test_files_and_tables_in_memory_have_one_split(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = table()
    frame.to_csv(tmp_path / "point.csv", index=False)
    frame.to_csv(tmp_path / "comma.csv", index=False, sep=";", decimal=",", na_rep="NA")
    frame.to_parquet(tmp_path / "all.parquet")
    for file in ("point.csv", "comma.csv", "all.parquet"):
        assert rows(split(str(tmp_path / file))) == rows(split(frame))
        assert rows(split(str(tmp_path / file), "patient")) == rows(split(frame, "patient"))


def test_a_number_that_is_a_text_beside_other_texts_counts_as_a_number(tmp_path: Path) -> None:
    lines = [f"{'ab'[k % 2]};{k / 8:.3f};{k % 7},5;{'ill' if k % 3 else 'well'}".replace(".", ",") for k in range(90)]
    texts = [line.replace("3,5", "high") if line[0] == "b" else line for line in lines]
    header = "client;weight;dose;label"
    (tmp_path / "all.csv").write_text("\n".join([header, *texts]))
    (tmp_path / "a.csv").write_text("\n".join([header, *(line for line in texts if line[0] == "a")]))
    files = [load(str(tmp_path / f"{name}.csv")) for name in ("all", "a")]
    together, alone = (ft.federate(file, partition="natural", split="hash", dtype=torch.float64) for file in files)
    assert [data.preprocessing.columns[1].kind for data in (together, alone)] == ["category", "number"]  # type: ignore[union-attr]
    assert rows(together) == rows(alone)


def test_a_group_stays_together_and_goes_by_its_name() -> None:
    frame = table()
    data = split(frame, "patient")
    of = {
        part: set(frame["patient"][np.isin(np.round(frame["weight"], 9), weights)])
        for part, weights in rows(data).items()
    }
    assert not of["train"] & of["test"]
    assert not of["train"] & of["validation"]
    assert of["test"]
    others = frame.assign(beds=0, label="well")
    assert rows(split(others, "patient")) == rows(data)


def test_cells_and_labels_count() -> None:
    frame = table(400)
    same = [set(rows(split(other))["test"]) for other in (frame, frame.assign(beds=0), frame.assign(label="well"))]
    assert same[0] != same[1] != same[2] != same[0]
    swapped = frame.rename(columns={"beds": "age", "age": "beds"})
    assert set(rows(split(swapped))["test"]) != same[0]


def kinds() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 80)
    x = rng.normal(size=(80, 5)).astype(np.float32)
    return {
        "features": (x, y),
        "double": (x.astype(float), y),
        "lazy": ft.lazy(Items(x, y)),
        "images": (rng.integers(0, 256, (80, 6, 6), dtype=np.uint8), y),
        "tokens": (rng.integers(0, 9, (80, 5)), y),
        "several": ((x, rng.random((80, 2)) < 0.5), y),
        "labels": (x, rng.integers(0, 2, (80, 4))),
        "numbers": (x, x.sum(1)),
    }


def samples(data: FederatedData, client: int) -> list[list[bytes]]:
    def written(x: Any) -> list[bytes]:
        parts = x.parts if hasattr(x, "parts") else (x,)
        return sorted(b"".join(part[k].contiguous().numpy().tobytes() for part in parts) for k in range(len(x)))

    return [written(held(getattr(data, part)(client)[0])) for part in PARTS]


@pytest.mark.parametrize("kind", list(kinds()))
def test_other_data_are_split_by_their_content(kind: str) -> None:
    x, y = kinds()[kind]
    mine = torch.arange(80) % 3 == 0

    def part(chosen: Tensor) -> tuple[Any, Any]:
        cut = tuple(each[chosen.numpy()] for each in x) if isinstance(x, tuple) else x[chosen]
        return cut, y[chosen.numpy()]

    together = ft.federate(from_list([part(mine), part(~mine)]), partition="natural", split="hash")
    for client, chosen in enumerate((mine, ~mine)):
        alone = ft.federate(from_list([part(chosen)]), partition="natural", split="hash")
        assert samples(together, client) == samples(alone, 0)
    assert 5 < int(together.bounds.diff(dim=1).sum(0)[2]) < 30


def test_precision_and_laziness_have_no_say() -> None:
    found = [
        samples(ft.federate(from_list([kinds()[kind]]), partition="natural", split="hash"), 0)
        for kind in ("features", "double", "lazy")
    ]
    assert found[0] == found[1] == found[2]


def test_clients_without_test_samples_are_named_and_those_without_training_samples_refused() -> None:
    frames = {"large": table(), "small": table(3, 7)}
    with pytest.warns(UserWarning, match="1 of 2 clients have no test samples and are not measured: small; one needs"):
        split(frames, test=0.05, validation=0.01)
    with pytest.raises(ft.FedtailorError, match="Client 'small' of 'table' has no training sample: leave it out"):
        split(frames, test=0.98, validation=0.01)
    with pytest.raises(ft.FedtailorError, match="no split 'hashed'"):
        ft.federate(ft.load_data("digits"), split="hashed")  # type: ignore[arg-type]


def test_clients_that_join_are_split_likewise(tmp_path: Path) -> None:
    result = ft.run(
        "fedavg", data={"a": table(), "b": table(100, 1)}, columns="patient=ignore", split="hash", rounds=1, epochs=1,
        model="logistic", out=tmp_path / "run", engine="in-process",
    )  # fmt: skip
    assert result.experiment.split == "hash"
    after = ft.resume(
        tmp_path / "run", rounds=2, data={"a": table(), "b": table(100, 1)}, add_clients={"c": table(80, 2)}
    )
    alone = split(table(80, 2), preprocessing=after.data.preprocessing)
    assert torch.equal(after.data.bounds[2].diff(), alone.bounds[0].diff())
    assert torch.equal(after.data.test(2)[0], alone.test(0)[0].float())
