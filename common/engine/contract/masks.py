"""Masks of the tokens that grammars allow, as the engine's core hands them to whatever samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from common.engine.contract.step import NoToken
from common.types import Constraint, RequestId

BITS = 32  # tokens in a word of a mask; token t is bit t % 32 of word t // 32


class RequestGrammar(Protocol):
    """A compiled grammar that a request's output follows. The scheduler hands it on to the maker of masks."""

    @property
    def constraint(self) -> Constraint:
        """The constraint in the request's own form."""


class BatchMasks(NamedTuple):
    """The next tokens that the grammars of some requests of a batch allow. Positions are those of the requests in the
    batch."""

    positions: list[int]  # of the requests that have a mask; each allows at least one token
    words: npt.NDArray[np.int32]  # [positions, words]
    no_tokens: dict[int, NoToken]  # positions of requests that get no token in this step


MaskSource = Callable[[Sequence[RequestId], npt.NDArray[np.int64]], BatchMasks | None]
"""Returns the masks for the requests of a batch that sample, in order; None: no request has a grammar. The second
argument is after how many tokens each samples, which differs between the rows of a request with drafts. Called once
the logits of the step are being computed; waits for masks a bounded time."""


def no_masks(request_ids: Sequence[RequestId], lengths: npt.NDArray[np.int64]) -> BatchMasks | None:
    """The MaskSource of steps without grammars."""
    return None
