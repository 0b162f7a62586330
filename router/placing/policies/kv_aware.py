"""The pod on which the request is predicted to take the least time; cached prefixes and load both count in seconds."""

from __future__ import annotations

import numpy as np

from router.placing.policies.base import Candidates
from router.placing.policies.table import Column

_SOFTENING_S = 0.01  # so that differences of less hardly count


class KVAware:
    """Least predicted cost / predicted cost, so the best pod scores 1."""

    name = "kv_aware"

    def score(self, candidates: Candidates) -> Column:
        """See Scorer."""
        cost_s = candidates.prediction.cost_s + _SOFTENING_S
        scores: Column = cost_s.min(initial=np.inf) / cost_s
        return scores
