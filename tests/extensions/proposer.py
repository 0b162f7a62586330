"""A proposer as someone outside the project would add it: what followed the last two tokens before.

--speculative tests.extensions.proposer:create
"""

from __future__ import annotations

from collections.abc import Sequence

from common.engine.config import EngineConfig
from common.engine.speculation.base import Context, Proposer

NUM_DRAFTS = 4
LOOKED_AT = 2  # tokens


class PromptLookup:
    """Proposes what came after the same tokens earlier in the prompt or the output."""

    num_proposed = 0  # by all of them

    def propose(self, requests: Sequence[Context]) -> list[list[int]]:
        """See Proposer."""
        return [self._drafts(request.token_ids.tolist()) for request in requests]

    def forget(self, requests: Sequence[Context]) -> None:
        """See Proposer."""

    def reset(self) -> None:
        """See Proposer."""

    def check(self) -> list[str]:
        """See Proposer."""
        return []

    def _drafts(self, token_ids: list[int]) -> list[int]:
        pattern = token_ids[-LOOKED_AT:]
        for start in range(len(token_ids) - LOOKED_AT - 1, -1, -1):
            end = start + LOOKED_AT
            if token_ids[start:end] == pattern:
                PromptLookup.num_proposed += 1
                return token_ids[end : end + NUM_DRAFTS]
        return []


def create(_: EngineConfig) -> Proposer:
    """A ProposerFactory."""
    return PromptLookup()
