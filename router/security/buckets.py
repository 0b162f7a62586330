"""A token bucket from which several workers take without locks. The clock is the caller's, and so is the memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, MutableSequence
from typing import NamedTuple

Cells = MutableSequence[float]

NUM_CELLS = 3
_RATE, _TAKEN, _LOWEST = range(NUM_CELLS)


class BucketCells(NamedTuple):
    """Memory of one bucket, of which each worker writes its own part only."""

    own: Cells
    read_all: Callable[[], Iterable[Cells]]  # the parts of all workers, `own` included


class TokenBucket:
    """Holds up to a minute's amount and gains it evenly. May be overdrawn, and gives nothing until it has recovered.

    Its debt is what all workers of its rate have taken, less what the rate has given since the clock's zero. It lacks
    as much as the debt is above the lowest that it ever was: that is when it was last full. Debt falls until something
    is taken, so it is lowest just before, and the worker that takes notes it. The cells of a worker:

        rate      per minute, to which the others belong; 0 while they change
        taken     by this worker
        lowest    debt that this worker has seen before it took
    """

    def __init__(self, per_minute: float, now: float, cells: BucketCells | None = None) -> None:
        """Goes on with own `cells` of the same rate, zeros are none. Else this worker joins those that have the rate,
        or begins with a full bucket at `now` (seconds)."""
        self.capacity = per_minute
        self._rate = per_minute / 60  # per second
        if cells is None:
            alone = array("d", bytes(8 * NUM_CELLS))
            cells = BucketCells(alone, lambda: (alone,))
        self._own, self._read_all = own, _ = cells
        if own[_RATE] != per_minute:
            own[_RATE] = own[_TAKEN] = 0.0
            own[_LOWEST], _ = self._debts(now)
            own[_RATE] = per_minute

    def wait_s(self, amount: float, now: float, num_taken: float = 0.0) -> float:
        """Seconds until it holds `amount`, or is full if that is less, to the millisecond; 0: it does. `num_taken` of
        what it lacks are the caller's."""
        debt, lowest = self._debts(now)
        level = self.capacity - max(0.0, debt - lowest) + num_taken
        return max(0.0, round((min(amount, self.capacity) - level) / self._rate, 3))

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, whether it is there or not; a negative one is given back. `now` was read just before."""
        debt, _ = self._debts(now)
        self._own[_LOWEST] = min(self._own[_LOWEST], debt)
        self._own[_TAKEN] += amount

    def _debts(self, now: float) -> tuple[float, float]:
        """At `now`, and the lowest ever. As the clock was read before the cells, a worker that was stopped in between
        notes no debt that is too low."""
        debt, lowest = -self._rate * now, math.inf
        for cells in self._read_all():
            if cells[_RATE] == self.capacity:
                debt += cells[_TAKEN]
                lowest = min(lowest, cells[_LOWEST])
        return debt, lowest
