"""The proposer Protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from common.types import RequestId, SamplingParams

_NO_PARAMS = SamplingParams()


class Context(NamedTuple):
    """A proposer's view of a request."""

    request_id: RequestId
    token_ids: npt.NDArray[np.int64]  # prompt and output so far; valid during the call
    sampling: SamplingParams = _NO_PARAMS
    num_prompt_tokens: int = 0
    root: bytes = b""  # of its block hashes: requests with different ones are to learn nothing of each other


class Proposer(Protocol):
    """Guesses what requests sample next. Called by the worker after each step, on its thread, and part of its time: one
    that takes longer than EngineConfig.step_share_s is asked for fewer requests at once, and no more if that does not
    help. Of several ranks, one has a proposer. What it raises or answers does no harm, see GuardedProposer."""

    def propose(self, requests: Sequence[Context]) -> list[list[int]]:
        """Drafts for each request that has just sampled, in order: at most MAX_DEPTH token ids of the vocabulary that
        may come next, one after the other. The scheduler takes as many of the first as there is room for; none:
        nothing is proposed."""

    def forget(self, requests: Sequence[Context]) -> None:
        """These requests run no more, for now or for ever: the last look at their tokens."""

    def reset(self) -> None:
        """The prefix cache is emptied: forgets what it has learnt of earlier requests."""

    def check(self) -> list[str]:
        """Violations of its bounds and of its own bookkeeping, one line each. Called when the engine is checked."""
