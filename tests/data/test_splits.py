"""How a client's samples are split: in proportion by class, with groups whole, and as the user says."""

import dataclasses
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import seal
from fedtailor.data import Dataset, FederatedData, federate, from_list, load
from fedtailor.server.run_directory import RunDirectory

from .files import toy
from .test_federated import natural, numbers, official, sizes


def labelled(*clients: list[int]) -> Dataset:
    """Clients with so many samples of class 0, 1, …; the feature is the number of the sample."""
    y = [label for counts in clients for label, count in enumerate(counts) for _ in range(count)]
    owner = [client for client, counts in enumerate(clients) for _ in range(sum(counts))]
    names = tuple(f"site-{client}" for client in range(len(clients)))
    classes = tuple(map(str, range(max(map(len, clients)))))
    x = torch.arange(len(y), dtype=torch.float32)[:, None]
    return Dataset("toy", x, torch.tensor(y), classes, client=torch.tensor(owner), client_names=names)


def by_class(split: FederatedData, client: int = 0) -> list[list[int]]:
    return [split.counts(side)[client].tolist() for side in ("train", "validation", "test")]


# Made by the code that split without regard to classes (federate before there was `stratify`).
RANDOM = {
    "small": "96ac42d1", "default": "6a66ff17", "thinned": "41620812", "groups": "04117a61", "official": "a5331577",
    "official natural": "40dafda7", "digits": "b7b7196b",
}  # fmt: skip


def grouped() -> Dataset:
    group = torch.arange(400) // 4
    data = dataclasses.replace(natural(200, 200), group=group)
    return dataclasses.replace(data, y=data.y[group * 4])


def test_without_stratify_splits_have_the_bits_that_they_always_had() -> None:
    data = natural(1, 2, 3, 4, 100, 57)
    sides = dataclasses.replace(natural(60, 40), part=torch.tensor([0, 0, 2, 0] * 25, dtype=torch.uint8))
    kept: dict[str, Any] = {"split": "official", "validation": 0.2, "stratify": False}
    made = {
        "small": federate(data, partition="natural", test=0.3, validation=0.2, seed=1, stratify=False),
        "default": federate(toy(), clients=5, seed=2, stratify=False),
        "thinned": federate(
            toy(1000), partition="classes:3", clients=8, max_train=20, new_clients=2, seed=3, stratify=False
        ),
        "groups": federate(grouped(), partition="natural", test=0.25, validation=0.25, seed=4, stratify=False),
        "official": federate(official(0.7, 0.0, 0.3), partition="dirichlet:0.5", clients=10, seed=5, **kept),
        "official natural": federate(sides, partition="natural", seed=8, **kept),
        "digits": federate(load("digits"), clients=20, stratify=False),
    }
    assert {name: split.fingerprint() for name, split in made.items()} == RANDOM


def test_each_class_is_split_in_proportion() -> None:
    split = federate(labelled([50, 30, 20], [10, 0, 90]), partition="natural")
    assert by_class(split, 0) == [[35, 21, 14], [5, 3, 2], [10, 6, 4]]
    assert by_class(split, 1) == [[7, 0, 63], [1, 0, 9], [2, 0, 18]]


def test_a_share_is_rounded_down_or_up() -> None:
    # 20 test samples of 100: 12.8, 5.2 and 2.0; of the 80 left, 10 for validation
    for seed in range(20):
        train, validation, test = by_class(federate(labelled([64, 26, 10]), partition="natural", seed=seed))
        assert test[0] in (12, 13)
        assert test[1] in (5, 6)
        assert test[2] == 2
        assert [sum(part) for part in (train, validation, test)] == [70, 10, 20]
        for size, held, left in zip((64, 26, 10), test, validation, strict=True):
            assert abs(left - 10 * (size - held) / 80) < 1


def test_every_sample_has_the_same_chance_to_be_tested() -> None:
    """Those of a class that a client has once, too: or test samples would be easier than the client's own."""
    seeds = 500
    found = [by_class(federate(labelled([16, 2, 1, 1]), partition="natural", seed=seed))[2] for seed in range(seeds)]
    for size, mean in zip((16, 2, 1, 1), np.mean(found, axis=0), strict=True):
        fraction = 0.2 * size % 1
        assert abs(mean - 0.2 * size) < 4 * (fraction * (1 - fraction) / seeds) ** 0.5


def test_equal_remainders_are_settled_by_the_seed_and_differ_between_clients() -> None:
    data = labelled(*[[5] * 4] * 30)  # 20 samples: 4 for testing, one of each class, and 2 for validation of 4 classes
    chosen = federate(data, partition="natural").counts("validation")
    assert chosen.sum(1).tolist() == [2] * 30
    assert (chosen.sum(0) > 5).all()
    again, other = (federate(data, partition="natural", seed=seed).counts("validation") for seed in (0, 1))
    assert torch.equal(chosen, again)
    assert not torch.equal(chosen, other)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shares", [(0.2, 0.1), (0.45, 0.45), (0.0, 0.3), (0.3, 0.0)])
