"""The output of one request: each index accepted once, what is new merged until the front takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.pb import common_pb2
from common.types import FinishReason

_MAX_TAKEN = 64  # tokens; their log probabilities take up to 15 ms to write, which others wait for


class OutputDelta(NamedTuple):
    """A request's gain since the front last looked."""

    start_index: int  # output index of token_ids[0]
    token_ids: list[int]
    logprobs: list[common_pb2.PositionLogprobs]  # one per token if asked for, else empty
    finish_reason: FinishReason | None


class TokenLog:
    """Grows at the end only. Bounded by the request's max_tokens."""

    def __init__(self, known: Sequence[int] = ()) -> None:
        """`known`: tokens that were generated before; their log probabilities are not."""
        self.token_ids = list(known)
        self.has_new_tokens = bool(known)  # there are tokens to take
        self._logprobs: list[common_pb2.PositionLogprobs] = []  # of the tokens not taken yet
        self._num_taken = 0

    def accept(self, start: int, token_ids: Sequence[int], logprobs: Sequence[common_pb2.PositionLogprobs]) -> str:
        """Add tokens from output index `start` on; those known already are compared. Returns what is wrong with them,
        in which case nothing was added, or ""."""
        num_known = len(self.token_ids) - start  # how many of these tokens are known already
        if num_known < 0:
            return f"it skipped from index {len(self.token_ids)} to {start}"
        if num_known:
            for index, token_id in enumerate(token_ids[:num_known], start):
                if token_id != self.token_ids[index]:
                    return f"token {token_id} at index {index}, accepted was {self.token_ids[index]}"
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        if token_ids:
            self.token_ids.extend(token_ids)
            self._logprobs.extend(logprobs)
            self.has_new_tokens = True
        return ""

    def take(self, finish_reason: FinishReason | None) -> OutputDelta:
        """Takes the new tokens, at most _MAX_TAKEN; `finish_reason` comes with the last."""
        start = self._num_taken
        token_ids = self.token_ids[start : start + _MAX_TAKEN]
        self._num_taken += len(token_ids)
        num_left = len(self.token_ids) - self._num_taken
        self.has_new_tokens = num_left > 0
        logprobs = self._logprobs
        if logprobs:
            num_taken = max(0, len(logprobs) - num_left)
            logprobs, self._logprobs = logprobs[:num_taken], logprobs[num_taken:]
        return OutputDelta(start, token_ids, logprobs, None if num_left else finish_reason)
