"""The sampler: logits -> tokens.

1. log probabilities, if asked for           3. penalties over the tokens so far
2. biases                                    4. logits processors; then masks: allowed tokens, bad words, stop tokens
                                                up to `min_tokens`, all but what closes reasoning that
                                                exceeds its budget, what a grammar does not allow
                                             5. temperature, top-k, top-p, min-p; then a draw, or the argmax if greedy

Equal logits are ranked by token id wherever ranks matter: rounded logits tie often, and the order in which a kernel
returns equal values depends on the rest of the batch. A row whose best logit is not finite has no token: the model
computed infinities or NaN. One whose every token is masked gets `MASKED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from common.engine.sampling.draws import MIN_TEMPERATURE
from common.engine.sampling.noise import gumbel_noise, mixed_seeds, stream_keys
from common.engine.sampling.processors import LogitsProcessor, apply_processors
from common.engine.sampling.rules import NO_RULES, TokenRules
from common.types import Logprobs, SampledToken, SamplingParams

_MAX_DRAWN_LOGITS = 1 << 22  # drawn at once: bounds the memory of noise and sorting
_MAX_LOGIT = torch.finfo(torch.float32).max
_TIE_MARGIN = 16  # ranks taken beyond those that are wanted, so that a tie at the last of them is seen whole


MASKED = SampledToken(-1)  # every token of the row is masked


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One request that samples a token in this step."""

    params: SamplingParams
    token_ids: npt.NDArray[np.int64]  # prompt and output so far
    num_prompt_tokens: int
    rules: TokenRules = NO_RULES
    processors: tuple[LogitsProcessor, ...] = ()

    @property
    def output_position(self) -> int:
        """Index, among the output tokens, of the token to be sampled."""
        return len(self.token_ids) - self.num_prompt_tokens


def is_plain(params: SamplingParams) -> bool:
    """True if the request's next token is just the argmax of its logits, whatever came before."""
    return params.greedy and params.is_simple


class LogitMask(Protocol):
    """Excludes tokens."""

    def apply(self, logits: torch.Tensor) -> None:
        """Sets the logits [rows, vocabulary] of tokens that must not be sampled to -inf, in place."""


