"""Which fleet a cell of the matrix wants, and one such fleet at a time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple, Self

from tests.e2e.faults.fleet import Fleet, Size, running_fleet
from tests.e2e.faults.matrix import CUT, Case, Descriptors, Outcome, descriptors_of, run_case, warm_up
from tests.e2e.faults.traffic import Job


class FleetPlan(NamedTuple):
    """What a fleet is made of."""

    connector: str
    size: Size
    separate: bool  # each pod in a network namespace of its own


def plan_for(connector: str, case: Case) -> FleetPlan:
    """Two pods of each role; one of each, and separate, if the network between them is to be cut."""
    return (
        FleetPlan(connector, Size(1, 1), separate=True)
        if case.fault == CUT
        else FleetPlan(connector, Size(2, 2), False)
    )


class Fleets:
    """Runs the fleet that was last asked for; it serves all cells in a row that want the same."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs
        self._plan: FleetPlan | None = None
        self._running = contextlib.ExitStack()
        self._idle: Descriptors = {}

    def get(self, plan: FleetPlan) -> Fleet:
        """Ready and idle, whatever became of it before."""
        if plan != self._plan:
            self.close()
            self._fleet = self._running.enter_context(running_fleet(plan.connector, plan.size, separate=plan.separate))
            self._plan = plan
            asyncio.run(warm_up(self._fleet, self._jobs))
            self._fleet.check_integrity()
            self._idle = descriptors_of(self._fleet)
        self._fleet.start()
        self._fleet.wait_ready()
        self._fleet.check_integrity()
        return self._fleet

    async def run(self, case: Case) -> Outcome:
        """One cell, on the fleet that `get` has returned."""
        return await run_case(self._fleet, case, self._jobs, self._idle)

    def close(self) -> None:
        """Ends it. Idempotent."""
        self._plan = None
        self._running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
