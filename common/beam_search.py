"""Beam search: which continuations of a prompt are followed, and which are the result.

The algorithm, its scores and its end are those of `transformers`' `generate(num_beams=...)`. It asks for nothing but
the most likely next tokens of each beam, so that any engine that reports log probabilities can be searched.

1. `beams` are the continuations to be followed: one that is empty, then `width` of equal length.
2. `advance` takes the most likely next tokens of each. Of all continuations, those among the best `width` that end are
   results; the best `width` that do not end are the next beams.
3. `is_done`: no beam can become a better result, as far as `early_stopping` looks for them. `results` are the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

EarlyStopping = bool | Literal["never"]


class Beam(NamedTuple):
    """A continuation."""

    token_ids: tuple[int, ...]
    logprob: float  # of all its tokens together


class Hypothesis(NamedTuple):
    """A continuation that has ended."""

    token_ids: tuple[int, ...]  # the one that ended it included
    score: float  # log probability / length ** length_penalty
    is_ended: bool  # False: by its length


class BeamSearch:
    """One prompt's search."""

    def __init__(
        self,
        width: int,
        max_tokens: int,
        ending: Collection[int],
        *,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        """`ending`: tokens that end a continuation. `early_stopping` true: the search is done when there are `width`
        results; false: when no beam would be better than the worst of them if it ended now; "never": when none would be
        at any length."""
        self.beams = [Beam((), 0.0)]
        self.results: list[Hypothesis] = []  # best first
        self._width = width
        self._max_tokens = max_tokens
        self._ending = frozenset(ending)
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._length = 0

    @property
    def num_candidates(self) -> int:
        """Most likely next tokens of each beam that `advance` needs: all but `width` of them may be endings."""
        return self._width + len(self._ending)

    @property
    def is_done(self) -> bool:
        """Whether the search is over."""
        if self._length == 0 or len(self.results) < self._width:
            return self._length == self._max_tokens or not self.beams
        if self._early_stopping is True or self._length == self._max_tokens:
            return True
        reach = self._length
        if self._early_stopping == "never" and self._length_penalty > 0:
            reach = self._max_tokens
        best_possible: float = self.beams[0].logprob / float(reach) ** self._length_penalty
        return best_possible <= self.results[-1].score

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Takes, for each beam, its most likely next tokens and their log probabilities, best first."""
        self._length += 1
        options = [
            (Beam((*beam.token_ids, token_id), beam.logprob + logprob), token_id in self._ending)
            for beam, following in zip(self.beams, candidates, strict=True)
            for token_id, logprob in following
        ]
        options.sort(key=lambda option: -option[0].logprob)
        is_last = self._length == self._max_tokens
        ended = [
            Hypothesis(beam.token_ids, beam.logprob / float(self._length) ** self._length_penalty, is_ended)
            for beam, is_ended in options[: self._width]
            if is_ended or is_last
        ]
        self.results = heapq.nsmallest(self._width, [*self.results, *ended], key=lambda result: -result.score)
        self.beams = [beam for beam, is_ended in options if not is_ended][: self._width]
