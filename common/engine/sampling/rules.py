"""The rules of a request's parameters for single tokens, prepared once for the sampler: biases and masks.

A masked token is never chosen, whatever its logit. Biases and masks change logits in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from common.engine.sampling.thinking import ThinkingBudget, budget_of
from common.types import SamplingParams

_NONE = np.empty(0, dtype=np.int64)


class _Phrases(NamedTuple):
    """Sequences of tokens, of which the last token is masked where the output ends with the others. All are compared at
    once: a client may give hundreds that are long and begin as the output goes on."""

    tokens: npt.NDArray[np.int64]  # those before the last, of all sequences in a row
    places: npt.NDArray[np.int64]  # of each of them, counted from the end of the output
    starts: npt.NDArray[np.int64]  # of each sequence, in `tokens`
    last: npt.NDArray[np.int64]  # token of each sequence
    before_last: frozenset[int]
    longest: int  # number of tokens before the last one

    @classmethod
    def of(cls, phrases: Sequence[tuple[int, ...]]) -> _Phrases | None:
        """Sequences of at least two tokens."""
        if not phrases:
            return None
        lengths = [len(phrase) - 1 for phrase in phrases]
        return cls(
            tokens=np.array([token_id for phrase in phrases for token_id in phrase[:-1]], dtype=np.int64),
            places=np.concatenate([np.arange(-length, 0) for length in lengths]),
            starts=np.array([0, *itertools.accumulate(lengths)][:-1], dtype=np.int64),
            last=np.array([phrase[-1] for phrase in phrases], dtype=np.int64),
            before_last=frozenset(phrase[-2] for phrase in phrases),
            longest=max(lengths),
        )

    def ends(self, output: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens that would complete a sequence after `output`."""
        if not len(output) or int(output[-1]) not in self.before_last:
            return _NONE
        window = np.full(self.longest, -1)
        known = output[-self.longest :]
        window[self.longest - len(known) :] = known
        return self.last[np.logical_and.reduceat(window[self.places] == self.tokens, self.starts)]


class TokenRules(NamedTuple):
    """Token ids are arrays of int64, all within the vocabulary."""

    ending: npt.NDArray[np.int64] = _NONE  # masked up to `min_tokens`
    biased: npt.NDArray[np.int64] = _NONE
    biases: npt.NDArray[np.float32] = np.empty(0, dtype=np.float32)  # one for each of `biased`
    allowed: npt.NDArray[np.int64] = _NONE  # all others are masked; empty: none is
    banned: npt.NDArray[np.int64] = _NONE  # masked at every position
    phrases: _Phrases | None = None
    thinking: ThinkingBudget | None = None  # what it forces comes before all of the above

    def add_biases(self, logits: torch.Tensor) -> None:
        """Adds the biases to logits [vocabulary]."""
        if len(self.biased):
            logits[_on(logits, self.biased)] += _on(logits, self.biases)

    def mask(self, logits: torch.Tensor, output: npt.NDArray[np.int64], min_tokens: int) -> None:
        """Masks logits [vocabulary] of the token that follows `output`, the output tokens so far."""
        forced = None if self.thinking is None else self.thinking.forced(output)
        if forced is not None:
            _force(logits, forced)
            return
        if len(self.allowed):
            index = _on(logits, self.allowed)
            kept = logits[index]
            logits.fill_(-torch.inf)
            logits[index] = kept
        if len(output) < min_tokens and len(self.ending):
            logits[_on(logits, self.ending)] = -torch.inf
        if len(self.banned):
            logits[_on(logits, self.banned)] = -torch.inf
        if self.phrases is not None and len(ends := self.phrases.ends(output)):
            logits[_on(logits, ends)] = -torch.inf


NO_RULES = TokenRules()


def rules_of(params: SamplingParams, eos_token_ids: frozenset[int], vocab_size: int) -> TokenRules:
    """NO_RULES itself if there are none."""
    words = params.bad_word_token_ids
    thinking = budget_of(params)
    if not (params.min_tokens or params.logit_bias or params.allowed_token_ids or words or thinking):
        return NO_RULES
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)} if params.min_tokens else set()
    biases = params.logit_bias or {}
    return TokenRules(
        ending=_ids([token_id for token_id in stops if 0 <= token_id < vocab_size]),
        biased=_ids(biases),
        biases=np.fromiter(biases.values(), dtype=np.float32, count=len(biases)),
        allowed=_ids(params.allowed_token_ids),
        banned=_ids([word[0] for word in words if len(word) == 1]),
        phrases=_Phrases.of([word for word in words if len(word) > 1]),
        thinking=thinking,
    )


def _force(logits: torch.Tensor, token_id: int) -> None:
    """Masks all tokens but one, also if a logits processor has masked that one."""
    kept = logits[token_id].clone()
    logits.fill_(-torch.inf)
    logits[token_id] = torch.where(kept == -torch.inf, 0.0, kept)


def _ids(token_ids: Collection[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))


def _on(logits: torch.Tensor, values: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(values).to(logits.device)
