"""What a pod may say of a request, at the limits of each rule."""

from __future__ import annotations

import math

import pytest

from common.pb import common_pb2, pods_pb2
from common.types import SamplingParams
from router.dispatching.validity import checked_report, checked_seconds, invalid_drafts, invalid_end, invalid_tokens

VOCAB_SIZE = 500
SAMPLING = SamplingParams(max_tokens=8, num_logprobs=2)


def position(sampled: float = -0.5, *top: tuple[int, float]) -> common_pb2.PositionLogprobs:
    alternatives = [common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in top]
    return common_pb2.PositionLogprobs(sampled=sampled, top=alternatives)


@pytest.mark.parametrize(
    ("start", "token_ids", "logprobs", "fault"),
    [
        (0, [499], [position(-0.5, (499, -0.5), (0, -math.inf))], ""),
        (7, [0], [position(0.0009)], ""),  # as far as rounding goes
        (0, [500], [position()], "token 500 is outside the vocabulary of 500"),
        (0, [7, 500, 3], [position()] * 3, "token 500 is outside the vocabulary of 500"),
        (7, [1, 2], [position()] * 2, "9 tokens, 8 were asked for"),
        (0, [1, 2], [position()], "1 log probabilities of 2 tokens"),
        (0, [], [position()], "1 log probabilities of 0 tokens"),
        (0, [1], [position(math.nan)], "a log probability that is none"),
        (0, [1], [position(0.0011)], "a log probability that is none"),
        (0, [1], [position(-0.5, (1, -0.5), (2, math.nan))], "a log probability that is none"),
        (0, [1], [position(-0.5, (1, -1), (2, -1), (3, -1))], "3 alternatives, 2 were asked for"),
        (0, [1], [position(-0.5, (500, -1))], "an alternative outside the vocabulary of 500"),
        (0, [1, 2], [position(), position(math.nan)], "a log probability that is none"),
    ],
)
def test_tokens(start, token_ids, logprobs, fault):
    assert invalid_tokens(start, token_ids, logprobs, SAMPLING, VOCAB_SIZE) == fault


@pytest.mark.parametrize(
    ("num_logprobs", "logprobs", "fault"),
    [
        (None, [], ""),
        (None, [position()], "1 log probabilities of 1 tokens"),
        (0, [position()], ""),
        (0, [position(-0.5, (1, -1))], "1 alternatives, 0 were asked for"),
    ],
)
def test_log_probabilities_that_nobody_asked_for(num_logprobs, logprobs, fault):
    sampling = SamplingParams(max_tokens=8, num_logprobs=num_logprobs)
    assert invalid_tokens(0, [1], logprobs, sampling, VOCAB_SIZE) == fault


@pytest.mark.parametrize(
    ("finish_reason", "num_tokens", "fault"),
    [
        (common_pb2.FINISH_REASON_UNSPECIFIED, 0, ""),
        (common_pb2.FINISH_REASON_ABORT, 0, ""),
        (common_pb2.FINISH_REASON_ERROR, 0, ""),
        (common_pb2.FINISH_REASON_STOP, 1, ""),
        (common_pb2.FINISH_REASON_STOP, 0, "it stopped before its first token"),
        (common_pb2.FINISH_REASON_LENGTH, 8, ""),
        (common_pb2.FINISH_REASON_LENGTH, 7, "its end after 7 tokens, 8 were asked for"),
        (5, 8, "finish reason 5 does not exist"),
    ],
)
def test_ends(finish_reason, num_tokens, fault):
    assert invalid_end(finish_reason, num_tokens, 8) == fault


@pytest.mark.parametrize(
    ("num_verified", "num_accepted", "is_valid"),
    [(0, 0, True), (32, 2, True), (2, 2, True), (33, 0, False), (5, 3, False), (1, 2, False)],
)
def test_drafts_of_two_tokens(num_verified, num_accepted, is_valid):
    problem = f"{num_accepted} of {num_verified} drafts were right, of 2 tokens"
    assert invalid_drafts(num_verified, num_accepted, 2) == ("" if is_valid else problem)


def test_figures_of_a_report():
    report = pods_pb2.DecodeReport(
        num_cached_tokens=30, num_external_tokens=30, recompute_reason="why", queue_s=1.0, handoff_s=2.0
    )
    assert checked_report(report, 40) == pods_pb2.DecodeReport(
        num_cached_tokens=30, num_external_tokens=10, recompute_reason="why", queue_s=1.0, handoff_s=2.0
    )
    report.queue_s = report.handoff_s = math.nan
    assert checked_report(report, 20) == pods_pb2.DecodeReport(num_cached_tokens=20, recompute_reason="why")


@pytest.mark.parametrize(
    ("said", "believed"),
    [(0.0, 0.0), (0.5, 0.5), (86400.0, 86400.0), (86401.0, 0.0), (-0.1, 0.0), (math.inf, 0.0), (math.nan, 0.0)],
)
def test_times(said, believed):
    assert checked_seconds(said) == believed
