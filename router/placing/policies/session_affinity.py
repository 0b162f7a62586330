"""Requests of one session go to one pod, chosen by consistent hashing: when pods come or go, only the sessions that
were, or are to be, on those move; and all routers agree without talking."""

from __future__ import annotations

import numpy as np

from router.placing.policies.base import Candidates
from router.placing.policies.table import Column, stable_hash

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of the splitmix64 generator


class SessionAffinity:
    """1 for the session's pod (rendezvous hashing), 0 for all others; 0 for all without a session."""

    name = "session_affinity"

    def score(self, candidates: Candidates) -> Column:
        """See Scorer."""
        scores = np.zeros(len(candidates.pods))
        session = candidates.request.session
        if session and len(scores):
            keys = candidates.pods.keys ^ np.uint64(stable_hash(session))
            keys = (keys ^ (keys >> np.uint64(30))) * _MIX[0]
            keys = (keys ^ (keys >> np.uint64(27))) * _MIX[1]
            scores[(keys ^ (keys >> np.uint64(31))).argmax()] = 1
        return scores
