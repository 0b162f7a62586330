"""Faults at every stage of a request, over every connector: nobody's answer shows them, and nothing is left behind."""

from __future__ import annotations

import pytest

from tests.e2e.faults.fleet import Fleet
from tests.e2e.faults.matrix import Case, run_case
from tests.e2e.faults.stages import Stage
from tests.e2e.faults.traffic import NUM_JOBS, Job


@pytest.mark.parametrize("fleet_of_connector", ["shared-storage"], indirect=True)
@pytest.mark.parametrize("case", [Case("SIGKILL", "decode-0", Stage.MID_STREAM)], ids=str)
async def test_a_fault_costs_nobody_an_answer(fleet: Fleet, case: Case, jobs: list[Job]) -> None:
    outcome = await run_case(fleet, case, jobs)
    assert outcome.num_exact == NUM_JOBS
