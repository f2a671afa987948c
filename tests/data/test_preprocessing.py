"""Preprocessing that is agreed on: the constants of scikit-learn fitted on all rows, from what each client declares."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from fedtailor._common.errors import FedtailorError
from fedtailor.data import Dataset, FederatedData, federate
from fedtailor.data.columns import Column
from fedtailor.data.preprocessing import (
    ColumnFacts,
    Facts,
    PreparedColumn,
    Preprocessing,
    agree,
    facts,
    facts_of_clients,
)

COLUMNS = (
    Column("age", "number"),
    Column("ward", "category", ("icu", "medicine", "surgery")),
    Column("income", "number"),
    Column("smoker", "category", ("no", "yes")),
    Column("pressure", "number"),
    Column("constant", "number"),
)


def rows(count: int = 400, seed: int = 0) -> np.ndarray[Any, Any]:
    """Columns of very different scale; cells of `age` and `smoker` are missing."""
    rng = np.random.default_rng(seed)
    x = np.stack(
        [
            rng.normal(60, 10, count),
            rng.integers(0, 3, count),
            1e6 + rng.normal(0, 1, count),
            rng.integers(0, 2, count),
            1e-6 * rng.normal(3, 1, count),
            np.full(count, 0.1),
        ],
        axis=1,
    )
    x[rng.random(count) < 0.2, 0] = np.nan
    x[rng.random(count) < 0.2, 3] = np.nan
    return x


def fitted(x: np.ndarray[Any, Any]) -> ColumnTransformer:
    """What scikit-learn makes of the same rows in one place."""
    numbers = make_pipeline(StandardScaler(), SimpleImputer(strategy="constant", fill_value=0))
    both = ColumnTransformer(
        [
            ("numbers", numbers, [0, 2, 4, 5]),
            ("missing", make_union(MissingIndicator()), [0, 2, 4, 5]),
            ("categories", OneHotEncoder(sparse_output=False, handle_unknown="ignore"), [1, 3]),
        ]
    )
    return both.fit(x)


def by_scikit_learn(table: Preprocessing, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The features of scikit-learn's transformers with a table's constants."""
    pieces = []
    if table.numbers:
        scaler, one_row = StandardScaler(), np.zeros((1, len(table.numbers)))
        scaler.n_features_in_ = len(table.numbers)
        scaler.mean_ = np.array([table.columns[place].mean for place in table.numbers])
        scaler.scale_ = np.array([table.columns[place].scale for place in table.numbers])
        scaler.var_ = scaler.scale_**2
        filled = SimpleImputer(strategy="constant", fill_value=0.0).fit(one_row)
        pieces.append(filled.transform(scaler.transform(x[:, table.numbers])))
    if table.flagged:
        flags = MissingIndicator(features="all").fit(np.zeros((1, len(table.flagged))))
        pieces.append(flags.transform(x[:, table.flagged]))
    if table.categories:
        of = [table.columns[place] for place in table.categories]
        known = [np.array([*range(len(column.values)), *([np.nan] if column.missing else [])]) for column in of]
        encoder = OneHotEncoder(categories=known, handle_unknown="ignore", sparse_output=False)
        pieces.append(encoder.fit(np.zeros((1, len(of)))).transform(x[:, table.categories]))
    return np.hstack(pieces).astype(np.float64)


def random_table(rng: np.random.Generator) -> tuple[Preprocessing, np.ndarray[Any, Any]]:
    """Columns in any order and samples with missing cells and unknown values, also where training had none of these."""
    columns, cells, count = [], [], int(rng.integers(1, 40))
    for place in range(int(rng.integers(1, 8))):
        name, missing = f"column {place}", bool(rng.integers(2))
        if rng.integers(2):
            mean, scale = rng.normal() * 10.0 ** rng.integers(-8, 9), 10.0 ** rng.uniform(-8, 8)
            constant = rng.random() < 0.2
            columns.append(PreparedColumn(name=name, kind="number", mean=mean, scale=scale, missing=missing))
            cells.append(np.full(count, mean) if constant else rng.normal(mean, scale, count))
        else:
            values = tuple(f"value {k}" for k in range(int(rng.integers(1, 6))))
            columns.append(PreparedColumn(name=name, kind="category", values=values, missing=missing))
            cells.append(rng.integers(-1, len(values) + 1, count).astype(np.float64))
    x = np.stack(cells, axis=1)
    x[rng.random(x.shape) < rng.choice([0, 0.2, 1])] = np.nan
    return Preprocessing(how="federated", columns=tuple(columns)), x


