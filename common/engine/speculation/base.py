"""The proposer Protocol."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
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
        scheduler takes as many of the first as there is room for; none: nothing is proposed. Ids that are not in the
        vocabulary, and what follows them, are dropped."""

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        """These requests run no more, for now or for ever."""


def propose(proposer: Proposer, requests: Sequence[Context], vocab_size: int) -> dict[RequestId, list[int]]:
    """The drafts of a proposer, those of the vocabulary. Raises ValueError if they are not those of the requests."""
    drafts = proposer.propose(requests)
    if len(drafts) != len(requests):
        name = type(proposer).__name__
        raise ValueError(f"proposer: {name} has answered with drafts of {len(drafts)} requests, not of {len(requests)}")
    known = ([int(each) for each in takewhile(lambda each: 0 <= each < vocab_size, found)] for found in drafts)
    return {request.request_id: found for request, found in zip(requests, known, strict=True) if found}
