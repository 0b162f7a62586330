"""One cluster for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, running_cluster


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