def test_features_are_scikit_learns_to_the_bit() -> None:
    rng, met = np.random.default_rng(0), set()
    for _ in range(300):
        table, x = random_table(rng)
        given = x.copy()
        ours, theirs = table.transform(x), by_scikit_learn(table, x)
        assert ours.shape == (len(x), table.n_features)
        assert (ours.dtype, ours.tobytes()) == (np.float64, theirs.tobytes())  # -0.0 is not 0.0 here
        assert ours.flags.c_contiguous
        assert x.tobytes() == given.tobytes()
        assert table.transform(x[:0]).shape == (0, table.n_features)
        met.add((bool(table.numbers), bool(table.flagged), bool(table.categories)))
    assert len(met) == 5  # all that there can be: nobody is flagged without numbers, and a table has columns


def declared(x: np.ndarray[Any, Any], clients: int) -> list[Facts]:
    """What clients of very different sizes declare."""
    ends = np.unique(np.geomspace(3, len(x), clients).astype(int)) if clients > 1 else [len(x)]
    return [facts(part, COLUMNS) for part in np.split(x, ends[:-1])]


@pytest.mark.parametrize("clients", [1, 2, 7, 50])
def test_any_number_of_clients_agrees_on_what_scikit_learn_fits_on_all_rows(clients: int) -> None:
    x = rows()
    agreed = agree(declared(x, clients))
    again = Preprocessing.model_validate_json(agreed.model_dump_json())
    assert again == agreed
    wanted = fitted(x).transform(x)
    unsharp = np.zeros(wanted.shape[1])
    unsharp[1] = 4 * np.spacing(1e6)  # the last bits of a mean of 1e6, where the deviation is 1
    assert (np.abs(again.transform(x) - wanted) <= 1e-12 + unsharp).all()
    assert again.n_features == wanted.shape[1] == len(again.feature_names)
    assert again.feature_names == (
        *("age", "income", "pressure", "constant", "age is missing"),
        *("ward=icu", "ward=medicine", "ward=surgery", "smoker=no", "smoker=yes", "smoker is missing"),
    )
    mean, deviation = np.nanmean(x[:, 2]), np.nanstd(x[:, 2])
    income = agreed.columns[2]
    assert income.mean == pytest.approx(mean, rel=1e-14)
    assert income.scale == pytest.approx(deviation, rel=1e-9)  # naive sums of squares lose all of it
    assert agreed.columns[5].scale == 1


@pytest.mark.parametrize("rare", [1, 4])
def test_the_facts_of_many_clients_are_each_ones_own(rare: int) -> None:
    """To the bit, whatever the others have, and so is what they agree on."""
    sizes = np.array([5, 40, 5, 1, 300, 40, 5, 2, 17])
    x = rows(int(sizes.sum()))
    together = facts_of_clients(x, sizes, COLUMNS, rare)
    alone = [facts(part, COLUMNS, rare) for part in np.split(x, np.cumsum(sizes)[:-1])]
    assert len(together) == len(alone)
    assert [*together] == alone
    assert together[2:4] == tuple(alone[2:4])
    assert together[-1] == alone[-1]
    for clients in (2, 5, len(sizes)):
        assert together.agreed(clients, "federated", ("id",)) == agree(alone[:clients], "federated", ("id",))


def test_a_client_may_have_no_cell_of_a_column() -> None:
    x = rows(30)
    x[:10, [0, 1]] = np.nan
    agreed = agree([facts(x[:10], COLUMNS), facts(x[10:], COLUMNS)])
    assert agreed.columns[0].mean == pytest.approx(np.nanmean(x[:, 0]), rel=1e-14)
    assert agreed.personal(facts(x[:10], COLUMNS)).columns[0] == agreed.columns[0]


