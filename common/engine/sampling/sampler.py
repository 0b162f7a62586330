"""The sampler: logits -> tokens.

1. log probabilities, if asked for           3. penalties over the tokens so far
2. biases                                    4. logits processors; then masks: allowed tokens, bad words, stop tokens
                                                up to `min_tokens`, all but what closes reasoning that
                                                exceeds its budget, what a grammar does not allow
                                             5. temperature, top-k, top-p, min-p; then a draw, or the argmax if greedy

Equal logits are ranked by token id wherever ranks matter: rounded logits tie often, and the order in which a kernel
returns equal values depends on the rest of the batch. A row whose best logit is not finite has no token: the model
computed infinities or NaN, or every token is masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from common.engine.contract.step import NoToken
from common.engine.sampling.drawing import draw_rows
from common.engine.sampling.processors import SamplingRow, apply_processors
from common.engine.sampling.ranking import argmax, as_numpy, best, column, index_of
from common.engine.sampling.rules import NO_RULES
from common.types import Logprobs, SampledToken, SamplingParams

Sample = SampledToken | NoToken
_MAX_DRAWN_LOGITS = 1 << 22  # drawn at once: bounds the memory of noise and sorting
_MAX_LOGIT = torch.finfo(torch.float32).max


def is_plain(params: SamplingParams) -> bool:
    """True if the request's next token is just the argmax of its logits, whatever came before."""
    return params.greedy and params.is_simple


def samples_of(token_ids: Iterable[int]) -> list[Sample]:
    """Tokens by their ids; -1 stands for one of which no logit is finite."""
    return [SampledToken(token_id) if token_id >= 0 else NoToken.NON_FINITE for token_id in token_ids]


class LogitMask(Protocol):
    """Excludes tokens."""

    def apply(self, logits: torch.Tensor) -> None:
        """Sets the logits [rows, vocabulary] of tokens that must not be sampled to -inf, in place."""


class Sampler:
    """Samples for one model. Stateless."""

    def sample_plain(self, logits: torch.Tensor, mask: LogitMask | None = None) -> list[Sample]:
        """Tokens for logits [rows, vocabulary] of rows that are all plain. With a mask, they are overwritten."""
        if mask is not None:
            mask.apply(logits)
        return samples_of(_best_tokens(logits))

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow], mask: LogitMask | None = None) -> list[Sample]:
        """One token for each row of `logits` [rows, vocabulary], float32, which are overwritten."""
        asking = [i for i, row in enumerate(rows) if row.params.num_logprobs is not None]
        computed = logits[index_of(asking, logits)] if asking else None  # a copy: what follows changes logits
        ruled = [(logits[i], row) for i, row in enumerate(rows) if row.rules is not NO_RULES]
        processed = any(row.processors for row in rows)
        for row_logits, row in ruled:
            row.rules.add_biases(row_logits)
        self._penalise(logits, rows)
        is_computed = _is_finite(logits, argmax(logits)) if ruled or processed else None
        if processed:
            apply_processors(logits, rows)
        for row_logits, row in ruled:
            row.rules.mask(row_logits, row.output_ids, row.params.min_tokens)
        if mask is not None:
            mask.apply(logits)  # after the penalties, which leave every logit finite
        token_ids = argmax(logits)
        is_finite = _is_finite(logits, token_ids)
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if drawn:
            token_ids[index_of(drawn, logits)] = _draw(logits, rows, drawn)
        logprobs: list[Logprobs | None] = [None] * len(rows)
        if computed is not None:
            counts = [rows[i].params.num_logprobs or 0 for i in asking]
            asked = logprobs_of(computed, token_ids[index_of(asking, logits)], counts)
            for i, entry in zip(asking, asked, strict=True):
                logprobs[i] = entry
        tokens = _tokens(token_ids, is_finite, logprobs)
        if is_computed is not None and not is_finite.all():
            # NaN is what a processor leaves that has failed.
            masked = (is_computed & (logits.amax(dim=-1) == -torch.inf)).tolist()
            tokens = [NoToken.MASKED if is_masked else token for token, is_masked in zip(tokens, masked, strict=True)]
        return tokens

    def _penalise(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        penalised = [i for i, row in enumerate(rows) if row.params.is_penalised]
        if not penalised:
            return
        chosen = [rows[i] for i in penalised]
        index = index_of(penalised, logits)
        scores = logits[index]
        best = scores.amax(dim=-1, keepdim=True)
        repetition = column([row.params.repetition_penalty for row in chosen], logits)
        frequency = column([row.params.frequency_penalty for row in chosen], logits)
        presence = column([row.params.presence_penalty for row in chosen], logits)
        seen = _count_tokens([row.token_ids for row in chosen], scores) > 0
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen, repeated, scores)
        generated = _count_tokens([row.output_ids for row in chosen], scores)
        penalised_scores = scores - frequency * generated - presence * (generated > 0)
        # The largest finite logit times a penalty may be infinite, which must not look like the model's own infinity.
        logits[index] = torch.where(best.isfinite(), penalised_scores.clamp(-_MAX_LOGIT, _MAX_LOGIT), torch.nan)


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow], drawn: Sequence[int]) -> torch.Tensor:
    """Token ids of the rows named by `drawn`, in order, a few rows at a time."""
    at_once = max(1, _MAX_DRAWN_LOGITS // logits.shape[1])
    parts = [drawn[first : first + at_once] for first in range(0, len(drawn), at_once)]
    return torch.cat([draw_rows(logits[index_of(part, logits)], [rows[i] for i in part]) for part in parts])


def logprobs_of(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int], *, with_ranks: bool = False
) -> list[Logprobs]:
    """Log probabilities of one token for each row of `logits` [rows, vocabulary], float32, and of so many most likely
    ones. `with_ranks`: also the ranks of the tokens, of which equal ones share the best."""
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = ((logprobs > own).sum(dim=-1) + 1).tolist() if with_ranks else [0] * len(num_top)
    most = min(max(num_top, default=0), logits.shape[1])
    tops, top_ids = best(logprobs, most) if most else (logprobs[:, :0], logprobs[:, :0].long())
    entries = []
    for value, rank, ids, values, count in zip(
        own.squeeze(1).tolist(), ranks, top_ids.tolist(), tops.tolist(), num_top, strict=True
    ):
        possible = [(token_id, top) for token_id, top in zip(ids, values, strict=True) if top != -torch.inf]
        entries.append(Logprobs(value, possible[:count], rank))
    return entries


