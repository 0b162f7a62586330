"""One fleet at a time, for all tests in a row that want the same."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from deploy.scratch import scratch_directory
from tests.e2e.faults.fleets import Fleets
from tests.e2e.faults.network import obstacle
from tests.e2e.faults.traffic import make_jobs


@pytest.fixture(scope="session")
def fleets() -> Iterator[Fleets]:
    """Fleets that serve the same requests, one after the other."""
    with Fleets(make_jobs()) as fleets:
        yield fleets


@functools.cache
def no_namespaces() -> str:
    """Why network namespaces cannot be made here; empty: they can."""
    with scratch_directory() as directory:
        return obstacle(directory)
