import dataclasses

import numpy as np
import pytest
import torch

from fedtailor._common.errors import FedtailorError
from fedtailor.data import FederatedData, federate

from .files import toy

SPECS = ["iid", "dirichlet:0.3", "dirichlet-plain:0.5", "classes:2", "classes-random:2", "quantity:1", "pairs"]


def owners(split: FederatedData, samples: int) -> list[int]:
    """The client of each sample of a toy data set; -1 if none has it."""
    owner = [-1] * samples
    for client, (start, *_, end) in enumerate(split.bounds.tolist()):
        for number in split.x[start:end, 0].int().tolist():
            assert owner[number] == -1, "a sample has two owners"
            owner[number] = client
    return owner


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("mode", ["merge", "official"])
def test_every_sample_is_dealt_once(spec: str, mode: str) -> None:
    data = toy(600, parts=(0.6, 0.1, 0.3))
    split = federate(data, partition=spec, clients=10, min_samples=5, split=mode)
    owner = owners(split, 600)
    assert -1 not in owner
    assert split.y.tolist() == data.y[split.x[:, 0].long()].tolist()
    counts = split.counts()
    assert int(counts.sum()) == 600
    assert int(counts.sum(dim=1).min()) >= 5
    for client in range(10):
        assert counts[client].tolist() == data.y[torch.tensor(owner) == client].bincount(minlength=10).tolist()


