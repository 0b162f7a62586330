"""One cluster for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, running_cluster

TEST_TIMEOUT_S = 400  # starting processes that import torch takes its time on a busy machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real processes get more time than others."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """One prefill and one decode pod. Tests must leave it as they found it."""
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster; every pod is found sound and idle after the test."""
    yield shared_cluster
    shared_cluster.check_integrity()
