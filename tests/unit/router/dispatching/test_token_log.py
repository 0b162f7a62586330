"""The output of one request: each index accepted once."""

from __future__ import annotations

import pytest

from common.pb import common_pb2
from common.types import FinishReason
from router.dispatching.token_log import OutputDelta, TokenLog


def logprobs(*values: float) -> list[common_pb2.PositionLogprobs]:
    return [common_pb2.PositionLogprobs(sampled=value) for value in values]


@pytest.mark.parametrize(
    ("start", "token_ids", "conflict"),
    [
        (3, [8, 9], ""),
        (1, [6, 7, 8, 9], ""),
        (0, [5, 6, 7, 8, 9], ""),
        (2, [8, 9], "token 8 at index 2, accepted was 7"),
        (0, [5, 5], "token 5 at index 1, accepted was 6"),
        (4, [9], "it skipped from index 3 to 4"),
    ],
)
def test_tokens_are_accepted_once_and_never_changed(start, token_ids, conflict):
    log = TokenLog([5, 6, 7])
    probabilities = logprobs(*(-float(token_id) for token_id in token_ids))
    assert log.accept(start, token_ids, probabilities) == conflict
    assert log.token_ids == ([5, 6, 7] if conflict else [5, 6, 7, 8, 9])
    assert log.take(None).logprobs == ([] if conflict else logprobs(-8, -9))


def test_what_is_new_is_taken_once():
    log = TokenLog()
    assert not log.has_new_tokens
    log.accept(0, [5], [])
    log.accept(1, [6], [])
    assert log.has_new_tokens
    assert log.take(None) == OutputDelta(0, [5, 6], [], None)
    assert not log.has_new_tokens
    assert log.take(FinishReason.STOP) == OutputDelta(2, [], [], FinishReason.STOP)
    assert len(log.token_ids) == 2


def test_known_tokens_are_taken_as_well():
    log = TokenLog([5, 6])
    assert log.has_new_tokens
    assert log.take(None) == OutputDelta(0, [5, 6], [], None)


def test_much_is_taken_piece_by_piece():
    """Tokens that were known before have no log probabilities; the reason comes with the last piece."""
    log = TokenLog(range(100))
    assert not log.accept(100, range(100, 150), logprobs(*range(-50, 0)))
    pieces = []
    while log.has_new_tokens:
        pieces.append(log.take(FinishReason.STOP))
    assert [token_id for piece in pieces for token_id in piece.token_ids] == list(range(150))
    assert [piece.start_index for piece in pieces] == [0, 64, 128]
    assert [len(piece.logprobs) for piece in pieces] == [0, 28, 22]
    assert [each for piece in pieces for each in piece.logprobs] == logprobs(*range(-50, 0))
    assert [piece.finish_reason for piece in pieces] == [None, None, FinishReason.STOP]
