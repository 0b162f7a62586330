"""What a step has left, and what it takes."""

import math

import pytest

from common.engine.scheduler.request import Request
from common.engine.scheduler.step_plan import StepPlan
from tests.unit.common.engine.scheduler_factories import create_request


def request_at(num_computed_tokens: int) -> Request:
    request = Request(create_request("a", 40), added_at=0.0, max_model_len=64, eos=frozenset())
    request.num_computed_tokens = num_computed_tokens
    return request


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_what_is_taken_back_was_never_given(num_tokens):
    plan = StepPlan(32)
    plan.give(request_at(7), 5)
    plan.decode(request_at(11))
    before = (plan.num_tokens, plan.budget, plan.num_context_tokens)
    work = plan.work
    request = request_at(20)
    plan.give(request, num_tokens)
    plan.new_block_ids[request] = [3]
    assert plan.budget == 32 - 6 - num_tokens
    assert plan.work > work
    plan.take_back(request)
    assert (plan.num_tokens, plan.budget, plan.num_context_tokens) == before
    assert math.isclose(plan.work, work)
    assert plan.new_block_ids == {}


def test_one_that_was_given_nothing_can_be_taken_back():
    plan = StepPlan(32)
    plan.decode(request_at(11))
    plan.take_back(request_at(20))
    assert (plan.num_tokens, plan.num_context_tokens, plan.work) == (1, 11, 1)