def test_a_client_declares_nothing_but_counts_means_squares_and_values() -> None:
    x = rows(20)
    plain = [one.model_dump() for one in facts(x, COLUMNS)]
    present = x[~np.isnan(x[:, 0]), 0]
    assert plain[0] == {
        "name": "age",
        "kind": "number",
        "count": len(present),
        "missing": 20 - len(present),
        "mean": pytest.approx(present.mean()),
        "squares": pytest.approx(((present - present.mean()) ** 2).sum()),
        "values": (),
    }
    assert plain[1]["values"] == tuple(sorted({COLUMNS[1].values[int(code)] for code in x[:, 1]}))
    assert {type(value) for one in plain for value in one.values()} == {str, int, float, tuple}


def data(x: np.ndarray[Any, Any], columns: tuple[Column, ...] = COLUMNS) -> Dataset:
    clients = torch.arange(len(x)) % 4
    y = torch.from_numpy(x[:, 4] > 3e-6).long()
    names = tuple("abcd")
    return Dataset("own", torch.from_numpy(x), y, ("no", "yes"), client=clients, client_names=names, columns=columns)


def places(split: FederatedData, x: np.ndarray[Any, Any], clients: list[int], part: str) -> list[int]:
    """The rows of the table that are these clients' samples: no two have the same income."""
    assert split.preprocessing is not None
    column = split.preprocessing.columns[2]
    incomes = np.concatenate([getattr(split, part)(client)[0][:, 1].double().numpy() for client in clients])
    return [int(np.abs(x[:, 2] - income).argmin()) for income in incomes * column.scale + column.mean]


def test_only_training_samples_of_training_clients_decide() -> None:
    """All other cells may be anything: the constants are the same, and those of the training rows alone."""
    x = rows()
    split = federate(data(x), partition="natural", new_clients=1, dtype=torch.float64)
    keep = places(split, x, [0, 1, 2], "train")
    other = x.copy()
    others = np.setdiff1d(np.arange(len(x)), keep)
    other[others, 0] *= 100
    other[others, 2] -= 5e5
    again = federate(data(other), partition="natural", new_clients=1, dtype=torch.float64)
    assert again.preprocessing == split.preprocessing
    assert not torch.equal(again.x, split.x)
    tested = places(split, x, [0], "test")
    wanted = fitted(x[keep]).transform(x[tested])
    np.testing.assert_allclose(split.test(0)[0].numpy(), wanted, rtol=0, atol=1e-9)


def test_per_client_constants_are_each_clients_own() -> None:
    split = federate(data(rows()), partition="natural", new_clients=1, preprocessing="per-client", dtype=torch.float64)
    for client in range(4):  # the new one too
        x = split.train(client)[0]
        assert x[:, 1].mean().item() == pytest.approx(0, abs=1e-8)
        assert x[:, 1].std(correction=0).item() == pytest.approx(1, abs=1e-8)
    assert split.preprocessing is not None
    assert split.preprocessing_of(2) != split.preprocessing_of(1) != split.preprocessing
    assert split.x.shape[1] == split.preprocessing.n_features


def test_numbers_may_be_left_as_they_are() -> None:
    x = rows()[:, [2, 4]]
    table = replace(data(rows()), x=torch.from_numpy(x), columns=(COLUMNS[2], COLUMNS[4]))
    split = federate(table, partition="natural", preprocessing="none", dtype=torch.float64)
    assert sorted(split.x[:, 0].tolist()) == sorted(x[:, 0].tolist())
    with pytest.raises(FedtailorError, match="The column 'age' has missing cells, of which --preprocessing none"):
        federate(data(rows()), partition="natural", preprocessing="none")


