"""Steps of different requests that are under way at once, as in a pipeline."""

import pytest

from common.engine.contract.step import ModelRunnerOutput
from common.types import SampledToken
from tests.unit.common.engine.scheduler_factories import create_requests, create_scheduler


@pytest.fixture
def scheduler():
    scheduler = create_scheduler(max_concurrent_batches=2)
    for request in create_requests(4, prompt=6, max_tokens=20):
        scheduler.add_request(request, 0.0)
    return scheduler


def end(scheduler, step):
    """The prompts are computed in one step."""
    outcomes = {request_id: [SampledToken(5)] for request_id in step.num_scheduled_tokens}
    awaited = scheduler.awaited(outcomes)
    scheduler.update(step, ModelRunnerOutput(outcomes), 0.01)
    return awaited


def test_each_step_gets_a_share_of_those_that_decode(scheduler):
    end(scheduler, scheduler.schedule(0.0))
    first, second = scheduler.schedule(0.1), scheduler.schedule(0.2)
    assert [len(step.num_scheduled_tokens) for step in (first, second)] == [2, 2]
    assert not first.num_scheduled_tokens.keys() & second.num_scheduled_tokens.keys()
    assert not scheduler.has_unscheduled
    end(scheduler, first)
    assert scheduler.has_unscheduled
    assert scheduler.schedule(0.3).num_scheduled_tokens == first.num_scheduled_tokens


def test_outcomes_of_requests_that_have_left_a_step_are_not_awaited(scheduler):
    end(scheduler, scheduler.schedule(0.0))
    step = scheduler.schedule(0.1)
    aborted, other = step.num_scheduled_tokens
    scheduler.abort_requests([aborted])
    assert end(scheduler, step).keys() == {other}
