"""A Ray cluster of two nodes on this machine, for all tests of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# A node that is lost is known to be so after about three seconds instead of thirteen.
SETTINGS = {
    "RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "4",
    "RAY_health_check_initial_delay_ms": "500", "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0",
}  # fmt: skip


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """The cluster; its nodes have the resources `head` and `other`."""
    ray = pytest.importorskip("ray", reason="Ray is not installed; see `make cluster`")
    from ray.cluster_utils import Cluster

    os.environ.update(SETTINGS)
    store = 400 << 20
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 8, "resources": {"head": 8}, "object_store_memory": store},
    )
    made.other = made.add_node(num_cpus=8, resources={"other": 8}, object_store_memory=store)
    ray.init(address=made.address, log_to_driver=False, namespace="tests")
    yield made
    ray.shutdown()
    made.shutdown()
