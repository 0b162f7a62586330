"""Another plan, if the one that the policies like best breaks a limit that the request names."""

from __future__ import annotations

from router.placing.planner import Plan
from router.requests.terms import Terms

_REASON = "limits"  # metric label


def within_limits(plan: Plan, terms: Terms, margin: float) -> Plan:
    """The plan, or what was weighed against it if only that is predicted to keep the limits. `margin`: by what factor
    predictions may be off."""
    if _keeps(plan, terms, margin) or not plan.others:
        return plan
    if plan.prefill is not None:
        other = Plan(plan.others[0], None, _REASON, (plan.decode, plan.prefill))
    else:
        other = Plan(plan.others[0], plan.others[1], _REASON, (plan.decode,))
    return other if _keeps(other, terms, margin) else plan


def _keeps(plan: Plan, terms: Terms, margin: float) -> bool:
    ttft_s = (plan.prefill or plan.decode).ttft_s
    return (terms.ttft_slo_s is None or margin * ttft_s <= terms.ttft_slo_s) and (
        terms.itl_slo_s is None or margin * plan.decode.itl_s <= terms.itl_slo_s
    )
