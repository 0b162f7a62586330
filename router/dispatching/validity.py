"""Whether an answer of a pod can be valid. An invalid one reaches neither the client nor any metric."""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.pb import common_pb2, pods_pb2
from common.types import SamplingParams

_LONGEST_S = 24 * 3600.0
_MAX_LOGPROB = 1e-3  # log probabilities above 0 that rounding explains
_MAX_DRAFTS = 16  # of a request in a step, each of which gives at least one token
_ENDS = (
    common_pb2.FINISH_REASON_UNSPECIFIED,
    common_pb2.FINISH_REASON_STOP,
    common_pb2.FINISH_REASON_LENGTH,
    common_pb2.FINISH_REASON_ABORT,
    common_pb2.FINISH_REASON_ERROR,
    common_pb2.FINISH_REASON_COMPLETE,
)


def invalid_prompt_logprobs(
    start: int,
    logprobs: Sequence[common_pb2.PositionLogprobs],
    num_prompt_tokens: int,
    sampling: SamplingParams,
    vocab_size: int,
) -> str:
    """Returns the problem with log probabilities of prompt tokens from index `start` on; empty: there is none."""
    if sampling.prompt_logprobs is None:
        return "log probabilities of a prompt, which were not asked for"
    if start < 1 or start + len(logprobs) > num_prompt_tokens:
        return f"log probabilities of tokens {start} to {start + len(logprobs)} of a prompt of {num_prompt_tokens}"
    return _invalid_logprobs(logprobs, sampling.prompt_logprobs, vocab_size)


def _invalid_logprobs(logprobs: Sequence[common_pb2.PositionLogprobs], num_top: int, vocab_size: int) -> str:
    for position in logprobs:
        top = list(position.top)  # once: each time it would be wrapped again
        values = [each.logprob for each in top]
        values.append(position.sampled)
        if not (max(values) <= _MAX_LOGPROB and sum(values) <= math.inf):  # not a number: then the sum is none, either
            return "a log probability that is none"
        if len(top) > num_top:
            return f"{len(top)} alternatives, {num_top} were asked for"
        if top and max([each.token_id for each in top]) >= vocab_size:
            return f"an alternative outside the vocabulary of {vocab_size}"
    return ""


def invalid_tokens(
    start: int,
    token_ids: Sequence[int],
    logprobs: Sequence[common_pb2.PositionLogprobs],
    sampling: SamplingParams,
    vocab_size: int,
) -> str:
    """Returns the problem with tokens from output index `start` on; empty: there is none."""
    num_tokens = len(token_ids)
    if num_tokens and max(token_ids) >= vocab_size:
        return f"token {max(token_ids)} is outside the vocabulary of {vocab_size}"
    if start + num_tokens > sampling.max_tokens:
        return f"{start + num_tokens} tokens, {sampling.max_tokens} were asked for"
    num_expected = 0 if sampling.num_logprobs is None else num_tokens
    if len(logprobs) != num_expected:
        return f"{len(logprobs)} log probabilities of {num_tokens} tokens"
    if not num_expected:
        return ""
    return _invalid_logprobs(logprobs, sampling.num_logprobs or 0, vocab_size)


def invalid_drafts(num_verified: int, num_accepted: int, num_tokens: int) -> str:
    """Returns the problem with counts of the drafts that led to so many tokens; empty: there is none."""
    if num_accepted <= min(num_verified, num_tokens) and num_verified <= _MAX_DRAFTS * num_tokens:
        return ""
    return f"{num_accepted} of {num_verified} drafts were right, of {num_tokens} tokens"


def invalid_end(finish_reason: int, num_tokens: int, max_tokens: int) -> str:
    """Returns the problem with the way in which a request ended on a pod, with `num_tokens` tokens of output; empty:
    there is none."""
    if finish_reason not in _ENDS:
        return f"finish reason {finish_reason} does not exist"
    if finish_reason in (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_COMPLETE) and not num_tokens:
        return "it stopped before its first token"
    if finish_reason == common_pb2.FINISH_REASON_LENGTH and num_tokens < max_tokens:
        return f"its end after {num_tokens} tokens, {max_tokens} were asked for"
    return ""


def checked_report(report: pods_pb2.DecodeReport, num_prompt_tokens: int) -> pods_pb2.DecodeReport:
    """With figures that can be: of tokens no more than there are, of times what a clock shows."""
    num_cached = min(report.num_cached_tokens, num_prompt_tokens)
    return pods_pb2.DecodeReport(
        num_cached_tokens=num_cached,
        num_external_tokens=min(report.num_external_tokens, num_prompt_tokens - num_cached),
        recompute_reason=report.recompute_reason,
        queue_s=checked_seconds(report.queue_s),
        handoff_s=checked_seconds(report.handoff_s),
        first_token_s=checked_seconds(report.first_token_s),
    )


def checked_seconds(value: float) -> float:
    """0 if no clock shows that."""
    return value if 0 <= value <= _LONGEST_S else 0.0
