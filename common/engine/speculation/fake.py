"""A proposer that knows the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from common.engine.speculation.base import Context

Accuracy = Literal["right", "wrong", "half"]


class FakeProposer:
    """Proposes `num_drafts` tokens by an oracle: all right, all wrong, or the first half right."""

    def __init__(
        self, oracle: Callable[[Sequence[int], Context], int], accuracy: Accuracy, num_drafts: int, vocab_size: int
    ) -> None:
        """`oracle`: the token after these, of this request."""
        self._oracle = oracle
        self._num_right = {"right": num_drafts, "wrong": 0, "half": num_drafts // 2}[accuracy]
        self._num_drafts = num_drafts
        self._vocab_size = vocab_size

    def propose(self, requests: Sequence[Context]) -> list[list[int]]:
        """See Proposer."""
        return [self._drafts(request) for request in requests]

    def forget(self, requests: Sequence[Context]) -> None:
        """See Proposer."""

    def reset(self) -> None:
        """See Proposer."""

    def check(self) -> list[str]:
        """See Proposer."""
        return []

    def _drafts(self, request: Context) -> list[int]:
        token_ids: list[int] = request.token_ids.tolist()
        num_known = len(token_ids)
        for number in range(self._num_drafts):
            token_id = self._oracle(token_ids, request)
            token_ids.append(token_id if number < self._num_right else (token_id + 1) % self._vocab_size)
        return token_ids[num_known:]
