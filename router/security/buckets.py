"""A token bucket. The clock is the caller's, and so is the memory, if others are to take from the same bucket."""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence

NUM_CELLS = 3
_RATE, _LEVEL, _AT = range(NUM_CELLS)


class TokenBucket:
    """Holds up to a minute's amount and gains it evenly. May be overdrawn, and gives nothing until it has recovered."""

    def __init__(self, per_minute: float, now: float, cells: MutableSequence[float] | None = None) -> None:
        """`cells` of a bucket of the same rate have its level; of any other, zeros included, they are replaced by a
        full one at `now` (seconds)."""
        self.capacity = per_minute
        self._rate = per_minute / 60  # per second
        self._cells: MutableSequence[float] = array("d", bytes(8 * NUM_CELLS)) if cells is None else cells
        if self._cells[_RATE] != per_minute:
            self._cells[_RATE], self._cells[_LEVEL], self._cells[_AT] = per_minute, per_minute, now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until it holds `amount`, or is full if that is less; 0: it does."""
        return max(0.0, (min(amount, self.capacity) - self._fill(now)) / self._rate)

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, whether it is there or not."""
        self._cells[_LEVEL] = self._fill(now) - amount

    def _fill(self, now: float) -> float:
        """The level at `now`."""
        cells = self._cells
        level = min(self.capacity, cells[_LEVEL] + max(0.0, now - cells[_AT]) * self._rate)
        cells[_LEVEL], cells[_AT] = level, max(cells[_AT], now)
        return level
