"""Partitions of the user's own: a function or a CSV file that says which client each sample belongs to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.data.assignments import is_own, names_code
from fedtailor.data.dataset import Dataset
from tests.helpers import numbers

Y = [0, 1, 2] * 20
LABELS = torch.tensor(Y)
DATA = Dataset("mine", torch.arange(60.0)[:, None].repeat(1, 4), LABELS, ("0", "1", "2"))
PARITY = [number % 2 for number in range(60)]
SMALL: dict[str, Any] = {"model": "mlp:4", "epochs": 1, "rounds": 2, "engine": "in-process", "checkpoint_every": 1}


def by_class(labels: Any, clients: int, rng: Any) -> Any:
    return labels % 3


def in_lists(labels: Any, clients: int, rng: Any) -> Any:
    order = rng.permutation(len(labels))
    return [order[number::clients] for number in range(clients)]


NOT_A_FUNCTION = 3


def owners(data: ft.data.FederatedData) -> dict[str, set[int]]:
    """The samples that each client has: their first feature is their number."""
    return {name: set(map(int, data.client(number).x[:, 0])) for number, name in enumerate(data.names)}


def federated(partition: Any, data: Dataset = DATA, **settings: Any) -> ft.data.FederatedData:
    return ft.federate(data, partition=partition, **settings)


def expected(given: list[Any]) -> dict[str, set[int]]:
    return {str(name): {i for i, owner in enumerate(given) if owner == name} for name in set(given)}


class TestAFunction:
    def test_it_may_say_each_samples_client(self) -> None:
        assert owners(federated(by_class)) == expected(Y)
        assert owners(federated("tests.data.test_assignments:by_class")) == expected(Y)

    @pytest.mark.parametrize(
        "convert", [list, tuple, np.array, torch.tensor, lambda values: np.array(values, dtype=np.uint8)]
    )
    def test_in_any_form(self, convert: Callable[[list[int]], Any]) -> None:
        assert owners(federated(lambda *_: convert(PARITY))) == expected(PARITY)

    def test_by_name(self) -> None:
        names = ["north" if odd else "south" for odd in PARITY]
        for form in (names, np.array(names), np.array(names, dtype=object)):
            found = federated(lambda *_, form=form: form)
            assert found.names == ("north", "south")
            assert owners(found) == expected(names)

    def test_or_each_clients_samples(self) -> None:
        even, odd = list(range(0, 60, 2)), list(range(1, 60, 2))
        for form in ([even, odd], (np.array(even), torch.tensor(odd))):
            assert owners(federated(lambda *_, form=form: form)) == expected(PARITY)
        found = federated(lambda *_: {"south": even, "north": odd})
        assert found.names == ("south", "north")
        assert owners(found) == {"south": set(even), "north": set(odd)}

    def test_it_gets_labels_the_number_of_clients_and_a_stream_of_the_seed(self) -> None:
        seen: list[Any] = []

        def look(labels: Any, clients: int, rng: Any) -> Any:
            seen.append((labels.tolist(), clients))
            labels[:] = 0  # a copy
            return in_lists(labels, 4, rng)

        first, again, other = (federated(look, seed=seed) for seed in (0, 0, 1))
        assert seen == [(Y, 20)] * 3
        assert LABELS.tolist() == Y
        assert owners(first) == owners(again) != owners(other)
        assert federated(in_lists, clients=5).n_clients == 5

    def test_it_may_leave_samples_out(self) -> None:
        some = [-1 if number < 12 else number % 2 for number in range(60)]
        assert owners(federated(lambda *_: some)) == {"0": set(range(12, 60, 2)), "1": set(range(13, 60, 2))}

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ([0] * 59, r"values of the shape \(59,\) for 60 samples: return one client for each, or a list"),
            (np.zeros((60, 2)), r"values of the shape \(60, 2\) for 60 samples"),
            (None, r"values of the shape \(\) for 60 samples"),
            ([0.5] * 60, "values that are no clients: give each sample a whole number from 0, a name, or -1"),
            ([-2] * 60, "values that are no clients"),
            ([None] * 60, "values that are no clients"),
            ([True] * 60, "values that are no clients"),
            ([-1] * 60, "leaves all samples out"),
            ([" "] * 60, "has a client without a name"),
            (["x" * 1001] * 60, "or with one of more than 1,000 letters"),
            ([range(30), range(31, 60)], "lacks 1 of 60 samples, the first is sample 30: give each to one client"),
            ([range(31), range(30, 60)], "names the sample 30 twice: give each to one client"),
            ([[*range(60), 7]], "names the sample 7 twice"),
            ([range(60), []], "gives the client '1' no samples: leave it out, or give it some"),
            ([range(61)], "names the sample 60: they are numbered from 0 to 59"),
            ([[-1, *range(60)]], "names the sample -1: they are numbered from 0 to 59"),
            ([[0.5], range(60)], "gives the client '0' no list of samples' numbers"),
            ({"a": range(30), "": range(30, 60)}, "two clients of the same name, or one without a name"),
            ({1: range(30), "1": range(30, 60)}, "two clients of the same name"),
            ({"a": 3}, "gives the client 'a' no list of samples' numbers"),
        ],
    )
    def test_what_is_no_partition_is_one_sentence(self, given: Any, said: str) -> None:
        with pytest.raises(ft.FedtailorError, match=said) as error:
            federated(lambda *_: given)
        assert str(error.value).startswith("The partition object:")

    @pytest.mark.parametrize(
        ("partition", "said"),
        [
            ("tests.data.test_assignments:NOT_A_FUNCTION", r"is not a function of .labels, clients, rng.\.$"),
            ("tests.data.test_assignments:by_clas", "There is no 'by_clas' in the module"),
            ("no_such_module:f", "The partition 'no_such_module:f' cannot be imported"),
            ("dirichlett:0.3", "There is no partition 'dirichlett': did you mean 'dirichlet'"),
            ("dirichlet:much", "needs a number above 0 after the colon"),
            (lambda labels: labels, "fails: TypeError"),
        ],
    )
    def test_a_wrong_name_too(self, partition: Any, said: str) -> None:
        with pytest.raises(ft.FedtailorError, match=said):
            federated(partition)

    def test_one_that_fails_names_its_line(self) -> None:
        def broken(labels: Any, clients: int, rng: Any) -> Any:
            raise ValueError("no luck")

        with pytest.raises(ft.FedtailorError, match=r"fails: ValueError: no luck \(test_assignments.py, line \d+\)\.$"):
            federated(broken)

    def test_another_number_of_clients_than_was_asked_for(self) -> None:
        assert federated(by_class, clients=3).n_clients == 3
        with pytest.raises(ft.FedtailorError, match="makes 3 clients, not 4: leave the number out"):
            federated(by_class, clients=4)

    def test_a_client_that_has_nothing_to_train_on(self) -> None:
        parts = torch.tensor([2 if number % 2 else 0 for number in range(60)], dtype=torch.uint8)
        split = Dataset("mine", DATA.x, LABELS, DATA.classes, part=parts)
        with pytest.raises(ft.FedtailorError, match="Client '1' of 'mine' has no training sample"):
            federated(lambda *_: PARITY, split, split="official")

    def test_groups_stay_together(self) -> None:
        pairs = Dataset("mine", DATA.x, LABELS, DATA.classes, group=torch.arange(60) // 2)
        together = [number // 2 % 2 for number in range(60)]
        assert owners(federated(lambda *_: together, pairs)) == expected(together)
        with pytest.raises(ft.FedtailorError, match=r"divides a group among clients \(samples 0 and 1\): keep each"):
            federated(lambda *_: PARITY, pairs)

    def test_numbers_and_several_labels_too(self) -> None:
        regression = Dataset("mine", DATA.x, LABELS.float(), ())
        several = Dataset("mine", DATA.x, torch.eye(3)[LABELS], DATA.classes)
        for data in (regression, several):
            assert owners(federated(lambda *_: PARITY, data)) == expected(PARITY)

    def test_clients_held_out_keep_their_names(self) -> None:
        names = ["abc"[number % 3] for number in range(60)]
        found = federated(lambda *_: names, new_clients=1)
        assert sorted(found.names) == ["a", "b", "c"]
        assert found.new == {2}
        assert owners(found) == expected(names)


def written(path: Path, rows: list[tuple[Any, ...]], header: str = "sample,client") -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


ROWS = [(number, ("north", "south")[number % 2]) for number in range(60)]


class TestAFile:
    def test_names_every_samples_client(self, tmp_path: Path) -> None:
        path = written(tmp_path / "split.csv", ROWS[::-1])
        for partition in (path, str(path)):
            found = federated(partition)
            assert found.names == ("north", "south")
            assert owners(found) == {"north": set(range(0, 60, 2)), "south": set(range(1, 60, 2))}
        swapped = written(tmp_path / "other.CSV", [row[::-1] for row in ROWS], "client,sample")
        assert owners(federated(swapped)) == owners(found)
        assert found.assignment == federated(swapped).assignment

    def test_with_semicolons_and_names_in_any_script(self, tmp_path: Path) -> None:
        path = tmp_path / "split.csv"
        path.write_text("sample;client\n" + "".join(f"{n};{'Zürich, Nord' if n % 2 else '007'}\n" for n in range(60)))
        assert federated(path).names == ("007", "Zürich, Nord")

    @pytest.mark.parametrize(
        ("rows", "header", "said"),
        [
            (ROWS[:-2], "sample,client", r"split.csv lacks 2 of 60 samples, the first is sample 58"),
            ([*ROWS, (7, "north")], "sample,client", r"Line 62 of .*split.csv names the sample 7 again: give each"),
            (
                [(60, "north"), *ROWS[1:]],
                "sample,client",
                "Line 2 of .* names the sample '60': they are numbered from 0",
            ),
            ([("x", "north"), *ROWS[1:]], "sample,client", "names the sample 'x'"),
            ([(-1, "north"), *ROWS[1:]], "sample,client", "names the sample '-1'"),
            ([("9" * 5000, "north"), *ROWS[1:]], "sample,client", "names the sample '999"),
            ([(0, ""), *ROWS[1:]], "sample,client", "Line 2 of .* names no client"),
            ([(0, "x" * 1001), *ROWS[1:]], "sample,client", "or one of more than 1,000 letters"),
            ([(0, "a", "b"), *ROWS[1:]], "sample,client", "Line 2 of .* has 3 cells, but the header 2: mend that line"),
            (ROWS, "sample,who", "has the columns 'sample', 'who', but it needs sample and client"),
            (ROWS, "1,2", "has no header"),
            ([], "sample,client", "lacks 60 of 60 samples"),
        ],
    )
    def test_what_is_wrong_with_it_is_one_sentence(
        self, rows: list[Any], header: str, said: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ft.FedtailorError, match=said):
            federated(written(tmp_path / "split.csv", rows, header))

    def test_a_file_that_is_not_there(self) -> None:
        with pytest.raises(ft.FedtailorError, match=r"There is no file no/split.csv for the partition: check the path"):
            federated("no/split.csv")


@pytest.mark.parametrize(
    "spec", ["iid", "dirichlet:0.3", "classes:2", "natural", "natural+classes:2", "dirichlett:0.3"]
)
def test_those_of_the_catalogue_are_nobodys_own(spec: str) -> None:
    assert not is_own(spec)
    assert not names_code(spec)


# --- runs ---


def test_a_run_records_it_and_refuses_another_one(tmp_path: Path) -> None:
    path = written(tmp_path / "split.csv", [(number, "abc"[number % 3]) for number in range(1797)])
    result = ft.run("ditto", partition=path, out=tmp_path / "run", **SMALL)
    assert result.names == ("a", "b", "c")
    recorded = json.loads((tmp_path / "run/partition.json").read_text())
    assert (recorded["partition"], recorded["assignment"]) == (str(path), result.data.assignment)
    again = ft.resume(tmp_path / "run", rounds=3)
    assert numbers(again.rounds) == numbers(ft.run("ditto", partition=path, **{**SMALL, "rounds": 3}).rounds)
    written(path, [(number, "abc"[(number + (number == 5)) % 3]) for number in range(1797)])
    said = r"The partition .*split.csv is not that of the run in .*run: it gives samples to other clients than it did"
    with pytest.raises(ft.FedtailorError, match=said):
        ft.resume(tmp_path / "run", rounds=4)
    assert ft.load(tmp_path / "run").names == ("a", "b", "c")
    with pytest.raises(ft.FedtailorError, match=said):
        ft.load(tmp_path / "run").personal("a")


def test_a_function_has_to_be_passed_again_or_trusted(tmp_path: Path) -> None:
    by_object = ft.run("ditto", partition=in_lists, clients=4, out=tmp_path / "run", **SMALL)
    by_name = ft.run("ditto", partition="tests.data.test_assignments:in_lists", clients=4, **SMALL)
    assert by_object.experiment.partition == "tests.data.test_assignments:in_lists"
    assert numbers(by_object.rounds) == numbers(by_name.rounds)
    with pytest.raises(
        ft.FedtailorError, match=r"names code of its own \(partition tests.data.test_assignments:in_lists"
    ):
        ft.resume(tmp_path / "run", rounds=3)
    with pytest.raises(ft.FedtailorError, match="not the run's partition"):
        ft.resume(tmp_path / "run", rounds=3, partition=by_class)
    loaded = ft.load(tmp_path / "run")  # which runs nothing
    assert loaded.value == by_object.value
    with pytest.raises(ft.FedtailorError, match="names code of its own"):
        loaded.personal(0)
    ft.load(tmp_path / "run", partition=in_lists).personal(0)
    ft.resume(tmp_path / "run", rounds=3, partition=in_lists)
    assert len(ft.resume(tmp_path / "run", rounds=4, trust=True).rounds) == 4
    file = ft.export(loaded := ft.load(tmp_path / "run", trust=True), to=tmp_path / "models", client=0)[0]
    from fedtailor.model_files.prediction import Model

    with pytest.raises(ft.FedtailorError, match=r"by code of its own .tests.data.test_assignments:in_lists"):
        Model(file).of_run(tmp_path / "run")


def test_a_function_without_a_name(tmp_path: Path) -> None:
    ft.run("ditto", partition=lambda labels, clients, rng: labels % 4, out=tmp_path / "run", **SMALL)
    with pytest.raises(
        ft.FedtailorError, match=r"got its partition as a Python object .*: pass partition= to resume it"
    ):
        ft.resume(tmp_path / "run", rounds=3)


def test_in_comparisons_tuning_and_advice(tmp_path: Path) -> None:
    settings = {**SMALL, "partition": by_class, "clients": None}
    table = ft.compare(["local", "fedavg"], seeds=[0], **settings)
    assert table.lines[0].results[0].data.names == ("0", "1", "2")
    named = {**settings, "partition": "tests.data.test_assignments:by_class"}
    for given in (settings, named):  # the same comparison
        recorded = ft.compare(["local", "fedavg"], seeds=[0], out=tmp_path / "out", **given)
        assert recorded.lines[1].value == table.lines[1].value
    advice = ft.advise(budget=0.1, methods=["fedavg"], partition=by_class, engine="in-process")
    assert advice.candidates
