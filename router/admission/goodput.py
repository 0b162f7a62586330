"""Whether a generation kept the limits that its client named."""

from __future__ import annotations

from typing import NamedTuple

from router.requests.request import GenerationRequest


class Timing(NamedTuple):
    """The times of one generation, by time.monotonic()."""

    first_token_at: float  # 0: there is none
    last_token_at: float
    num_tokens: int
    is_served: bool  # it ended well, and not because its client wanted no more
    is_failed: bool


OVERDUE = Timing(0.0, 0.0, 0, is_served=False, is_failed=True)  # its deadline passed before it was dispatched


def kept_limits(request: GenerationRequest, timing: Timing) -> dict[str, bool]:
    """By the limit's name. Nothing of a generation that its client ended. A failure keeps none."""
    if not timing.is_served and not timing.is_failed:
        return {}
    terms = request.terms
    kept: dict[str, bool] = {}
    if terms.ttft_slo_s is not None:
        kept["ttft"] = timing.is_served and timing.first_token_at - request.arrived_at <= terms.ttft_slo_s
    if terms.itl_slo_s is not None:
        answer_s = timing.last_token_at - timing.first_token_at
        kept["itl"] = timing.is_served and answer_s <= terms.itl_slo_s * max(0, timing.num_tokens - 1)
    if terms.timeout_s is not None:
        kept["deadline"] = timing.is_served
    return kept