def _best_tokens(logits: torch.Tensor) -> list[int]:
    """The most likely token of each row, -1 where its logit is not finite. On a CPU all of it in numpy, whose calls are
    cheaper than torch's."""
    if not logits.is_cpu:
        token_ids = logits.argmax(dim=-1)
        return list(torch.where(_is_finite(logits, token_ids), token_ids, -1).tolist())
    numbers = as_numpy(logits)
    best = numbers.argmax(axis=-1)
    is_finite = np.isfinite(numbers[np.arange(len(best)), best])
    return list(np.where(is_finite, best, -1).tolist())


def _is_finite(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Whether the best logit of each row is a number, [rows]. argmax takes NaN for the best."""
    if not logits.is_cpu:
        return logits.gather(1, best[:, None]).squeeze(1).isfinite()
    return torch.from_numpy(np.isfinite(as_numpy(logits)[np.arange(len(best)), best.numpy()]))


def _tokens(token_ids: torch.Tensor, is_finite: torch.Tensor, logprobs: Sequence[Logprobs | None]) -> list[Sample]:
    found = torch.where(is_finite, token_ids, -1).tolist()  # one transfer from the device
    return [
        SampledToken(token_id, entry) if token_id >= 0 else NoToken.NON_FINITE
        for token_id, entry in zip(found, logprobs, strict=True)
    ]


def _count_tokens(token_lists: Sequence[npt.NDArray[np.int64]], like: torch.Tensor) -> torch.Tensor:
    """How often each token occurs: [rows, vocabulary], of the type and on the device of `like`."""
    counts = torch.zeros_like(like)
    row_of_each = np.repeat(np.arange(len(token_lists)), [len(tokens) for tokens in token_lists])
    index = (
        torch.from_numpy(row_of_each).to(like.device),
        torch.from_numpy(np.concatenate(token_lists)).to(like.device),
    )
    return counts.index_put_(index, torch.ones((), dtype=like.dtype, device=like.device), accumulate=True)
