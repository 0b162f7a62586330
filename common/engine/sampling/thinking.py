"""A bound of a model's reasoning: after so many tokens of it, the tokens that close it are forced.

What is forced follows from the output alone, so that a prefill pod, a decode pod and a pod that a stream migrated to
agree about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.types import SamplingParams

_MAX_BEFORE = 64  # tokens of an answer before the reasoning begins, such as white space


class ThinkingBudget(NamedTuple):
    """The bound of one request."""

    num_tokens: int
    opening: tuple[int, ...]  # token ids; empty: the answer begins within the reasoning
    closing: tuple[int, ...]  # token ids; at least one

    def forced(self, output: npt.NDArray[np.int64]) -> int | None:
        """Returns the token that must follow `output`, the output tokens so far; None: any may."""
        start = self._start(output)
        if start is None:
            return None
        due = start + self.num_tokens
        num_late = len(output) - due
        if not 0 <= num_late < len(self.closing):
            return None
        reasoning = output[start:due].tolist()
        if _find(reasoning, self.closing) is not None:
            return None
        rest = self.closing[_overlap(reasoning, self.closing) :]
        is_closing = tuple(output[due:].tolist()) == rest[:num_late]
        return rest[num_late] if is_closing and num_late < len(rest) else None

    def _start(self, output: npt.NDArray[np.int64]) -> int | None:
        """Position of the first token after the opening; None: it has not come."""
        if not self.opening:
            return 0
        found = _find(output[: _MAX_BEFORE + len(self.opening)].tolist(), self.opening)
        return None if found is None else found + len(self.opening)


def budget_of(params: SamplingParams) -> ThinkingBudget | None:
    """Returns None if the request has none."""
    num_tokens, closing = params.thinking_token_budget, params.thinking_end_token_ids
    if num_tokens is None or num_tokens < 0 or not closing:
        return None
    return ThinkingBudget(num_tokens, params.thinking_start_token_ids, closing)


def _find(token_ids: Sequence[int], wanted: tuple[int, ...]) -> int | None:
    """Position of the first occurrence."""
    if wanted[0] not in token_ids:
        return None
    ends = range(len(token_ids) - len(wanted) + 1)
    return next((at for at in ends if tuple(token_ids[at : at + len(wanted)]) == wanted), None)


def _overlap(token_ids: Sequence[int], wanted: tuple[int, ...]) -> int:
    """How many tokens at the end are the beginning of `wanted`."""
    lengths = range(min(len(token_ids), len(wanted) - 1), 0, -1)
    return next((length for length in lengths if tuple(token_ids[-length:]) == wanted[:length]), 0)
