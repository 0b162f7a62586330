"""Proposes what followed the last tokens earlier in the same prompt and output (prompt lookup decoding, A. Saxena)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.engine.config import EngineConfig
from common.engine.speculation.base import Context
from common.engine.speculative import NgramOptions

_SEARCHED = (2048, 32_768)  # last tokens: first few of them, then, if there is no full match, many
_MAX_COMPARED = 1024  # last places where the last token stood before
_NUM_NARROWED = 4  # tokens that are compared one after the other, as most places fall away
_MAX_EXTENDED = 32  # last places that are left, at which further tokens are compared at once


class Match(NamedTuple):
    """Places at which the last tokens of a request stood before."""

    ends: npt.NDArray[np.int64]  # one past them, in order: places of what followed
    length: int  # tokens


def find_longest_match(token_ids: npt.NDArray[np.int64], most: int) -> Match:
    """The last places at which most of the last tokens stood before, up to `most` of them. Nothing is kept between
    steps: to read the tokens is faster than to build an index of a long prompt, and takes no memory."""
    match = Match(np.empty(0, dtype=np.int64), 0)
    for num_searched in _SEARCHED:
        match = _find(token_ids, max(0, len(token_ids) - 1 - num_searched), most)
        if match.length == most or num_searched >= len(token_ids):
            break
    return match


def _find(token_ids: npt.NDArray[np.int64], first: int, most: int) -> Match:
    """Among the tokens from `first` on."""
    last = len(token_ids) - 1
    ends = np.flatnonzero(token_ids[first:last] == token_ids[last])[-_MAX_COMPARED:] + (first + 1)
    length = min(len(ends), 1)
    while length and length < min(most, _NUM_NARROWED):
        before = ends - (length + 1)
        is_longer = token_ids[before] == token_ids[last - length]
        longer = ends[is_longer if before[0] >= first else is_longer & (before >= first)]
        if not len(longer):
            return Match(ends, length)
        ends = longer
        length += 1
    match = Match(ends, length)
    return _extend(token_ids, first, match, most) if _NUM_NARROWED <= length < most else match


def _extend(token_ids: npt.NDArray[np.int64], first: int, match: Match, most: int) -> Match:
    ends = match.ends[-_MAX_EXTENDED:]
    further = np.arange(match.length, most)
    further = further[further < len(token_ids)]
    before = ends[:, None] - (further + 1)  # [places, tokens]; those before the first do not count
    is_same = (token_ids[before] == token_ids[len(token_ids) - 1 - further]) & (before >= first)
    lengths = np.logical_and.accumulate(is_same, axis=1).sum(axis=1)
    longest = int(lengths.max())
    return Match(ends[lengths == longest], match.length + longest)


def continue_from(token_ids: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], num_tokens: int) -> list[list[int]]:
    """So many tokens from each of `ends` on. After the last token the text is taken to go on as it did since then: what
    repeats with a period shorter than the drafts is proposed in full, as LZ77 copies runs."""
    found: list[list[int]] = []
    for end in ends.tolist():
        run = token_ids[end : end + num_tokens].tolist()
        found.append(run if len(run) == num_tokens else (run * num_tokens)[:num_tokens])
    return found


class NgramProposer:
    """Proposes what followed the last of the places where most of the last tokens stood before, from `min` to `max` of
    them: a text is most like its latest part. (vLLM takes the first, which has most tokens behind it; `continue_from`
    needs none.)"""

    def __init__(self, options: NgramOptions) -> None:
        self._options = options

    def propose(self, requests: Sequence[Context]) -> list[list[int]]:
        """See Proposer."""
        return [self._drafts(request.token_ids) for request in requests]

    def forget(self, requests: Sequence[Context]) -> None:
        """See Proposer."""

    def reset(self) -> None:
        """See Proposer."""

    def check(self) -> list[str]:
        """See Proposer."""
        return []

    def _drafts(self, token_ids: npt.NDArray[np.int64]) -> list[int]:
        options = self._options
        match = find_longest_match(token_ids, options.max)
        if match.length < options.min:
            return []
        return continue_from(token_ids, match.ends[-1:], options.depth)[0]


def create(config: EngineConfig) -> NgramProposer:
    """A ProposerFactory."""
    method = config.speculation.method
    assert method is not None
    assert isinstance(method.options, NgramOptions)
    return NgramProposer(method.options)
