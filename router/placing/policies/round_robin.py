"""Pods take turns, whatever their load."""

from __future__ import annotations

import numpy as np

from router.placing.policies.base import Candidates
from router.placing.policies.table import Column


class RoundRobin:
    """All pods are equally good; it is the picker that takes them in turn."""

    name = "round_robin"

    def score(self, candidates: Candidates) -> Column:
        """See Scorer."""
        return np.ones(len(candidates.pods))