class Sampler:
    """Samples for one model. Stateless."""

    def sample_plain(self, logits: torch.Tensor, mask: LogitMask | None = None) -> list[SampledToken | None]:
        """Tokens for logits [rows, vocabulary] of rows that are all plain; None where no logit is finite. With a mask,
        they are overwritten."""
        if mask is not None:
            mask.apply(logits)
        return [SampledToken(token_id) if token_id >= 0 else None for token_id in _best_tokens(logits)]

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], mask: LogitMask | None = None
    ) -> list[SampledToken | None]:
        """One token for each row of `logits` [rows, vocabulary], float32, which are overwritten; None where no logit is
        finite."""
        asking = [i for i, row in enumerate(rows) if row.params.num_logprobs is not None]
        computed = logits[_index(asking, logits)] if asking else None  # a copy: what follows changes logits
        ruled = [(logits[i], row) for i, row in enumerate(rows) if row.rules is not NO_RULES]
        processed = any(row.processors for row in rows)
        for row_logits, row in ruled:
            row.rules.add_biases(row_logits)
        self._penalise(logits, rows)
        is_computed = _is_finite(logits, _argmax(logits)) if ruled or processed else None
        if processed:
            apply_processors(logits, rows)
        for row_logits, row in ruled:
            row.rules.mask(row_logits, row.token_ids[row.num_prompt_tokens :], row.params.min_tokens)
        if mask is not None:
            mask.apply(logits)  # after the penalties, which leave every logit finite
        token_ids = _argmax(logits)
        is_finite = _is_finite(logits, token_ids)
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if drawn:
            token_ids[_index(drawn, logits)] = _draw(logits, rows, drawn)
        logprobs: list[Logprobs | None] = [None] * len(rows)
        if computed is not None:
            counts = [rows[i].params.num_logprobs or 0 for i in asking]
            for i, entry in zip(asking, logprobs_of(computed, token_ids[_index(asking, logits)], counts), strict=True):
                logprobs[i] = entry
        tokens = _tokens(token_ids, is_finite, logprobs)
        if is_computed is not None and not is_finite.all():
            # NaN is what a processor leaves that has failed.
            masked = (is_computed & (logits.amax(dim=-1) == -torch.inf)).tolist()
            tokens = [MASKED if is_masked else token for token, is_masked in zip(tokens, masked, strict=True)]
        return tokens

    def _penalise(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        penalised = [i for i, row in enumerate(rows) if row.params.is_penalised]
        if not penalised:
            return
        chosen = [rows[i] for i in penalised]
        index = _index(penalised, logits)
        scores = logits[index]
        best = scores.amax(dim=-1, keepdim=True)
        repetition = _column([row.params.repetition_penalty for row in chosen], logits)
        frequency = _column([row.params.frequency_penalty for row in chosen], logits)
        presence = _column([row.params.presence_penalty for row in chosen], logits)
        seen = _count_tokens([row.token_ids for row in chosen], scores) > 0
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen, repeated, scores)
        generated = _count_tokens([row.token_ids[row.num_prompt_tokens :] for row in chosen], scores)
        penalised_scores = scores - frequency * generated - presence * (generated > 0)
        # The largest finite logit times a penalty may be infinite, which must not look like the model's own infinity.
        logits[index] = torch.where(best.isfinite(), penalised_scores.clamp(-_MAX_LOGIT, _MAX_LOGIT), torch.nan)


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow], drawn: Sequence[int]) -> torch.Tensor:
    """Token ids of the rows named by `drawn`, in order, a few rows at a time."""
    at_once = max(1, _MAX_DRAWN_LOGITS // logits.shape[1])
    parts = [drawn[first : first + at_once] for first in range(0, len(drawn), at_once)]
    return torch.cat([_draw_rows(logits[_index(part, logits)], [rows[i] for i in part]) for part in parts])


def _draw_rows(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Draw from logits [rows, vocabulary] of rows that are not greedy."""
    params = [row.params for row in rows]
    temperatures = _column([max(p.temperature, MIN_TEMPERATURE) for p in params], logits)
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures
    seeds = mixed_seeds([p.settled_seed for p in params])
    keys = stream_keys(seeds, np.array([row.output_position for row in rows]))
    if any(p.top_k > 0 or p.top_p < 1.0 for p in params):
        scores, token_ids = _most_likely(scores, params)
        _apply_top_k(scores, params)
        _apply_top_p(scores, params)
    else:
        token_ids = torch.arange(logits.shape[1], device=logits.device)[None]
    _apply_min_p(scores, params)
    noise = gumbel_noise(torch.from_numpy(keys).to(logits.device)[:, None], token_ids)
    winner = _argmax(noise.add_(scores))[:, None]
    return token_ids.expand(len(rows), -1).gather(1, winner).squeeze(1)


def _most_likely(scores: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and their token ids, best first: as many as any row can need."""
    if all(p.top_k > 0 for p in params):
        return _best(scores, min(max(p.top_k for p in params), scores.shape[1]))
    ordered = torch.sort(scores, dim=-1, descending=True, stable=True)
    return ordered.values, ordered.indices


def _best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best of each row and their token ids, best first, equal ones by token id."""
    num_taken = min(count + _TIE_MARGIN, scores.shape[1])
    taken = torch.topk(scores, num_taken, dim=-1)
    by_id = taken.indices.sort(dim=-1)
    by_score = taken.values.gather(1, by_id.indices).sort(dim=-1, descending=True, stable=True)
    values, token_ids = by_score.values, by_id.values.gather(1, by_score.indices)
    if num_taken < scores.shape[1]:
        last, wanted = values[:, -1], values[:, count - 1]
        is_split = (last == wanted) & (wanted > -torch.inf)  # equal ones may have been left out
        if is_split.any():
            ordered = torch.sort(scores[is_split], dim=-1, descending=True, stable=True)
            values[is_split], token_ids[is_split] = ordered.values[:, :num_taken], ordered.indices[:, :num_taken]
    return values[:, :count], token_ids[:, :count]


def _apply_top_k(scores: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Keep each row's top_k best. `scores` are ordered, best first."""
    limits = _column([float(p.top_k) if p.top_k > 0 else torch.inf for p in params], scores)
    ranks = torch.arange(scores.shape[1], device=scores.device)[None]
    scores.masked_fill_(ranks >= limits, -torch.inf)


def _apply_top_p(scores: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Keep the smallest leading set with at least top_p of the probability that is left. `scores` are ordered."""
    if all(p.top_p >= 1.0 for p in params):
        return
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float64)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    limits = torch.tensor([[p.top_p if p.top_p < 1.0 else torch.inf] for p in params], dtype=torch.float64)
    scores.masked_fill_(mass_before >= limits.to(scores.device), -torch.inf)
    # The best token stays whatever rounding says: its mass_before is exactly 0, and top_p is above 0.


def _apply_min_p(scores: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Keep tokens at least min_p times as likely as the likeliest."""
    if all(p.min_p == 0.0 for p in params):
        return
    margins = torch.tensor([[p.min_p] for p in params], dtype=torch.float32).log().to(scores.device)  # -inf keeps all
    scores.masked_fill_(scores < scores.amax(dim=-1, keepdim=True) + margins, -torch.inf)


def logprobs_of(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int], *, with_ranks: bool = False
) -> list[Logprobs]:
    """Log probabilities of one token for each row of `logits` [rows, vocabulary], float32, and of so many most likely
    ones. `with_ranks`: also the ranks of the tokens, of which equal ones share the best."""
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = ((logprobs > own).sum(dim=-1) + 1).tolist() if with_ranks else [0] * len(num_top)
    most = min(max(num_top, default=0), logits.shape[1])
    best, best_ids = _best(logprobs, most) if most else (logprobs[:, :0], logprobs[:, :0].long())
    entries = []
    for value, rank, ids, values, count in zip(
        own.squeeze(1).tolist(), ranks, best_ids.tolist(), best.tolist(), num_top, strict=True
    ):
        possible = [(token_id, top) for token_id, top in zip(ids, values, strict=True) if top != -torch.inf]
        entries.append(Logprobs(value, possible[:count], rank))
    return entries


def _best_tokens(logits: torch.Tensor) -> list[int]:
    """The most likely token of each row, -1 where its logit is not finite. On a CPU all of it in numpy, whose calls are
    cheaper than torch's."""
    if logits.device.type != "cpu":
        token_ids = logits.argmax(dim=-1)
        return list(torch.where(_is_finite(logits, token_ids), token_ids, -1).tolist())
    numbers = _as_numpy(logits)
    best = numbers.argmax(axis=-1)
    is_finite = np.isfinite(numbers[np.arange(len(best)), best])
    return list(np.where(is_finite, best, -1).tolist())


def _argmax(scores: torch.Tensor) -> torch.Tensor:
    """The first of the largest scores of each row, [rows]; of NaN where there is one. On a CPU numpy takes a tenth of
    torch's time."""
    if scores.device.type != "cpu" or not scores.shape[0]:
        return scores.argmax(dim=-1)
    return torch.from_numpy(_as_numpy(scores).argmax(axis=-1))


def _as_numpy(scores: torch.Tensor) -> npt.NDArray[np.floating]:
    numbers = scores.float() if scores.itemsize < 4 else scores  # numpy has no bfloat16
    array: npt.NDArray[np.floating] = numbers.numpy()
    return array


def _is_finite(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Whether the best logit of each row is a number, [rows]. argmax takes NaN for the best."""
    if logits.device.type != "cpu":
        return logits.gather(1, best[:, None]).squeeze(1).isfinite()
    return torch.from_numpy(np.isfinite(_as_numpy(logits)[np.arange(len(best)), best.numpy()]))


def _tokens(
    token_ids: torch.Tensor, is_finite: torch.Tensor, logprobs: Sequence[Logprobs | None]
) -> list[SampledToken | None]:
    found = torch.where(is_finite, token_ids, -1).tolist()  # one transfer from the device
    return [
        SampledToken(token_id, entry) if token_id >= 0 else None
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


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """[rows, 1] of the type and on the device of `like`."""
    return torch.tensor(values, dtype=like.dtype).to(like.device)[:, None]


def _index(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(like.device)
