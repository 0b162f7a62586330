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
        self._logprobs: list[common_pb2.PositionLogprobs] = []  # of the tokens not taken yet
        self._num_taken = 0

    @property
    def has_new_tokens(self) -> bool:
        """True if there are tokens to take."""
        return self._num_taken < len(self.token_ids)

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
        self.token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        return ""

    def take(self, finish_reason: FinishReason | None) -> OutputDelta:
        """Takes the new tokens, at most _MAX_TAKEN; `finish_reason` comes with the last."""
        start, self._num_taken = self._num_taken, min(self._num_taken + _MAX_TAKEN, len(self.token_ids))
        num_left = len(self.token_ids) - self._num_taken
        num_logprobs = max(0, len(self._logprobs) - num_left)
        logprobs, self._logprobs = self._logprobs[:num_logprobs], self._logprobs[num_logprobs:]
        token_ids = self.token_ids[start : self._num_taken]
        return OutputDelta(start, token_ids, logprobs, None if num_left else finish_reason)
