"""The retry policy that both clients share.

A call is retried when a repetition is harmless and may succeed: the router cannot be reached, has no pod, or is
overloaded. A broken stream resumes after the last event received, at any router. Other errors are raised at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from common.errors import BatonError, DeadlineExceededError, OverloadedError, UnavailableError, UnreachableError
from common.pb import inference_pb2

_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 5.0


class Attempts:
    """The attempts of one call. Send each to `address`."""

    def __init__(
        self, addresses: Sequence[str], max_attempts: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_attempts` limits consecutive attempts without progress; `timeout_s` bounds the whole call."""
        self._addresses = addresses
        self._max_attempts = max_attempts
        self._clock = clock
        self._deadline = clock() + timeout_s
        self._num_failures = 0  # in a row
        self._index = 0

    @property
    def address(self) -> str:
        """The address of the router for the current attempt."""
        return self._addresses[self._index % len(self._addresses)]

    @property
    def timeout_s(self) -> float:
        """Seconds left. Raises DeadlineExceededError when none are."""
        left = self._deadline - self._clock()
        if left <= 0:
            raise DeadlineExceededError("no answer within timeout_s")
        return left

    def progress(self) -> None:
        """Records that data arrived."""
        self._num_failures = 0

    def delay_after(self, error: BatonError) -> float:
        """Returns the seconds to wait before the next attempt. Raises `error` if there is none; an UnreachableError
        then names the address."""
        if isinstance(error, UnreachableError):
            error = UnreachableError(f"no answer from {self.address}: {error.message}")
        self._num_failures += 1
        if not isinstance(error, UnavailableError | OverloadedError) or self._num_failures >= self._max_attempts:
            raise error
        self._index += 1  # another router, if there is one
        longest = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** (self._num_failures - 1))
        delay_s = random.uniform(longest / 2, longest)
        if isinstance(error, OverloadedError):
            delay_s = max(delay_s, error.retry_after_s)
        if self._clock() + delay_s >= self._deadline:
            raise error
        return delay_s


class StreamProgress:
    """The state of a stream that can be resumed."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        """Keeps `request` and updates it to ask for the missing events."""
        self.request = request
        request.resumable = True
        self._num_open = request.n or 1

    @property
    def is_complete(self) -> bool:
        """True once every choice has ended."""
        return self._num_open == 0

    def take(self, chunk: inference_pb2.GenerateChunk) -> None:
        """Records a received event."""
        self.request.last_event_id = chunk.event_id
        if chunk.finish_reason:
            self._num_open -= 1
