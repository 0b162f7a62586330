"""One fleet per connector for all faults."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from deploy.scratch import scratch_directory
from tests.e2e.faults.fleet import Fleet, running_fleet
from tests.e2e.faults.matrix import warm_up
from tests.e2e.faults.traffic import Job, make_jobs


@pytest.fixture(scope="session")
def jobs() -> list[Job]:
    """The requests of every wave."""
    return make_jobs()


@pytest.fixture(scope="module")
def fleet_of_connector(request: pytest.FixtureRequest, jobs: list[Job]) -> Iterator[Fleet]:
    """Two prefill and two decode pods, a router and its peer, which have met."""
    with scratch_directory() as directory, running_fleet(request.param, directory) as fleet:
        asyncio.run(warm_up(fleet, jobs))
        yield fleet


@pytest.fixture
def fleet(fleet_of_connector: Fleet) -> Fleet:
    """Ready and idle, whatever became of it in an earlier test."""
    fleet_of_connector.start()
    fleet_of_connector.wait_ready()
    fleet_of_connector.check_integrity()
    return fleet_of_connector