@pytest.mark.parametrize("spec", SPECS)
def test_the_seed_decides(spec: str) -> None:
    data = toy()
    first, same, other = (federate(data, partition=spec, clients=10, min_samples=1, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.x, same.x)
    assert torch.equal(first.bounds, same.bounds)
    assert not torch.equal(first.x, other.x)


@pytest.mark.parametrize("spec", SPECS)
def test_parts_are_dealt_by_the_same_shares(spec: str) -> None:
    data = toy(6000, parts=(0.7, 0.3))
    assert data.part is not None
    data = dataclasses.replace(data, part=data.part * 2)
    split = federate(data, partition=spec, clients=10, split="official", validation=0)
    train, test = split.counts("train").double(), split.counts("test").double()
    if spec in ("iid", "quantity:1"):
        train, test = train.sum(1, keepdim=True), test.sum(1, keepdim=True)
    rounding = 1 / train.sum(0) + 1 / test.sum(0)
    assert ((train / train.sum(0) - test / test.sum(0)).abs() <= rounding + 1e-9).all()


def sizes_before_each_class(split: FederatedData) -> torch.Tensor:
    counts = split.counts()
    return counts.cumsum(1) - counts


@pytest.mark.parametrize("seed", range(5))
def test_capped_dirichlet_gives_no_more_to_who_has_enough(seed: int) -> None:
    data = toy(2000)
    capped = federate(data, partition="dirichlet:0.3", clients=10, seed=seed)
    full = sizes_before_each_class(capped) * 10 >= 2000
    assert full.any()
    assert (capped.counts()[full] == 0).all()
    plain = federate(data, partition="dirichlet-plain:0.3", clients=10, seed=seed)
    assert (plain.counts()[sizes_before_each_class(plain) * 10 >= 2000] > 0).any()


def test_dirichlet_is_drawn_again_until_all_have_enough() -> None:
    data = toy(1000)
    few = [federate(data, partition="dirichlet-plain:0.3", clients=10, min_samples=0, seed=s) for s in range(10)]
    assert min(int(split.counts().sum(1).min()) for split in few) < 40
    many = [federate(data, partition="dirichlet-plain:0.3", clients=10, min_samples=40, seed=s) for s in range(10)]
    assert min(int(split.counts().sum(1).min()) for split in many) >= 40


def test_small_alpha_is_more_uneven() -> None:
    def largest_share(alpha: float) -> float:
        counts = federate(toy(4000), partition=f"dirichlet-plain:{alpha}", clients=10, min_samples=1).counts()
        return float((counts.max(0).values / counts.sum(0)).mean())

    assert largest_share(0.1) > 1.5 * largest_share(1) > 2 * largest_share(100)


def test_tiny_alpha_does_not_break_the_cap() -> None:
    split = federate(toy(1000, classes=40), partition="dirichlet:0.001", clients=4, min_samples=1)
    assert int(split.counts().sum()) == 1000


def test_iid_sizes_are_even_and_classes_alike() -> None:
    counts = federate(toy(10_000), partition="iid", clients=10).counts()
    assert int(counts.sum(1).max() - counts.sum(1).min()) <= 1
    assert int(counts.min()) > 60


def test_iid_is_even_with_fewer_samples_of_a_class_than_clients() -> None:
    counts = federate(toy(1000, classes=50), partition="iid", clients=100).counts()
    assert counts.sum(1).tolist() == [10] * 100


def test_quantity_skew_changes_sizes_but_not_the_mix() -> None:
    counts = federate(toy(20_000, classes=2), partition="quantity:1", clients=10, min_samples=200).counts().double()
    sizes = counts.sum(1)
    assert sizes.max() > 5 * sizes.min()
    assert ((counts[:, 0] / sizes - 0.5).abs() < 0.15).all()


@pytest.mark.parametrize("name", ["classes", "classes-random"])
@pytest.mark.parametrize(("clients", "k"), [(5, 2), (7, 3), (50, 2), (20, 10)])
def test_each_client_has_k_classes_and_each_class_an_owner(name: str, clients: int, k: int) -> None:
    for seed in range(10):
        counts = federate(toy(5000), partition=f"{name}:{k}", clients=clients, seed=seed).counts()
        assert (counts > 0).sum(1).tolist() == [k] * clients
        assert (counts.sum(0) > 0).all()
        for column in counts.T:
            owned = column[column > 0]
            assert int(owned.max() - owned.min()) <= 1


def test_classes_are_dealt_in_turn_in_file_order_part_by_part() -> None:
    data = toy(3000, parts=(0.8, 0.2))
    assert data.part is not None
    data = dataclasses.replace(data, part=data.part * 2)
    assert data.part is not None
    owner = torch.tensor(owners(federate(data, partition="classes:3", clients=8, split="official", validation=0), 3000))
    for label in range(10):
        for part in (0, 2):
            drawn = owner[(data.y == label) & (data.part == part)]
            turns = drawn.unique()
            assert drawn.tolist() == [int(turns[i % len(turns)]) for i in range(len(drawn))]


def test_classes_random_is_shuffled() -> None:
    data = toy(3000)
    owner = torch.tensor(owners(federate(data, partition="classes-random:3", clients=8), 3000))
    drawn = owner[data.y == 0]
    assert sorted(drawn.tolist()) != drawn.tolist()
    turns = drawn.unique()
    assert drawn.tolist() != [int(turns[i % len(turns)]) for i in range(len(drawn))]


def test_classes_without_an_owner_are_left_out() -> None:
    counts = federate(toy(1000), partition="classes:2", clients=3).counts()
    assert int((counts.sum(0) == 0).sum()) == 4


def test_pairs_share_two_classes_evenly() -> None:
    counts = federate(toy(1000), partition="pairs", clients=10).counts()
    for client, row in enumerate(counts):
        assert row.nonzero().flatten().tolist() == [client // 2 * 2, client // 2 * 2 + 1]
    assert ((counts[0::2] - counts[1::2]).abs() <= 1).all()
    twice = federate(toy(1000), partition="pairs", clients=20).counts()
    assert twice[12].nonzero().flatten().tolist() == [2, 3]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"partition": "dirichlet:-1"}, r"'dirichlet:-1' needs a number above 0 .* 'dirichlet:0\.3'"),
        ({"partition": "dirichlet:x"}, "needs a number above 0"),
        ({"partition": "dirichlet"}, "needs a number above 0"),
        ({"partition": "dirichlet:nan"}, "needs a number above 0"),
        ({"partition": "classes:1.5"}, "'classes:1.5' needs a whole number above 0"),
        ({"partition": "classes:0"}, "needs a whole number above 0"),
        ({"partition": "classes:11"}, "11 classes per client were asked for, but the data has 10"),
        ({"partition": "classes-random:11"}, "11 classes per client"),
        ({"partition": "iid:3"}, "takes no parameter: write 'iid'"),
        ({"partition": "dirichlte:0.3"}, "There is no partition 'dirichlte': did you mean 'dirichlet'"),
        ({"partition": "naturel"}, "did you mean 'natural'"),
        ({"partition": "natural"}, "names no clients"),
        ({"partition": "pairs", "clients": 9}, "9 clients do not fit 10 classes"),
        ({"partition": "pairs", "clients": 12}, "12 clients do not fit 10 classes"),
        ({"clients": 0}, "needs at least 1"),
        ({"clients": 500, "min_samples": 0}, "has 400 samples, too few for 500 clients with at least 1 each"),
        ({"clients": 100, "min_samples": 5}, "400 samples, too few for 100 clients with at least 5 each"),
        ({"partition": "dirichlet-plain:0.01", "clients": 30}, r"every client 10 samples.* any of 1000 draws"),
        ({"partition": "pairs", "clients": 10, "min_samples": 40}, "ask for fewer clients, a smaller --min-samples"),
    ],
)
def test_the_impossible_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(FedtailorError, match=sentence):
        federate(toy(400), **options)


def test_five_clients_out_of_three_samples_are_refused() -> None:
    with pytest.raises(FedtailorError, match="has 3 samples, too few for 5 clients"):
        federate(toy(3), partition="iid", clients=5)


@pytest.mark.parametrize("spec", ["dirichlet:0.3", "dirichlet-plain:1", "classes:1", "classes-random:1", "pairs"])
def test_regression_cannot_be_dealt_by_class(spec: str) -> None:
    data = dataclasses.replace(toy(200), y=torch.rand(200), classes=())
    with pytest.raises(FedtailorError, match="draws by class, but these targets are numbers: use iid, quantity or"):
        federate(data, partition=spec, clients=4)
    for other in ("iid", "quantity:5"):
        assert int(federate(data, partition=other, clients=4).counts().sum()) == 200


def test_classes_without_samples_count_as_classes() -> None:
    data = toy(100, classes=3)
    data = dataclasses.replace(data, classes=(*data.classes, "never seen"))
    assert federate(data, partition="pairs", clients=4, min_samples=1).counts().shape == (4, 4)


def test_numpy_state_is_untouched() -> None:
    np.random.seed(0)
    before = np.random.get_state()[1]
    federate(toy(), clients=5)
    assert np.array_equal(before, np.random.get_state()[1])
