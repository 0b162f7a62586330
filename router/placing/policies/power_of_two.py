"""Picks, between two pods drawn by lot, the one with less work: nearly as even as the least loaded of all, and routers
that do not know of each other's latest requests do not all run to the same pod."""

from __future__ import annotations

import random

import numpy as np

from router.placing.policies.base import Candidates
from router.placing.policies.least_loaded import load_of
from router.placing.policies.table import Column


class PowerOfTwo:
    """1 for the better of two, 0 for all others."""

    name = "power_of_two"

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def score(self, candidates: Candidates) -> Column:
        """See Scorer."""
        count = len(candidates.pods)
        scores = np.zeros(count)
        if count > 1:
            one, other = self._random.sample(range(count), 2)
            load = load_of(candidates.pods)
            scores[one if load[one] <= load[other] else other] = 1
        return scores
