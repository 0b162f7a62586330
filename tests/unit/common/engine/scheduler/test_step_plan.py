"""What a step has left, and what it takes."""

import pytest

from common.engine.scheduler.request import Request
from common.engine.scheduler.step_plan import StepPlan
from common.step_budget import prefill_work
from tests.unit.common.engine.scheduler_factories import create_request


def request_at(num_computed_tokens: int) -> Request:
    request = Request(create_request("a", 40), added_at=0.0, max_model_len=64, eos=frozenset())
    request.has_computed(num_computed_tokens)
    return request


@pytest.mark.parametrize(
    ("num_tokens", "num_context_tokens", "work"),
    [(1, 20, 1.0), (2, 0, prefill_work(2, 20)), (9, 0, prefill_work(9, 20))],
)
def test_what_is_given_can_be_taken_back(num_tokens, num_context_tokens, work):
    plan, request = StepPlan(32, 64), request_at(20)
    plan.give(request_at(7), 5)
    plan.decode(request_at(11), 11)
    assert (plan.num_tokens, plan.budget, plan.num_context_tokens) == (6, 26, 11)
    assert plan.work == pytest.approx(1 + prefill_work(5, 7), abs=1e-9)

    plan.give(request, num_tokens)
    plan.new_block_ids[request] = [[3]]
    assert (plan.num_tokens, plan.budget) == (6 + num_tokens, 26 - num_tokens)
    assert plan.num_context_tokens == 11 + num_context_tokens
    assert plan.work == pytest.approx(1 + prefill_work(5, 7) + work, abs=1e-9)

    plan.take_back(request)
    assert (plan.num_tokens, plan.budget, plan.num_context_tokens) == (6, 26, 11)
    assert plan.work == pytest.approx(1 + prefill_work(5, 7), abs=1e-9)
    assert plan.new_block_ids == {}


def test_one_that_was_given_nothing_can_be_taken_back():
    plan = StepPlan(32, 64)
    plan.decode(request_at(11), 11)
    plan.take_back(request_at(20))
    assert (plan.num_tokens, plan.num_context_tokens, plan.work) == (1, 11, 1)
