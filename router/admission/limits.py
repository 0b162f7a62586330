"""Whether a request's own limits can be kept, and what it is told if not."""

from __future__ import annotations

from typing import NamedTuple

from common.errors import BatonError, OverloadedError, UnattainableError
from router.admission.forecast import Forecast
from router.requests.terms import ITL_HEADER, TIMEOUT_HEADER, TTFT_HEADER

# Predicted times count this many times when they are compared with a request's limits: predictions are medians, and a
# limit that is kept half the time is of little use. More refuses earlier and keeps more limits.
PREDICTION_MARGIN = 1.25


class Limits(NamedTuple):
    """The limits of one request, in seconds from its arrival."""

    timeout_s: float
    ttft_s: float | None = None
    itl_s: float | None = None

    @property
    def has_slo(self) -> bool:
        """It asks for more than an answer in the end."""
        return self.ttft_s is not None or self.itl_s is not None


class Refusal(NamedTuple):
    """Why a request is refused."""

    reason: str  # metric label
    error: BatonError


class Expected(NamedTuple):
    """The predicted service of a request, in seconds from its arrival."""

    waited_s: float  # so far, before it came to be judged
    queue_s: float  # from now on
    backlog_s: float  # from now on until none waits, if no other comes
    forecast: Forecast
    expected_output_tokens: float


def broken_limit(limits: Limits, expected: Expected, margin: float) -> Refusal | None:
    """The first limit that is not kept, if predictions are off by a factor of `margin`; None: all are."""
    forecast = expected.forecast
    passed_s = expected.waited_s + margin * expected.queue_s
    ttft_s = passed_s + margin * forecast.ttft_s
    if limits.ttft_s is not None and ttft_s > limits.ttft_s:
        least_s = expected.waited_s + margin * forecast.idle_ttft_s
        excess_s = (ttft_s - limits.ttft_s) / margin
        return _refuse("ttft", TTFT_HEADER, "a first token within", limits.ttft_s, ttft_s, least_s, excess_s)
    itl_s = margin * forecast.itl_s
    if limits.itl_s is not None and itl_s > limits.itl_s:
        least_s = itl_s if forecast.is_idle else 0.0
        # So many of the answers have to end until steps are short enough; in the time of one answer all of them do,
        # once none waits that would take their places.
        answers_s = (1 - limits.itl_s / itl_s) * forecast.itl_s * expected.expected_output_tokens
        excess_s = expected.backlog_s + answers_s
        return _refuse("itl", ITL_HEADER, "tokens at most", limits.itl_s, itl_s, least_s, excess_s, end=" apart")
    completion_s = passed_s + margin * forecast.completion_s
    if completion_s > limits.timeout_s:
        answer_s = forecast.completion_s - forecast.ttft_s
        least_s = expected.waited_s + margin * (forecast.idle_ttft_s + (answer_s if forecast.is_idle else 0.0))
        excess_s = (completion_s - limits.timeout_s) / margin
        return _refuse(
            "deadline", TIMEOUT_HEADER, "an answer within", limits.timeout_s, completion_s, least_s, excess_s
        )
    return None


def joined(first: Refusal | None, second: Refusal | None) -> Refusal | None:
    """Joins two reasons to refuse: the first, until neither holds. One that no waiting ends goes before the other."""
    if first is None or second is None:
        return first or second
    if not isinstance(first.error, OverloadedError) or not isinstance(second.error, OverloadedError):
        return first if not isinstance(first.error, OverloadedError) else second
    retry_after_s = max(first.error.retry_after_s, second.error.retry_after_s)
    error = OverloadedError(first.error.message, param=first.error.param, retry_after_s=retry_after_s)
    return Refusal(first.reason, error)


def _refuse(
    reason: str, header: str, promise: str, limit_s: float, predicted_s: float, least_s: float, excess_s: float,
    *, end: str = "",
) -> Refusal:  # fmt: skip
    """`least_s`: what it would be if no other were served; `excess_s`: when to try again if no other comes."""
    asked = f"{header} asks for {promise} {limit_s * 1000:g} ms{end}, "
    if least_s > limit_s:
        problem = f"{asked}{least_s * 1000:.0f} ms are predicted even with no other request"
        return Refusal(reason, UnattainableError(problem, param=header))
    problem = f"{asked}{predicted_s * 1000:.0f} ms are predicted; try again later"
    return Refusal(reason, OverloadedError(problem, param=header, retry_after_s=excess_s))
