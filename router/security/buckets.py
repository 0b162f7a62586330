"""A token bucket. The clock is the caller's."""

from __future__ import annotations


class TokenBucket:
    """Holds up to a minute's amount and gains it evenly. May be overdrawn, and gives nothing until it has recovered."""

    def __init__(self, per_minute: float, now: float) -> None:
        """Full at `now` (seconds)."""
        self.capacity = per_minute
        self._rate = per_minute / 60  # per second
        self._level = per_minute
        self._at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until it holds `amount`, or is full if that is less; 0: it does."""
        self._fill(now)
        return max(0.0, (min(amount, self.capacity) - self._level) / self._rate)

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, whether it is there or not."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self.capacity, self._level + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)
