"""How one of the well-scored pods is taken."""

from __future__ import annotations

import numpy as np

from router.placing.policies.base import Candidates
from router.placing.policies.least_loaded import load_with
from router.placing.policies.table import Column


class BestInTurn:
    """Takes a pod with the best total; of equals the one that was taken longest ago, so that an idle cluster is used
    evenly. Those that were never taken come first, in an order drawn by lot: routers that take the same turns meet on
    the same pods, and hear of each other only with a pod's next report.

    With `by_load`, totals within `tolerance` of the best count as equal, and those that will be least loaded with the
    request come first: a difference smaller than what is known for sure must not send all requests to one pod.
    """

    def __init__(self, *, tolerance: float = 0.0, by_load: bool = False, seed: int | None = None) -> None:
        """`seed` of the lots; None: the order of the slots."""
        self._tolerance = tolerance  # share of the best total
        self._by_load = by_load
        self._taken = np.zeros(0, dtype=np.int64)  # by slot: number of the pick; at most 0: never
        self._lots = None if seed is None else np.random.default_rng(seed)
        self._num_picks = 0

    def pick(self, candidates: Candidates, totals: Column) -> int:
        """See Picker."""
        top = totals.max()
        best = np.flatnonzero(totals >= top - self._tolerance * abs(top))
        if self._by_load and len(best) > 1:
            load = load_with(candidates)[best]
            best = best[load == load.min()]
        if len(best) > 1:
            slots = candidates.pods.slots[best]
            self._reserve(int(slots.max()))
            return int(best[self._taken[slots].argmin()])
        return int(best[0])

    def note(self, slot: int) -> None:
        """See Picker."""
        self._reserve(slot)
        self._num_picks += 1
        self._taken[slot] = self._num_picks

    def _reserve(self, slot: int) -> None:
        if slot >= len(self._taken):
            size = slot + 8
            new = np.zeros(size, dtype=np.int64) if self._lots is None else self._lots.integers(-(2**62), 0, size)
            self._taken = np.concatenate([self._taken, new])
