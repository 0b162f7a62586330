"""Compares the limits of a request with the service that it would get."""

from __future__ import annotations

from collections.abc import Sequence

from router.admission.admission import Outlook
from router.admission.forecast import forecast
from router.admission.limits import Limits
from router.fairness.queue import Ticket
from router.placing.estimates import Estimates
from router.placing.planner import Plan
from router.requests.request import GenerationRequest

_UNKNOWN_COST = 1.0


def longest_of(requests: Sequence[GenerationRequest]) -> GenerationRequest:
    """The one with the longest prompt, which stands for them all."""
    return max(requests, key=lambda request: len(request.prompt_token_ids))


def unplanned_ticket(requests: Sequence[GenerationRequest]) -> Ticket:
    """Returns the ticket of requests that need not wait, so that their cost does not matter."""
    first = requests[0]
    return Ticket(
        first.terms.tenant,
        first.priority,
        _UNKNOWN_COST,
        len(requests),
        arrived_at=first.arrived_at,
        deadline=first.deadline,
    )


def appraise(
    requests: Sequence[GenerationRequest], plan: Plan, estimates: Estimates, *, has_prefill_pods: bool
) -> tuple[Ticket, Outlook]:
    """`plan`: of the longest."""
    request = requests[0]
    terms = request.terms
    expected_output_tokens = estimates.expected_output_tokens(request.sampling.max_tokens)
    ticket = unplanned_ticket(requests)
    ticket.cost = _cost(requests, plan, expected_output_tokens)
    ticket.is_local = has_prefill_pods and plan.prefill is None
    limits = Limits(request.deadline - request.arrived_at, terms.ttft_slo_s, terms.itl_slo_s)
    return ticket, Outlook(limits, forecast(plan, estimates), expected_output_tokens)


def _cost(requests: Sequence[GenerationRequest], plan: Plan, expected_output_tokens: float) -> float:
    """Tokens to compute, each prompt once, and to produce."""
    prompts = {id(request.prompt_token_ids): len(request.prompt_token_ids) for request in requests}
    cached = (plan.prefill or plan.decode).cached_tokens
    return max(1.0, sum(prompts.values()) - cached) + expected_output_tokens * len(requests)
