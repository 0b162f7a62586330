"""Faults at every stage of a request, over every connector: nobody's answer shows them, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from tests.e2e.faults.cases import COVERING, FURTHER
from tests.e2e.faults.conftest import no_namespaces
from tests.e2e.faults.fleets import Fleets, plan_for
from tests.e2e.faults.matrix import Case


def cells() -> Iterator[ParameterSet]:
    """The further ones are for `make test-slow`."""
    for connector, case in COVERING:
        yield pytest.param(connector, case, id=f"{connector}: {case}")
    for connector, case in FURTHER:
        yield pytest.param(connector, case, id=f"{connector}: {case}", marks=pytest.mark.slow)


@pytest.fixture
def fleets_for_case(fleets: Fleets, connector: str, case: Case) -> Fleets:
    """With the right fleet running."""
    plan = plan_for(connector, case)
    if plan.separate and (problem := no_namespaces()):
        pytest.skip(f"no network namespaces: {problem}")
    fleets.get(plan)
    return fleets


@pytest.mark.parametrize(("connector", "case"), list(cells()))
async def test_a_fault_costs_nobody_an_answer(fleets_for_case: Fleets, connector: str, case: Case) -> None:
    outcome = await fleets_for_case.run(case)
    assert outcome.connector == connector
