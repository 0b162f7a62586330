"""What a request's parameters say of single tokens, prepared once for the sampler: biases and masks.

A masked token is never chosen, whatever its logit. Biases and masks change logits in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from common.engine.sampling.thinking import ThinkingBudget, budget_of
from common.types import SamplingParams

_NONE = np.empty(0, dtype=np.int64)


class TokenRules(NamedTuple):
    """Token ids are arrays of int64, all within the vocabulary."""

    ending: npt.NDArray[np.int64] = _NONE  # masked up to `min_tokens`
    biased: npt.NDArray[np.int64] = _NONE
    biases: npt.NDArray[np.float32] = np.empty(0, dtype=np.float32)  # one for each of `biased`
    allowed: npt.NDArray[np.int64] = _NONE  # all others are masked; empty: none is
    banned: npt.NDArray[np.int64] = _NONE  # masked at every position
    # Sequences of which the last token is masked after the others; by the token before the last.
    phrases: Mapping[int, Sequence[tuple[int, ...]]] | None = None
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
        for token_id in self._ends_of_phrases(output):
            logits[token_id] = -torch.inf

    def _ends_of_phrases(self, output: npt.NDArray[np.int64]) -> list[int]:
        if not self.phrases or not len(output):
            return []
        phrases = self.phrases.get(int(output[-1]), ())
        return [phrase[-1] for phrase in phrases if tuple(output[-len(phrase) + 1 :].tolist()) == phrase[:-1]]


NO_RULES = TokenRules()


def rules_of(params: SamplingParams, eos_token_ids: frozenset[int], vocab_size: int) -> TokenRules:
    """NO_RULES itself if there are none."""
    words = params.bad_word_token_ids
    thinking = budget_of(params)
    if not (params.min_tokens or params.logit_bias or params.allowed_token_ids or words or thinking):
        return NO_RULES
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)} if params.min_tokens else set()
    phrases: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
    for word in words:
        if len(word) > 1:
            phrases[word[-2]].append(word)
    biases = params.logit_bias or {}
    return TokenRules(
        ending=_ids(token_id for token_id in stops if 0 <= token_id < vocab_size),
        biased=_ids(biases),
        biases=np.array([biases[token_id] for token_id in sorted(biases)], dtype=np.float32),
        allowed=_ids(params.allowed_token_ids),
        banned=_ids(word[0] for word in words if len(word) == 1),
        phrases=dict(phrases),
        thinking=thinking,
    )


def _force(logits: torch.Tensor, token_id: int) -> None:
    """Masks all tokens but one, also if a logits processor has masked that one."""
    kept = logits[token_id].clone()
    logits.fill_(-torch.inf)
    logits[token_id] = torch.where(kept == -torch.inf, 0.0, kept)


def _ids(token_ids: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(sorted(set(token_ids)), dtype=np.int64)


def _on(logits: torch.Tensor, values: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(values).to(logits.device)
