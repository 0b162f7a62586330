"""The pod that holds most of the prompt takes the request.

Load does not count, so that one popular prefix makes one hot pod: add least_loaded, or use kv_aware, which weighs both
in seconds.
"""

from __future__ import annotations

from router.placing.policies.base import Candidates
from router.placing.policies.table import Column


class PrefixAffinity:
    """Share of the prompt that is cached."""

    name = "prefix_affinity"

    def score(self, candidates: Candidates) -> Column:
        """See Scorer."""
        return candidates.cached_tokens / max(1, candidates.request.num_prompt_tokens)
