"""What a round costs: the numbers that go down to a participant and up from it, and what server and clients keep."""

from typing import Any

import pytest

import fedtailor as ft
from fedtailor.methods import CATALOGUE
from tests.methods.problems import SMALL

BODY, HEAD = 64 * 16 + 16, 16 * 10 + 10
ALL = BODY + HEAD
# Down and up, in float32; an index of int64 counts twice. PGFed, FedFomo, FedBN, FedCAC and FedDBE have
# tests of their own.
COSTS: list[tuple[str, dict[str, Any], int, int]] = [
    ("local", {}, 0, 0),
    ("fedavg", {}, ALL, ALL),
    ("fedavg-ft", {}, ALL, ALL),
    ("fedprox", {}, ALL, ALL),
    ("fednova", {}, ALL, ALL + 1),  # the number of steps
    ("fednova", {"tau": 5.0}, ALL, ALL),
    *((name, {}, ALL, ALL) for name in ("fedavgm", "fedadagrad", "fedyogi", "fedadam")),
    ("ditto", {}, ALL, ALL),
    ("fedper", {}, BODY, BODY),
    ("fedrep", {}, BODY, BODY),
    ("fedbabu", {}, BODY, BODY),
    ("fedrecon", {}, BODY, BODY + 1),  # the weight of the body
    ("lg-fedavg", {"warm_rounds": 0}, HEAD, HEAD),
    ("fedrod", {}, ALL, ALL),
    ("feddyn", {}, ALL, ALL),
    ("scaffold", {}, 2 * ALL, 2 * ALL),  # the variate, and its change
    ("moon", {}, ALL, ALL),
    ("pfedme", {}, ALL, ALL),
    ("per-fedavg", {}, ALL, ALL),
    ("apfl", {}, ALL, ALL + 1),  # α
    ("fedala", {}, ALL, ALL),
    ("fedas", {}, BODY, BODY + 1),  # tr F
    ("fedas", {"weighting": "samples"}, BODY, BODY),
    ("fedlc", {}, ALL, ALL),
    ("fedntd", {}, ALL, ALL),
    ("fedcp", {}, ALL + 32 * 16 + 3 * 32, ALL + 32 * 16 + 3 * 32),  # the policy
    ("fedpac", {}, ALL + 10 * 16 + 10, ALL + 2 * 10 * 16 + 10 + 1),  # class means, weighed and h; and v
    ("fedproto", {}, 10 * 16 + 10, 10 * 16 + 10),  # a row a class, and whether it is known; and its weight
    ("pfedfda", {}, BODY + 10 * 16 + 16 * 16, BODY + 10 * 16 + 16 * 16),  # class means and a covariance
    ("gpfl", {}, BODY + 10 * 16 + 2 * (16 * 16 + 3 * 16), BODY + 10 * 16 + 2 * (16 * 16 + 3 * 16)),  # E and the valve
    ("knn-per", {}, ALL, ALL),
    ("fedem", {"components": 2}, 2 * ALL, 2 * ALL),
    ("pfedsim", {}, ALL, ALL),
    ("pfedsim", {"warm_rounds": 0}, ALL, ALL),
    ("pfedgraph", {}, ALL, ALL),
    ("fedamp", {}, ALL + 1, ALL),  # the strength of the pull
    ("fedacs", {}, ALL, ALL),
    ("ifca", {"clusters": 3}, 3 * ALL, ALL + 3 + 2),  # a weight for each cluster, and the cluster's number
    ("cfl", {}, ALL + 2, ALL + 2),  # the cluster's number
    ("pfedmb", {}, 5 * ALL, 5 * ALL + 2 * 2 * 5),  # α, and as many weights n α
    ("pfedmb", {"branches": 3}, 3 * ALL, 3 * ALL + 2 * 2 * 3),
    ("pfedmb", {"branches": 3, "per_layer": False}, 3 * ALL, 3 * ALL + 2 * 3),
    ("pflego", {"server_optimizer": "sgd"}, BODY, BODY),
    ("pflego", {"server_optimizer": "adam"}, BODY, BODY),
]


@pytest.mark.parametrize(("method", "parameters", "down", "up"), COSTS, ids=str)
def test_a_round_costs_what_the_formula_says(method: str, parameters: dict[str, Any], down: int, up: int) -> None:
    for record in ft.run(method, **{**SMALL, "rounds": 2}, **parameters).rounds:
        assert (record.bytes_down, record.bytes_up) == (3 * 4 * down, 3 * 4 * up)


def test_every_method_has_a_formula() -> None:
    elsewhere = {"pgfed", "pgfedmo", "pgfed-ce", "fedfomo", "fedbn", "fedcac", "feddbe"}
    assert {name for name, *_ in COSTS} | elsewhere == set(CATALOGUE)


@pytest.mark.parametrize(
    ("method", "names"),
    [("local", set()), ("fedrep", {"body"}), ("fedrod", {"theta"}), ("per-fedavg", {"theta"}), ("fedbabu", {"body"})],
)
def test_the_server_keeps_what_is_shared_and_nothing_else(method: str, names: set[str]) -> None:
    result = ft.run(method, **SMALL)
    assert set(result.server_state) == names
    if method in ("per-fedavg", "fedbabu"):  # and a client nothing
        assert not any(result.client_state(client) for client in range(6))
