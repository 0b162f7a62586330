"""What is tried again, and where. A policy without a network: both clients share it.

Tried again is what changes nothing if it is done twice, and may be different the next time: a router that cannot be
reached, has no pod, or is overloaded. A stream goes on behind the last event that came, at any router. Everything
else is raised at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from common.errors import BatonError, DeadlineExceededError, OverloadedError, UnavailableError, UnreachableError
from common.pb import inference_pb2

_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 5.0


class Attempts:
    """Of one call. Each goes to `address`."""

    def __init__(
        self, addresses: Sequence[str], max_attempts: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_attempts` in a row without any progress; `timeout_s` bounds them all."""
        self._addresses = addresses
        self._max_attempts = max_attempts
        self._clock = clock
        self._deadline = clock() + timeout_s
        self._num_failures = 0  # in a row
        self._index = 0

    @property
    def address(self) -> str:
        """Of the router to ask now."""
        return self._addresses[self._index % len(self._addresses)]

    @property
    def timeout_s(self) -> float:
        """What is left. Raises DeadlineExceededError if nothing is."""
        left = self._deadline - self._clock()
        if left <= 0:
            raise DeadlineExceededError("no answer within timeout_s")
        return left

    def progress(self) -> None:
        """Something came."""
        self._num_failures = 0

    def delay_after(self, error: BatonError) -> float:
        """Seconds to wait before the next attempt. Raises `error` if there should be none; an UnreachableError then
        names the address."""
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
    """How far a stream has come."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        """`request` is kept, and changed to ask for what is missing."""
        self.request = request
        request.resumable = True
        self._num_open = request.n or 1

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return self._num_open == 0

    def take(self, chunk: inference_pb2.GenerateChunk) -> None:
        """Notes what came."""
        self.request.last_event_id = chunk.event_id
        if chunk.finish_reason:
            self._num_open -= 1
