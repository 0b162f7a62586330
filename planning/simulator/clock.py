"""Simulated time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Simulated time: callbacks in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, callback: Callable[[], None]) -> None:
        """Call it then."""
        heapq.heappush(self._events, (time_s, next(self._numbers), callback))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call it after a delay."""
        self.at(self.now + delay_s, callback)

    def run(self) -> None:
        """Runs until nothing is left to happen."""
        while self._events:
            self.now, _, callback = heapq.heappop(self._events)
            callback()
