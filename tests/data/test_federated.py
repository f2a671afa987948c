import dataclasses

import pytest
import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.data import Dataset, FederatedData, federate, load
from fedtailor.data.federation import as_inputs

from .files import toy


def sizes(split: FederatedData) -> list[list[int]]:
    return split.bounds.diff(dim=1).tolist()


def natural(*samples: int) -> Dataset:
    clients = torch.arange(len(samples)).repeat_interleave(torch.tensor(samples))
    names = tuple(f"site-{client}" for client in range(len(samples)))
    return dataclasses.replace(toy(sum(samples)), client=clients, client_names=names)


def test_a_clients_data_are_slices_of_one_tensor() -> None:
    split = federate(toy(), clients=5)
    assert split.bounds.shape == (5, 4)
    assert split.bounds[0, 0] == 0
    assert split.bounds[-1, 3] == len(split.x) == len(split.y)
    gaps = split.bounds[1:, 0] - split.bounds[:-1, 3]  # up to the next 64-byte address
    assert 0 <= int(gaps.min()) <= int(gaps.max()) < 16
    for client, (start, train, validation, test) in enumerate(split.bounds.tolist()):
        for (x, y), part in zip(
            (split.train(client), split.validation(client), split.test(client)),
            (slice(start, train), slice(train, validation), slice(validation, test)),
            strict=True,
        ):
            assert torch.equal(x, split.x[part])
            assert torch.equal(y, split.y[part])
            assert x.untyped_storage().data_ptr() == split.x.untyped_storage().data_ptr()
    assert (split.n_clients, split.names) == (5, ("0", "1", "2", "3", "4"))
    assert split.n_samples.tolist() == [len(split.train(client)[1]) for client in range(5)]


@pytest.mark.parametrize("kind", ["classes", "labels", "numbers"])
def test_counts_are_those_of_each_clients_samples(kind: str) -> None:
    data = toy(300)
    if kind != "classes":
        labels = (torch.rand(300, 4, generator=torch.Generator().manual_seed(0)) < 0.4).float()
        y, classes = (labels, data.classes[:4]) if kind == "labels" else (labels[:, 0], ())
        data = dataclasses.replace(data, y=y, classes=classes)
    split = federate(data, partition="quantity:1", clients=7, min_samples=5, new_clients=2)
    for name in ("train", "validation", "test", None):
        counts = split.counts(name)
        assert counts.dtype == torch.int64
        for client, row in enumerate(counts):
            _, y = split._slice(client, name or "all")
            if kind == "classes":
                assert row.tolist() == [int((y == number).sum()) for number in range(len(data.classes))]
            else:
                assert row.tolist() == (y.sum(0).tolist() if kind == "labels" else [len(y)])
    assert split.class_counts().tolist() == split.counts("train")[:5].sum(0).tolist()


def test_fractions_of_each_client() -> None:
    split = federate(natural(100, 10, 200), partition="natural", test=0.2, validation=0.1)
    assert sizes(split) == [[70, 10, 20], [7, 1, 2], [140, 20, 40]]
    assert split.names == ("site-0", "site-1", "site-2")
    assert sizes(federate(natural(100), partition="natural", test=0, validation=0)) == [[100, 0, 0]]


def test_small_clients_keep_a_training_sample_first_then_a_test_sample() -> None:
    split = federate(natural(1, 2, 3, 4), partition="natural", test=0.45, validation=0.45)
    assert sizes(split) == [[1, 0, 0], [1, 0, 1], [1, 1, 1], [1, 1, 2]]