def test_sizes_are_those_of_a_random_split_and_classes_are_close_to_their_share(
    shares: tuple[float, float], seed: int
) -> None:
    test, validation = shares
    data = natural(1, 2, 3, 4, 5, 17, 40, 99)
    options: dict[str, Any] = {"partition": "natural", "test": test, "validation": validation, "seed": seed}
    split = federate(data, **options)
    assert sizes(split) == sizes(federate(data, stratify=False, **options))
    held, all_samples = split.counts("test"), split.counts()
    for client, (_, _, n_test) in enumerate(sizes(split)):
        total = int(all_samples[client].sum())
        for label, count in enumerate(all_samples[client].tolist()):
            quota = Fraction(count * n_test, total)
            assert abs(int(held[client, label]) - quota) < 1 or count == 1 or int(all_samples[client].max()) == 1, label


def test_validation_is_taken_off_an_official_training_part_by_class_and_by_natural_client() -> None:
    data = labelled([40, 20], [20, 20], [8, 2])
    part = torch.zeros(len(data), dtype=torch.uint8)
    part[::10] = 2
    data = dataclasses.replace(data, part=part)
    split = federate(data, partition="natural", split="official", validation=0.2)
    assert int(split.counts("validation").sum()) == round(0.2 * int((part == 0).sum()))
    # training parts of 36 + 18, 18 + 18 and 7 + 2 samples, of which 20 are taken
    by_client = split.counts("validation").sum(1).tolist()
    for found, share in zip(by_client, (20 * 53 / 96, 20 * 35 / 96, 20 * 8 / 96), strict=True):  # each keeps one
        assert abs(found - share) < 1
    for found, taken, share in zip(
        split.counts("validation")[:, 0].tolist(), by_client, (2 / 3, 1 / 2, 7 / 9), strict=True
    ):
        assert abs(found - taken * share) < 1
    drawn = federate(official(0.7, 0.0, 0.3), partition="iid", clients=1, split="official", validation=0.2)
    train = drawn.counts("train")[0] + drawn.counts("validation")[0]
    quota = drawn.counts("validation").sum() * train / train.sum()
    assert ((drawn.counts("validation")[0] - quota).abs() < 1).all()


def test_a_regression_is_split_at_random() -> None:
    data = from_list([(torch.arange(50.0)[:, None], torch.rand(50))])
    both = [federate(data, partition="natural", stratify=stratify).fingerprint() for stratify in (True, False)]
    assert both[0] == both[1]


# --- groups ---


