"""The promise of a plan to the client, once the request is dispatched."""

from __future__ import annotations

from typing import NamedTuple

from router.placing.estimates import Estimates
from router.placing.planner import Placement, Plan


class Forecast(NamedTuple):
    """Seconds from dispatch."""

    ttft_s: float
    itl_s: float  # while prompts are computed beside the answer
    completion_s: float  # at least, while it is not known yet how long answers are
    idle_ttft_s: float  # the same if the pods had nothing else to do
    is_idle: bool  # some candidate has nothing else to do, so that waiting makes its ITL no shorter


UNKNOWN = Forecast(0.0, 0.0, 0.0, 0.0, is_idle=False)  # no request is refused on a guess


def forecast(plan: Plan, estimates: Estimates) -> Forecast:
    """UNKNOWN as long as too few steps have been seen."""
    legs = [plan.decode] if plan.prefill is None else [plan.prefill, plan.decode]
    if not all(leg.candidates.pods.step_times.is_known for leg in legs):
        return UNKNOWN
    computes = legs[0]
    itl_s = plan.decode.itl_s
    completion_s = computes.ttft_s
    if estimates.knows_answers:
        to_second_token_s = computes.ttft_s + (0.0 if plan.prefill is None else _handoff_s(plan.decode))
        completion_s = to_second_token_s + plan.decode.candidates.request.expected_output_tokens * itl_s
    return Forecast(
        ttft_s=computes.ttft_s,
        itl_s=itl_s,
        completion_s=completion_s,
        idle_ttft_s=float(computes.candidates.prediction.prefill_s.min()),
        is_idle=bool((plan.decode.candidates.pods.num_requests == 0).any()),
    )


def _handoff_s(decode: Placement) -> float:
    """From the first token, which prefill sends to the client, until decode goes on."""
    prediction = decode.candidates.prediction
    return float(prediction.transfer_s[decode.chosen] + prediction.wait_s[decode.chosen])