def test_the_split_is_random_but_reproducible() -> None:
    first, same, other = (federate(natural(100), partition="natural", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.test(0)[0], same.test(0)[0])
    assert not torch.equal(first.test(0)[0], other.test(0)[0])
    assert 20 < float(first.test(0)[0].mean()) < 80


def test_counts_by_split_add_up() -> None:
    split = federate(toy(), clients=5)
    parts = [split.counts(part) for part in ("train", "validation", "test")]
    assert torch.equal(torch.stack(parts).sum(0), split.counts())
    assert parts[0].sum(1).tolist() == split.n_samples.tolist()
    for client in range(5):
        assert parts[2][client].tolist() == split.test(client)[1].bincount(minlength=10).tolist()
    with pytest.raises(FedtailorError, match="did you mean 'train'"):
        split.counts("trian")


def numbers(pair: tuple[Tensor, Tensor]) -> set[int]:
    return set(pair[0][:, 0].int().tolist())


@pytest.mark.parametrize("spec", ["natural", "dirichlet:0.5", "iid", "classes:5"])
def test_a_group_is_never_on_two_sides_nor_at_two_clients(spec: str) -> None:
    data = natural(200, 200)
    group = torch.arange(400) // 4
    data = dataclasses.replace(data, group=group, y=data.y[group * 4])
    split = federate(data, partition=spec, clients=2, test=0.25, validation=0.25, min_samples=4)
    seen: set[int] = set()
    for client in range(2):
        for side in (split.train(client), split.validation(client), split.test(client)):
            groups = {number // 4 for number in numbers(side)}
            assert len(groups) * 4 == len(side[1])
            assert not groups & seen
            seen |= groups
    assert len(seen) == 100


def official(*parts: float) -> Dataset:
    return toy(2000, parts=parts)


def test_official_parts_are_kept() -> None:
    data = official(0.6, 0.1, 0.3)
    assert data.part is not None
    split = federate(data, partition="classes-random:2", clients=10, split="official", test=0.9, validation=0)
    for part, get in enumerate((split.train, split.validation, split.test)):
        held = set().union(*(numbers(get(client)) for client in range(10)))
        assert held == set((data.part == part).nonzero().flatten().tolist())


def test_official_takes_validation_off_the_training_part_only_if_there_is_none() -> None:
    data = official(0.7, 0.0, 0.3)
    assert data.part is not None
    train = set((data.part == 0).nonzero().flatten().tolist())
    split = federate(data, partition="iid", clients=10, split="official", validation=0.2)
    held = set().union(*(numbers(split.validation(client)) for client in range(10)))
    assert held < train
    assert len(held) == round(0.2 * len(train))
    test = set().union(*(numbers(split.test(client)) for client in range(10)))
    assert test == set((data.part == 2).nonzero().flatten().tolist())
    with_own = official(0.6, 0.1, 0.3)
    assert with_own.part is not None
    split = federate(with_own, partition="iid", clients=10, split="official", validation=0.5)
    assert int(split.counts("validation").sum()) == int((with_own.part == 1).sum())


def test_official_with_natural_clients() -> None:
    data = dataclasses.replace(natural(20, 20), part=torch.tensor([0, 0, 2, 2] * 10, dtype=torch.uint8))
    assert sizes(federate(data, partition="natural", split="official", validation=0)) == [[10, 0, 10]] * 2
    data = dataclasses.replace(data, part=torch.tensor([0] * 20 + [2] * 20, dtype=torch.uint8))
    with pytest.raises(FedtailorError, match="Client 'site-1' of 'toy' has no training sample"):
        federate(data, partition="natural", split="official", validation=0)


def test_max_train_thins_training_samples_and_validation_samples_in_proportion() -> None:
    full = federate(natural(100, 20), partition="natural")
    split = federate(natural(100, 20), partition="natural", max_train=30)
    assert sizes(split) == [[30, 4, 20], [14, 2, 4]]
    assert numbers(split.train(0)) < numbers(full.train(0))
    assert numbers(split.test(0)) == numbers(full.test(0))
    assert numbers(split.train(0)) != set(sorted(numbers(full.train(0)))[:30])


def test_new_clients_are_chosen_by_the_seed_and_come_last() -> None:
    data = natural(*range(20, 30))
    held = [federate(data, partition="natural", new_clients=4, seed=seed) for seed in (0, 0, 1)]
    assert held[0].new == {6, 7, 8, 9}
    assert sorted(held[0].names) == sorted(data.client_names)
    assert held[0].names == held[1].names != held[2].names
    for name, size in zip(held[0].names, sizes(held[0]), strict=True):  # a client's samples move with its name
        assert sum(size) == 20 + int(name.removeprefix("site-"))
    assert federate(data, partition="natural").new == frozenset()
    assert federate(toy(), partition="iid", clients=4, new_clients=1, min_samples=1).names == ("0", "1", "2", "3")


def images() -> Dataset:
    x = torch.arange(40 * 3 * 4 * 5).remainder(256).to(torch.uint8).reshape(40, 3, 4, 5)
    y = torch.arange(40) % 2
    return Dataset("images", x, y, ("a", "b"), client=torch.zeros(40, dtype=torch.int64), client_names=("only",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pixels_become_numbers_with_channels_last_in_memory(dtype: torch.dtype) -> None:
    data = images()
    by_number = {tuple(image.flatten().tolist()): image for image in data.x}
    unit = federate(data, partition="natural", dtype=dtype)
    signed = federate(data, partition="natural", dtype=dtype, pixels="signed")
    assert unit.x.dtype == dtype
    assert unit.x.shape == (40, 3, 4, 5)
    assert unit.x.is_contiguous(memory_format=torch.channels_last)
    assert unit.train(0)[0].is_contiguous(memory_format=torch.channels_last)
    for x in unit.x:
        assert tuple((x * 255).round().int().flatten().tolist()) in by_number
    assert (float(unit.x.min()), float(unit.x.max())) == (0, 1)
    torch.testing.assert_close(signed.x, unit.x * 2 - 1)
    assert (float(signed.x.min()), float(signed.x.max())) == (-1, 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_strides_say_channels_last_of_one_channel_too(dtype: torch.dtype) -> None:
    """Both orders are the same then, but convolutions choose their way by the strides."""
    assert as_inputs(torch.ones(2, 1, 4, 5, dtype=dtype), "unit", torch.float32).stride() == (20, 1, 5, 1)


def test_features_are_only_cast() -> None:
    data = toy(50)
    split = federate(data, partition="iid", clients=2, pixels="signed", dtype=torch.float64)
    assert sorted(torch.cat([split.client(client).x for client in range(2)])[:, 0].tolist()) == list(range(50))
    assert split.x.dtype == torch.float64
    assert split.y.dtype == torch.int64


def test_twenty_clients_unless_said_and_the_natural_number_where_natural() -> None:
    assert federate(toy(), partition="iid").n_clients == 20
    assert federate(natural(20, 30), partition="natural").n_clients == 2
    assert federate(natural(20, 30), partition="natural", clients=2).n_clients == 2
    with pytest.raises(FedtailorError, match="has 2 natural clients, not 20"):
        federate(natural(20, 30), partition="natural", clients=20)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"test": 0.6, "validation": 0.4}, "leave nothing to train on"),
        ({"test": -0.1}, "leave nothing to train on"),
        ({"test": float("nan")}, "leave nothing to train on"),
        ({"new_clients": 20}, "20 of 20 clients cannot be new: hold out from 0 to 19"),
        ({"new_clients": -1}, "cannot be new"),
        ({"max_train": 0}, "max_train is 0"),
        ({"min_samples": -1}, "must not be negative"),
        ({"seed": -1}, "must not be negative"),
        ({"split": "offical"}, "did you mean 'official'"),
        ({"split": "official"}, "has no official split: leave out --split official"),
        ({"pixels": "sined"}, "did you mean 'signed'"),
    ],
)
def test_refusals(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(FedtailorError, match=sentence):
        federate(toy(), partition="iid", **options)


def test_a_client_holds_its_own_samples_without_a_copy() -> None:
    split = federate(toy(), partition="iid", clients=4)
    assert len(split.client(2).held_out) == 30
    for number in range(4):
        client = split.client(number)
        assert (client.name, client.n_classes) == (str(number), None)
        for part, whole in (
            (client.train, split.train(number)),
            (client.validation, split.validation(number)),
            (client.test, split.test(number)),
        ):
            assert torch.equal(part[0], whole[0])
            assert torch.equal(part[1], whole[1])
        assert torch.equal(client.held_out, torch.cat([client.validation[0], client.test[0]]))
        assert client.held_out.untyped_storage().data_ptr() == split.x.untyped_storage().data_ptr()


def test_fingerprint_tells_data_apart() -> None:
    data = images()
    first, same, other = (federate(data, partition="iid", clients=2, seed=seed).fingerprint() for seed in (0, 0, 1))
    assert first == same != other
    brighter = dataclasses.replace(data, x=data.x.index_fill(0, torch.tensor([3]), 9))
    assert federate(brighter, partition="iid", clients=2).fingerprint() != first


def test_own_labels_number_each_clients_classes_from_zero() -> None:
    data = load("digits")
    shared = federate(data, partition="classes:3", clients=8, seed=1)
    own = federate(data, partition="classes:3", clients=8, seed=1, labels="own")
    assert torch.equal(own.x, shared.x)
    assert own.own_classes == (3,) * 8
    assert own.classes == ("0", "1", "2")
    for client in range(8):
        start, _, _, end = own.bounds[client].tolist()
        names = shared.y[start:end].unique()
        assert torch.equal(names[own.y[start:end]], shared.y[start:end])


def test_each_natural_client_is_dealt_to_several() -> None:
    data = natural(300, 200)
    federated = federate(data, partition="natural+dirichlet:0.5", clients=6, test=0, validation=0)
    assert federated.names == tuple(f"{name}-{number}" for name in data.client_names for number in range(3))
    assert federated.n_samples[:3].sum() == 300
    assert federated.n_samples[3:].sum() == 200
    both = federate(natural(200, 200), partition="natural+quantity:0.5", clients=4, test=0, validation=0).n_samples
    assert both[:2].tolist() != both[2:].tolist()  # draws of their own
    with pytest.raises(FedtailorError, match="a multiple of the 2 clients"):
        federate(data, partition="natural+iid", clients=5)
    with pytest.raises(FedtailorError, match="did you mean 'dirichlet'"):
        federate(data, partition="natural+dirichle:1", clients=4)


def test_what_is_no_data_set_is_refused() -> None:
    with pytest.raises(FedtailorError, match=r"takes a data set that load_data returned, not a dict"):
        federate({"a": (torch.zeros(4, 2), torch.zeros(4))})  # type: ignore[arg-type]
