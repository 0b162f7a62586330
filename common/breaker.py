"""The circuit breaker: when to stop using something that fails, and when to probe it. Pure: the clock is given.

1. Closed: it is used. Enough failures in a row mean that its owner should `trip` the breaker; a success resets their
   count.
2. Open: it is not used until its time has passed (`remaining_s`). Each time is twice as long as the one before.
3. Half open: the time has passed, and the owner probes it. The owner then calls `close`, or `trip` again.

    closed --failures in a row, trip--> open --its time has passed--> half open --probe--> closed, or open

Each `max_s` closed takes one doubling back.
"""

from __future__ import annotations

from collections.abc import Callable

_MAX_LEVEL = 32


class Breaker:
    """Counts failures in a row and times the probes. Not thread-safe: its owner serialises the calls."""

    def __init__(self, clock: Callable[[], float], *, base_s: float, max_s: float, max_failures: int = 1) -> None:
        """It opens for `base_s` seconds at first, at most for `max_s`. `failed` reports `max_failures` in a row."""
        self._clock = clock
        self._base_s = base_s
        self._max_s = max_s
        self._max_failures = max_failures
        self._num_failures = 0  # in a row
        self._level = 0.0  # doublings, minus those that time has taken back
        self._closed_since = clock()
        self._open_until: float | None = None  # None: closed

    @property
    def is_closed(self) -> bool:
        """Whether operations may be tried."""
        return self._open_until is None

    @property
    def remaining_s(self) -> float:
        """Seconds until a probe is due; 0: closed, or half open."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self._clock())

    def succeeded(self) -> None:
        """Resets the count of failures. A late success while the breaker is open does not close it."""
        self._num_failures = 0

    def failed(self, weight: int = 1) -> bool:
        """Counts a failure. True: the breaker should be tripped. Never while it is open."""
        if not self.is_closed:
            return False
        self._num_failures += weight
        return self._num_failures >= self._max_failures

    def trip(self) -> None:
        """Opens the breaker, or keeps it open after a probe that failed."""
        now = self._clock()
        if self.is_closed:
            self._level = max(0.0, self._level - (now - self._closed_since) / self._max_s)
        self._open_until = now + min(self._max_s, self._base_s * 2.0 ** int(self._level))
        self._level = min(self._level + 1, _MAX_LEVEL)
        self._num_failures = 0

    def probe_now(self) -> None:
        """Makes a probe due: what was wrong may be over, for example after a restart."""
        self._num_failures = 0
        if self._open_until is not None:
            self._open_until = self._clock()

    def close(self) -> None:
        """Closes the breaker after a probe that succeeded."""
        self._open_until = None
        self._num_failures = 0
        self._closed_since = self._clock()
