"""How fast the queue empties, measured while something waits: then the pods are as busy as they can be."""

from __future__ import annotations

import math

_MEMORY_S = 10.0  # time of waiting after which an observation counts 1/e
_TRUSTED = 5.0  # departures that are needed for an estimate


class DepartureRate:
    """Cost that leaves the queue per second. `now` is time.monotonic(), or simulated."""

    def __init__(self) -> None:
        self._cost = 0.0  # cost of requests that left, with old ones fading; so are the next two
        self._seconds = 0.0  # seconds in which a request waited
        self._count = 0.0  # number of departures
        self._at = 0.0
        self._backlogged = False

    def watch(self, now: float, *, backlogged: bool) -> None:
        """Something waits from now on, or nothing."""
        if self._backlogged:
            passed = max(0.0, now - self._at)
            kept = math.exp(-passed / _MEMORY_S)
            self._cost *= kept
            self._count *= kept
            self._seconds = self._seconds * kept + passed
        self._at = now
        self._backlogged = backlogged

    def departed(self, cost: float) -> None:
        """A ticket that waited was dispatched, after `watch` was told the time."""
        self._cost += cost
        self._count += 1

    def seconds_for(self, cost: float) -> float | None:
        """How long it takes until so much has left; None: not known yet."""
        if self._count < _TRUSTED or self._seconds <= 0:
            return None
        return cost * self._seconds / self._cost