def test_groups_are_split_in_proportion_by_the_class_that_most_of_their_samples_have() -> None:
    # Ten groups of five: most samples are of class 0 in the first five and of 1 in the others; all begin with class 2.
    y = torch.tensor([[2, 0, 0, 0, 2]] * 5 + [[2, 1, 1, 1, 2]] * 5).flatten()
    data = Dataset(
        "toy",
        torch.arange(50.0)[:, None],
        y,
        ("a", "b", "c"),
        client=torch.zeros(50, dtype=torch.int64),
        client_names=("one",),
        group=torch.arange(50) // 5 + 100,
    )
    for seed in range(5):
        split = federate(data, partition="natural", test=0.4, validation=0.2, seed=seed)
        for side, each in ((split.train(0), 2), (split.validation(0), 1), (split.test(0), 2)):
            groups = Counter(number // 5 for number in numbers(side))
            assert set(groups.values()) == {5}
            assert sum(group < 5 for group in groups) == sum(group >= 5 for group in groups) == each


def test_equal_groups_of_two_clients_are_different_ones() -> None:
    """Patient 7 of one hospital is another than patient 7 of the next."""
    data = dataclasses.replace(natural(40, 40), group=torch.arange(80) % 4)
    split = federate(data, partition="natural", test=0.25, validation=0.25)
    assert sizes(split) == [[20, 10, 10]] * 2
    sides = [{number % 4 for number in numbers(split.test(client))} for client in range(2)]
    assert [len(side) for side in sides] == [1, 1]
    several = [federate(data, partition="natural", test=0.25, seed=seed) for seed in range(8)]
    assert any({n % 4 for n in numbers(s.test(0))} != {n % 4 for n in numbers(s.test(1))} for s in several)


def test_clients_without_test_samples_are_named() -> None:
    data = dataclasses.replace(natural(20, 20), group=torch.tensor([5] * 20 + [1] * 10 + [2] * 10))
    with pytest.warns(UserWarning, match="1 of 2 clients have no test samples and are not measured: site-0; "):
        split = federate(data, partition="natural")
    assert sizes(split) == [[20, 0, 0], [10, 0, 10]]


def test_a_group_in_two_parts_is_refused() -> None:
    x = torch.zeros(4, 2)
    with pytest.raises(FedtailorError, match="more than one part of the split"):
        from_list([{"x": x, "y": [0, 1, 0, 1], "group": [1, 1, 2, 2], "split": ["train", "test", "train", "train"]}])


# --- splits and groups of the user's own ---


def entry(offset: int, n: int = 20, **more: object) -> dict[str, object]:
    return {"x": np.arange(offset, offset + n, dtype=np.float32)[:, None], "y": np.arange(n) % 2, **more}


def test_a_split_of_the_users_own_is_kept_unless_another_is_asked_for(tmp_path: Path) -> None:
    parts = ["train"] * 10 + ["Test"] * 6 + ["val"] * 4
    kept = [[10, 4, 6]] * 2
    data = from_list({"north": entry(0, split=parts), "south": entry(20, split=[0] * 10 + [2] * 6 + [1] * 4)})
    assert data.client_names == ("north", "south")
    assert sizes(federate(data, partition="natural")) == kept
    assert sizes(federate(data, partition="natural", split="official")) == kept
    assert sizes(federate(data, partition="natural", split="merge")) == [[14, 2, 4]] * 2
    owner = np.arange(40) // 20
    np.savez(tmp_path / "own.npz", **entry(0, 40), client=owner, split=np.array(parts * 2), group=np.arange(40) // 2)
    own = load(str(tmp_path / "own.npz"))
    assert sizes(federate(own, partition="natural")) == kept
    assert own.group is not None
    assert own.group.tolist() == [number // 2 for number in range(40)]
    with_part = dataclasses.replace(data, own_split=False)  # as a data set of the catalogue has it
    assert sizes(federate(with_part, partition="natural")) == [[14, 2, 4]] * 2


def test_validation_is_taken_off_a_split_of_the_users_own_by_group() -> None:
    group = np.arange(40) // 4
    one = entry(0, 40, split=["train"] * 32 + ["test"] * 8, group=group)
    data = from_list([one, entry(40, 8, split=[0, 2] * 4, group=range(8))])
    split = federate(data, partition="natural", validation=0.25)
    assert sizes(split)[0] == [24, 8, 8]
    held = Counter(group[number] for number in numbers(split.validation(0)))
    assert set(held.values()) == {4}
    assert sizes(split)[1] == [3, 1, 4]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, "The dictionary 'dictionary' is empty"),
        ({"": entry(0)}, "The key '' of 'dictionary' names no client: give a text"),
        ({3: entry(0)}, "The key 3 of 'dictionary' names no client"),
        ({"north": 5}, "Client north of 'dictionary' is neither a pair"),
        ({"north": {"x": torch.zeros(2, 1)}}, "Client north of 'dictionary' has the keys x: give x and y"),
        ({"north": entry(0, labels=3)}, "has the keys x, y, labels: give x and y"),
        ([entry(0, group=[1, 2])], "Client 0 of 'list' has 20 samples and 2 entries in 'group'"),
        ([entry(0, group=[[1]] * 20)], "The group of client 0 of 'list' has shape"),
        ([entry(0, group=[1.5] * 20)], "hold fractions or NaN"),
        ([entry(0, group=["a", None] * 10)], "The group of client 0 of 'list' is missing for some samples"),
        ([entry(0, split=["train", "dev"] * 10)], "The split of 'list' holds 'dev': write train, validation or test"),
        ([entry(0, split=[0] * 20), entry(0)], "Some clients of 'list' have 'split' and others not"),
        (
            {"a": entry(0), "b": (torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))},
            r"Client b of 'dictionary' has features of type float32 and shape \(3,\), but client a of",
        ),
    ],
)
def test_refusals(data: Any, sentence: str) -> None:
    with pytest.raises(FedtailorError, match=sentence):
        from_list(data)


def test_names_of_a_dictionary_are_those_of_the_result(tmp_path: Path) -> None:
    clients = {"north": (torch.randn(40, 3), torch.arange(40) % 2), "south": (torch.randn(30, 3), torch.arange(30) % 2)}
    settings: dict[str, Any] = {"data": clients, "rounds": 1, "model": "mlp:4", "engine": "in-process"}
    result = ft.run("fedavg", out=tmp_path / "run", **settings)
    assert result.names == ("north", "south")
    assert ft.load(tmp_path / "run").names == ("north", "south")
    assert "north" in (tmp_path / "run" / "partition.json").read_text()
    table = ft.compare(["local", "fedavg"], seeds=[0], **settings)
    assert len(table.lines) == 2
    adapted = ft.adapt(result, data={"east": clients["north"]}, epochs=1, engine="in-process")
    assert [client.name for client in adapted.per_client.values()] == ["east"]
    ft.advise(methods=["local"], budget=1, **settings)


def test_a_run_from_before_there_was_stratify_has_its_own_split(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data": "digits", "clients": 3, "rounds": 1, "epochs": 1, "model": "mlp:4"}
    before = ft.run("fedavg", out=tmp_path / "run", stratify=False, engine="in-process", **settings)
    about, file = RunDirectory(tmp_path / "run").about(), tmp_path / "run" / "experiment.toml"
    del about.experiment["stratify"]
    (tmp_path / "run" / "about.json").write_bytes(seal(dataclasses.asdict(about), pretty=True))
    file.write_text(file.read_text().replace("stratify = false\n", ""))
    after = ft.load(tmp_path / "run")
    assert torch.equal(after.data.y, before.data.y)
    assert ft.resume(tmp_path / "run", rounds=2).experiment.stratify is False