def test_what_training_did_not_have_counts_as_nothing_and_is_said() -> None:
    x = rows()
    split = federate(data(x), partition="natural", seed=3, dtype=torch.float64)
    rare = x.copy()
    first_tested = places(split, x, [0], "test")[0]
    rare[first_tested, 1], rare[first_tested, 2] = 3, np.nan
    columns = (COLUMNS[0], Column("ward", "category", (*COLUMNS[1].values, "tent")), *COLUMNS[2:])
    again = federate(data(rare, columns), partition="natural", seed=3)
    first = again.test(0)[0][0]
    assert first[1] == 0  # the mean
    assert first[5:8].tolist() == [0, 0, 0]
    assert again.preprocessing is not None
    assert again.preprocessing.columns[1].values == COLUMNS[1].values
    assert [note for note in again.notes if "'ward'" in note and "tent" in note]
    assert [note for note in again.notes if "'income'" in note and "count as the mean" in note]


def test_columns_go_by_name_in_the_order_of_the_first_client() -> None:
    x = rows(30)
    declared = [facts(part, COLUMNS) for part in (x[:10], x[10:20], x[20:])]
    assert agree([declared[0], declared[1][::-1], (*declared[2][3:], *declared[2][:3])]) == agree(declared)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda own: own[1:],
            "Site b has no column 'age', which site a has: add it there, or say columns 'age=ignore'",
        ),
        (
            lambda own: (*own, own[0].model_copy(update={"name": "agee"})),
            "Site b has a column 'agee', which site a does not have: say columns 'agee=ignore' there, or add",
        ),
        (
            lambda own: (ColumnFacts(name="age", kind="category", count=1, missing=0, values=("old",)), *own[1:]),
            "Site b has 'age' as a category, but site a as a number: say columns 'age=number', or",
        ),
        (lambda own: (*own, own[0]), "Site b declares a column twice: name each differently"),
    ],
)
def test_other_columns_are_refused_with_the_clients_name(change: Any, said: str) -> None:
    one = facts(rows(10), COLUMNS)
    with pytest.raises(FedtailorError, match=said):
        agree([one, one, change(one)], names=["site a", "site c", "site b"])
    with pytest.raises(FedtailorError, match=said.replace("Site b", "Client 1").replace("site a", "client 0")):
        agree([one, change(one)])


# --- what is rare ---

CANARY = "canary-7f3"
BIRD = 8_675_309.25  # another one, in a column of numbers


def with_canaries(times: int) -> Dataset:
    """Some of client 0's rows have a ward of their own, and a number in a column that is empty elsewhere."""
    x = np.hstack([rows(200), np.full((200, 1), np.nan)])
    x[0 : 4 * times : 4, 1] = 3
    x[0 : 4 * times : 4, 6] = BIRD
    x[1::4, 6] = 5.0  # client 1's
    ward = Column("ward", "category", (*COLUMNS[1].values, CANARY))
    return data(x, (COLUMNS[0], ward, *COLUMNS[2:], Column("bird", "number")))


@pytest.mark.parametrize("preprocessing", ["federated", "per-client", None])
def test_what_is_rare_is_in_no_facts_and_no_preprocessing(preprocessing: Any) -> None:
    options: dict[str, Any] = {"partition": "natural", "test": 0, "validation": 0, "preprocessing": preprocessing}
    for times, rare, told in ((4, 5, False), (5, 5, True), (1, 1, True), (1, 2, False)):
        split = federate(with_canaries(times), rare=rare, **options)
        written = [str([one.model_dump() for one in own]) for own in split.facts] + [str(split.preprocessing)]
        assert any(CANARY in text for text in written) == told
        assert any(str(BIRD) in text for text in written) == told
        assert not any(CANARY in note for note in split.notes)
        assert split.facts[0][6].count == (times if told else 0)
        plain = federate(with_canaries(times), **options)
        assert split.facts[0][2:6] == plain.facts[0][2:6]  # all else is told
        assert split.facts[2:] == plain.facts[2:]


