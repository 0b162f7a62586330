"""The proposer Protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from common.types import RequestId, SamplingParams

_NO_PARAMS = SamplingParams()


class Context(NamedTuple):
    """What a proposer may know of a request that has just sampled."""

    request_id: RequestId
    token_ids: npt.NDArray[np.int64]  # prompt and output so far; valid during the call
    sampling: SamplingParams = _NO_PARAMS


class Proposer(Protocol):
    """Guesses what requests sample next. Called by the worker after each step, on its thread, and part of its time."""

    def propose(self, requests: Sequence[Context]) -> list[list[int]]:
        """Drafts for each request, in order: token ids of the vocabulary that may come next, one after the other. The
        scheduler takes as many of the first as there is room for; none: nothing is proposed."""
