"""The part of an answer that a client has already: spelled again, unseen, so that the rest is right."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from zlib import crc32

from common.errors import InvalidRequestError
from router.requests.request import Resumption


class Replay:
    """The leading tokens of an answer that are not sent again."""

    def __init__(self, resumption: Resumption | None) -> None:
        self.num_tokens = 0 if resumption is None else resumption.num_delivered
        self._expected = 0 if resumption is None else resumption.checksum
        self._num_seen = 0
        self._checksum = 0

    def take(self, token_ids: Sequence[int]) -> int:
        """How many of the next tokens the client has. Raises InvalidRequestError if what it has is not this answer."""
        num_left = self.num_tokens - self._num_seen
        if num_left <= 0:
            return 0
        seen = token_ids[:num_left]
        self._checksum = crc32(array("I", seen).tobytes(), self._checksum)
        self._num_seen += len(seen)
        if self._num_seen == self.num_tokens and self._checksum != self._expected:
            raise InvalidRequestError(
                "the answer cannot be resumed: computed again, it is another; ask without Last-Event-ID",
                param="Last-Event-ID",
            )
        return len(seen)
