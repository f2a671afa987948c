"""The engine ray on two nodes, each with one core. `test_ray.py` runs these tests, in a network of their own."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.server.records import RoundRecord
from tests.helpers import assert_same, digits, final, numbers
from tests.transport.place import within

SMALL: dict[str, Any] = {"data": "digits", "clients": 6, "model": "mlp:16", "rounds": 3}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    yield nodes
    nodes.shutdown()


@pytest.fixture
def engine(cluster: Cluster) -> Iterator[dict[str, Any]]:
    with within(120):
        yield {"engine": "ray", "address": cluster.address}
    assert not ray.is_initialized()


def check_same(one: ft.RunResult, other: ft.RunResult) -> None:
    assert numbers(one.rounds) == numbers(other.rounds)
    assert_same(final(one), final(other))


@pytest.mark.parametrize("method", ["pgfed", "pflego", "fedavg", "pfedmb"])
def test_the_same_bits_as_in_process(method: str, engine: dict[str, Any]) -> None:
    check_same(ft.run(method, **engine, **SMALL), ft.run(method, engine="in-process", **SMALL))
