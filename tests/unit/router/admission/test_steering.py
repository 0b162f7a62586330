"""A plan that breaks a limit gives way to one that keeps it."""

from __future__ import annotations

import pytest

from router.admission.steering import within_limits
from router.placing.index import PrefixIndex
from router.placing.planner import Planner, Query
from router.requests.terms import Terms
from tests.unit.router.placing.pod_tables import table_of


def plan_of(target_itl_s=0.05, **settings):
    """Of 3,200 tokens: on the prefill pod after 30,000 others, on the decode pod at once but beside eighty answers."""
    prefill = table_of(p={"queued_tokens": 30_000, "num_blocks": 10_000, "free_blocks": 10_000})
    busy = {"num_requests": 80, "num_blocks": 10_000, "free_blocks": 10_000, "context_tokens": 80_000}
    decode = table_of(d={**busy, "target_itl_s": target_itl_s})
    query = Query(3200, b"", 16, 100.0, 1e-6)
    index = PrefixIndex(100)
    index.join(10_000)
    return Planner(prefill, decode, index, **settings).plan(query, 0.0)


@pytest.mark.parametrize(
    ("target_itl_s", "terms", "where", "reason"),
    [
        (10.0, Terms(), "decode", "lower_ttft"),
        (10.0, Terms(itl_slo_s=0.05), "prefill", "limits"),
        (10.0, Terms(itl_slo_s=0.0001), "decode", "lower_ttft"),  # neither keeps it
        (0.05, Terms(), "decode", "lower_ttft"),  # which takes it in small chunks
        (0.01, Terms(), "prefill", "itl_target"),
        (0.01, Terms(ttft_slo_s=1.8), "decode", "limits"),
        (0.01, Terms(ttft_slo_s=1.8, itl_slo_s=0.03), "prefill", "itl_target"),
    ],
)
def test_the_other_plan_is_taken_if_only_that_keeps_the_limits(target_itl_s, terms, where, reason):
    plan = within_limits(plan_of(target_itl_s=target_itl_s), terms, 1.0)
    assert ("decode" if plan.prefill is None else "prefill", plan.reason) == (where, reason)
    if reason == "limits":
        assert len(plan.others) == (2 if where == "decode" else 1)


def test_where_there_is_no_choice_it_stays() -> None:
    plan = plan_of(remote_prefill="prefer")
    assert within_limits(plan, Terms(ttft_slo_s=0.001), 1.0) is plan
