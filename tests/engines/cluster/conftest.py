"""A cluster of two nodes on this machine, each with one core."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.engines.cluster.looking import actors, gone
from tests.engines.place import within


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
    assert gone(actors())
