"""Proposers for the tests of speculation, which know what requests will sample."""

from __future__ import annotations

from collections.abc import Sequence

from common.engine.config import EngineConfig
from common.engine.speculation.base import Context, Proposer
from common.engine.speculation.fake import Accuracy, FakeProposer

NUM_DRAFTS = 4
ANSWERS: list[list[int]] = []  # prompts with all that follows; set by tests
LAST: list[CountingProposer] = []


class CountingProposer(FakeProposer):
    """Counts its drafts."""

    num_calls = 0
    num_proposed = 0

    def propose(self, requests: Sequence[Context]) -> list[list[int]]:
        """See Proposer."""
        drafts = super().propose(requests)
        self.num_calls += 1
        self.num_proposed += sum(map(len, drafts))
        return drafts


def _oracle(token_ids: Sequence[int], _: Context) -> int:
    known = list(token_ids)
    return next(
        (answer[len(known)] for answer in ANSWERS if answer[: len(known)] == known and len(answer) > len(known)), 0
    )


def _create(accuracy: Accuracy) -> Proposer:
    LAST[:] = [CountingProposer(_oracle, accuracy, NUM_DRAFTS, vocab_size=64)]
    return LAST[0]


def right(_: EngineConfig) -> Proposer:
    """All drafts are right."""
    return _create("right")


def wrong(_: EngineConfig) -> Proposer:
    """None is."""
    return _create("wrong")


def half(_: EngineConfig) -> Proposer:
    """The first half of them is."""
    return _create("half")