def test_samples_with_a_rare_value_have_none_of_the_values() -> None:
    split = federate(with_canaries(2), partition="natural", test=0, validation=0, rare=3, dtype=torch.float64)
    assert split.preprocessing is not None
    wards = [place for place, name in enumerate(split.preprocessing.feature_names) if name.startswith("ward=")]
    assert (split.client(0).x[:, wards].sum(1) == 0).sum() == 2
    assert (split.client(1).x[:, wards].sum(1) == 1).all()
    bird = split.client(0).x[:, split.preprocessing.feature_names.index("bird")]
    assert bird[bird != 0].tolist() == [BIRD - 5] * 2  # with what others declare
    assert [
        note for note in split.notes if "'ward' have values that are rare in training, or not there (2 cells)" in note
    ]


def test_what_is_rare_everywhere_is_refused() -> None:
    options: dict[str, Any] = {"partition": "natural", "test": 0, "validation": 0}
    x = rows(200)
    x[:, 5] = np.nan
    x[:3, 5] = 1.0
    with pytest.raises(FedtailorError, match="The column 'constant' is empty, or rare, in the training samples of all"):
        federate(data(x), rare=2, **options)
    assert federate(data(x), rare=1, **options).preprocessing
    codes = rows(200)
    columns = (COLUMNS[0], Column("ward", "category", tuple(f"{k:03}" for k in range(200))), *COLUMNS[2:])
    codes[:, 1] = np.arange(200)
    with pytest.raises(FedtailorError, match="The column 'ward' is empty, or rare, in the training samples of all"):
        federate(data(codes, columns), rare=2, **options)
    assert federate(data(codes, columns), rare=2, preprocessing=None, **options).facts[0][1].values == ()
    with pytest.raises(FedtailorError, match="rare is 0: give 1 for all values, or more"):
        federate(data(x), rare=0)


def test_a_site_joins_the_table_that_it_has_agreed_on() -> None:
    """With cells that are missing in held-out samples alone, and rare values, as a simulation would take it."""
    x = rows(200)
    x[:, 0] = np.nan_to_num(x[:, 0], nan=50.0)
    columns = (COLUMNS[0], Column("ward", "category", (*COLUMNS[1].values, CANARY)), *COLUMNS[2:])
    x[0, 1] = 3
    options: dict[str, Any] = {"partition": "natural", "split": "official", "validation": 0, "rare": 4}
    part = torch.tensor([0, 0, 0, 0, 2, 2, 2, 2] * 25, dtype=torch.uint8)
    x[6, 0] = np.nan  # client 2 is not trained with it
    whole = replace(data(x, columns), part=part)
    together = federate(whole, **options)
    mine = whole.client == 2
    own = replace(
        whole,
        x=whole.cells[mine],
        y=whole.y[mine],
        part=part[mine],
        client=whole.client[mine],  # type: ignore[index]
    )
    own = replace(own, client=torch.zeros(50, dtype=torch.int64), client_names=("c",))
    alone = federate(own, preprocessing=together.preprocessing, **options)
    assert torch.equal(alone.client(0).x, together.client(2).x)
    assert alone.facts[0] == together.facts[2]
    with pytest.raises(FedtailorError, match="'own' has nothing in column 'age' in 1 samples"):
        federate(replace(own, part=torch.zeros_like(own.part)), preprocessing=together.preprocessing, **options)  # type: ignore[arg-type]


def test_facts_that_cannot_be_agreed_on() -> None:
    huge = np.array([[1e300], [-1e300]])
    with pytest.raises(FedtailorError, match="'age' has numbers that are too large to standardise"):
        agree([facts(huge, COLUMNS[:1])])
    tiny = Preprocessing(how="federated", columns=(PreparedColumn(name="age", kind="number", scale=1e-10),))
    with pytest.raises(FedtailorError, match="'age' has numbers that are too large to standardise"):
        tiny.transform(np.array([[1.0], [1e300]]))
    apart = [ColumnFacts(name="age", kind="number", count=1, missing=0, mean=mean) for mean in (1e300, -1e300)]
    with pytest.raises(FedtailorError, match="'age' has numbers that are too large to standardise"):
        agree([(one,) for one in apart])
