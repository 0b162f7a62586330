"""Draws of tokens: temperature, top-k, top-p, min-p, then the argmax of score + Gumbel noise.

Top-k, top-p and min-p each keep a number of the best of the tokens that are left. Where there is a top-k, no more than
that are ranked. Otherwise a CPU ranks only the tokens around the end of what top-p keeps (`_kept`), since a sort of a
large vocabulary takes longer than all the rest of a step's sampling. How a row is drawn does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.engine.sampling.draws import MIN_TEMPERATURE
from common.engine.sampling.noise import gumbel_noise, mixed_seeds, stream_keys
from common.engine.sampling.processors import SamplingRow
from common.engine.sampling.ranking import argmax, best, column, index_of
from common.types import SamplingParams

_Draw = Callable[[torch.Tensor, torch.Tensor, Sequence[SamplingParams]], torch.Tensor]
"""(scores [rows, vocabulary], keys of the noise [rows, 1], parameters) -> token ids [rows]."""

_BIN_SHIFT = 16  # scores are binned by the upper half of their bits


def draw_rows(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Token ids drawn from logits [rows, vocabulary] of rows that are not greedy."""
    params = [row.params for row in rows]
    temperatures = column([max(p.temperature, MIN_TEMPERATURE) for p in params], logits)
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures
    seeds = mixed_seeds([p.settled_seed for p in params])
    keys = torch.from_numpy(stream_keys(seeds, np.array([row.output_position for row in rows])))
    keys = keys.to(logits.device)[:, None]
    kinds: dict[_Draw, list[int]] = {}
    for i, p in enumerate(params):
        kinds.setdefault(_way_to_draw(p, is_on_cpu=logits.is_cpu), []).append(i)
    if len(kinds) == 1:
        (draw,) = kinds
        return draw(scores, keys, params)
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for draw, chosen in kinds.items():
        index = index_of(chosen, logits)
        token_ids[index] = draw(scores[index], keys[index], [params[i] for i in chosen])
    return token_ids


def _way_to_draw(params: SamplingParams, *, is_on_cpu: bool) -> _Draw:
    if params.top_k > 0:
        return _draw_ranked
    if is_on_cpu and (params.top_p < 1.0 or params.min_p > 0.0):
        return _draw_kept
    return _draw_ranked if params.top_p < 1.0 else _draw_from_all


def _draw_from_all(scores: torch.Tensor, keys: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    _apply_min_p(scores, params)
    return _winners(scores, torch.arange(scores.shape[1], device=scores.device)[None], keys)


def _draw_ranked(scores: torch.Tensor, keys: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    num_tokens = scores.shape[1]
    most = max(p.top_k if p.top_k > 0 else num_tokens for p in params)
    ranked, token_ids = best(scores, min(most, num_tokens))
    _apply_top_k(ranked, params)
    _apply_top_p(ranked, params)
    _apply_min_p(ranked, params)
    return _winners(ranked, token_ids, keys)


def _draw_kept(scores: torch.Tensor, keys: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """On a CPU, one row after the other: each keeps another number of tokens."""
    found = []
    for row, key, p in zip(scores, keys, params, strict=True):
        token_ids = torch.from_numpy(_kept(row, p))
        found.append(_winners(row[token_ids][None], token_ids[None], key[None]))
    return torch.cat(found)


def _winners(scores: torch.Tensor, token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The token drawn in each row. `token_ids` are those of the scores."""
    winner = argmax(gumbel_noise(keys, token_ids).add_(scores))[:, None]
    return token_ids.expand(len(scores), -1).gather(1, winner).squeeze(1)


def _kept(scores: torch.Tensor, params: SamplingParams) -> npt.NDArray[np.int64]:
    """The tokens that top-p and min-p keep of one row's scores, of which the best is 0."""
    kept = _nucleus(scores, params.top_p) if params.top_p < 1.0 else np.arange(len(scores))
    if params.min_p > 0.0:
        margin = torch.tensor(params.min_p, dtype=torch.float32).log().item()
        kept = kept[~(scores.numpy()[kept] < margin)]
    return kept


def _nucleus(scores: torch.Tensor, top_p: float) -> npt.NDArray[np.int64]:
    """The smallest set of the best tokens with at least top_p of the probability. Sums the probability of bins of
    similar scores, and ranks the tokens of one bin only: that in which the set ends."""
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float64).numpy()
    bits = np.abs(scores.numpy()).view(np.uint32)  # as integers in the order of their tokens, best first
    bins = bits >> _BIN_SHIFT
    mass = np.bincount(bins, weights=probabilities).cumsum()
    last_bin = int(np.searchsorted(mass, top_p))
    last = np.flatnonzero(bins == last_bin)
    last = last[bits[last].argsort(kind="stable")]
    of_last = probabilities[last]
    mass_before = of_last.cumsum() - of_last + (mass[last_bin - 1] if last_bin else 0.0)
    kept = last[~(mass_before >= top_p)]  # NaN, in a row that has no token, keeps some
    return np.concatenate([np.flatnonzero(bins < last_bin), kept])


def _apply_top_k(scores: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Keep each row's top_k best. `scores` are ordered, best first."""
    limits = column([float(p.top_k) if p.top_k > 0 else torch.inf for p in params], scores)
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
