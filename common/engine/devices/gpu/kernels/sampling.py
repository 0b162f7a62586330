"""Sampling from logits on the device, without a sort: the tokens that `common.engine.sampling.sampler` would take.

A token is drawn as the argmax of score + noise. Tokens that top-k and top-p exclude are those from some rank on, so it
suffices to draw among all: a winner that is kept has won among the kept too. If it is not kept, nothing ranked after it
is either, and the draw is repeated among those ranked before it. Whether a token is kept follows from how many are
ranked before it and how likely those are together, which is one pass over the logits. Most draws need one.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUMBERS = 4096  # logits of one program

_GOLDEN = tl.constexpr(-7046029254386353131)  # 0x9E3779B97F4A7C15 as a signed number; see sampling.noise
_MIX_1 = tl.constexpr(-4658895280553007687)  # 0xBF58476D1CE4E5B9
_MIX_2 = tl.constexpr(-7723592293110705685)  # 0x94D049BB133111EB
_INFINITY = tl.constexpr(float("inf"))
_MAX_LOGIT = tl.constexpr(3.4028234663852886e38)  # the largest finite float32


@triton.jit
def penalty_kernel(
    logits,  # [rows, NUM_TOKENS] float32, changed in place
    counts,  # [penalised, NUM_TOKENS] int64: sums of Penalties.weights
    rows,  # [penalised] int64
    factors,  # [penalised, 3] float32: repetition, frequency, presence
    NUM_TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Penalties over the tokens so far. Grid: (penalised, parts)."""
    penalised, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + penalised)
    token_ids = part * SIZE + tl.arange(0, SIZE)
    is_token = token_ids < NUM_TOKENS
    weights = tl.load(counts + penalised * NUM_TOKENS + token_ids, mask=is_token, other=0)
    values = tl.load(logits + row * NUM_TOKENS + token_ids, mask=is_token, other=0.0)
    repetition = tl.load(factors + penalised * 3)
    num_generated = (weights & 0xFFFFFFFF).to(tl.float32)
    penalised_values = tl.where(values > 0, tl.math.div_rn(values, repetition), values * repetition)
    penalised_values -= tl.load(factors + penalised * 3 + 1) * num_generated
    penalised_values -= tl.where(num_generated > 0, tl.load(factors + penalised * 3 + 2), 0.0)
    # The largest finite logit times a penalty may be infinite, which must not look like the model's own infinity.
    penalised_values = tl.minimum(tl.maximum(penalised_values, -_MAX_LOGIT), _MAX_LOGIT)
    is_finite = (values > -_INFINITY) & (values < _INFINITY)
    tl.store(logits + row * NUM_TOKENS + token_ids, penalised_values, mask=is_token & is_finite & (weights > 0))


@triton.jit(do_not_specialize=["row_stride"])
def best_kernel(
    logits,  # [rows, vocabulary], `row_stride` numbers from one row to the next
    part_best,  # [rows, parts] float32: NaN if there is one
    row_stride,
    NUM_TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The best logit of each part of a row. Grid: (rows, parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_ids = part * SIZE + tl.arange(0, SIZE)
    values = tl.load(logits + row * row_stride + token_ids, mask=token_ids < NUM_TOKENS, other=-_INFINITY)
    values = values.to(tl.float32)
    has_nan = tl.max((values != values).to(tl.int32), axis=0) > 0
    best = tl.max(tl.where(values != values, -_INFINITY, values), axis=0)
    tl.store(part_best + row * tl.num_programs(1) + part, tl.where(has_nan, float("nan"), best))


@triton.jit(do_not_specialize=["row_stride"])
def draw_kernel(
    logits,
    part_best,
    keys,  # [rows] int64, of the noise
    draws,  # [rows, 4] float32: temperature (0: greedy), top_k (0: all), top_p, log of min_p
    part_value,  # [rows, parts] float64: of each part's winner
    part_winner,  # [rows, parts] int64
    row_stride,
    NUM_TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
):
    """The winner of each part of a row. Grid: (rows, parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, _ = _best_of(part_best, row, PARTS, PADDED_PARTS)
    temperature = tl.load(draws + row * 4)
    token_ids = part * SIZE + tl.arange(0, SIZE)
    values = tl.load(logits + row * row_stride + token_ids, mask=token_ids < NUM_TOKENS, other=-_INFINITY)
    values = values.to(tl.float32)
    if temperature > 0.0:
        scores = tl.math.div_rn(values - best, temperature)
        scores = tl.where(scores < tl.load(draws + row * 4 + 3), -_INFINITY, scores)
        perturbed = _noise(tl.load(keys + row), token_ids) + scores.to(tl.float64)
        value, winner = _argmax(perturbed, token_ids)
    else:
        value, winner = _argmax(values.to(tl.float64), token_ids)
    tl.store(part_value + row * PARTS + part, value)
    tl.store(part_winner + row * PARTS + part, winner)


@triton.jit(do_not_specialize=["row_stride"])
def settle_kernel(
    logits,
    part_best,
    keys,
    draws,
    part_value,
    part_winner,
    top_mass,  # [rows] float64: of the top-k tokens, for rows that have a top_k and a top_p
    tokens,  # [rows] int64: the result; -1 where the best logit is not finite
    row_stride,
    NUM_TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
):
    """The token of each row. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    best, has_nan = _best_of(part_best, row, PARTS, PADDED_PARTS)
    parts = tl.arange(0, PADDED_PARTS)
    values = tl.load(part_value + row * PARTS + parts, mask=parts < PARTS, other=-_INFINITY)
    part = tl.argmax(values, axis=0)
    winner = tl.load(part_winner + row * PARTS + part)
    is_finite = (best > -_INFINITY) & (best < _INFINITY) & (has_nan == 0)
    temperature = tl.load(draws + row * 4)
    top_k = tl.load(draws + row * 4 + 1)
    top_p = tl.load(draws + row * 4 + 2)
    if is_finite & (temperature > 0.0) & ((top_k > 0.0) | (top_p < 1.0)):
        winner = _settle(
            logits + row * row_stride, best, tl.load(keys + row), temperature, top_k, top_p,
            tl.load(draws + row * 4 + 3), tl.load(top_mass + row), winner, NUM_TOKENS, SIZE,
        )  # fmt: skip
    tl.store(tokens + row, tl.where(is_finite, winner, -1))


@triton.jit
def _settle(
    logits, best, key, temperature, top_k, top_p, margin, top_mass, winner,
    NUM_TOKENS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The winner among the tokens that top-k and top-p keep, from the winner among all."""
    is_open = tl.full([], 1, tl.int32)
    while is_open != 0:
        limit = tl.math.div_rn(tl.load(logits + winner).to(tl.float32) - best, temperature)
        num_before = 0
        mass_before = tl.full([], 0.0, tl.float64)
        mass = tl.full([], 0.0, tl.float64)
        for first in range(0, NUM_TOKENS, SIZE):
            token_ids = first + tl.arange(0, SIZE)
            scores = _scores(logits, token_ids, best, temperature, NUM_TOKENS)
            is_before = (scores > limit) | ((scores == limit) & (token_ids < winner))
            masses = tl.exp(scores).to(tl.float64)
            num_before += tl.sum(is_before.to(tl.int32), axis=0)
            mass_before += tl.sum(tl.where(is_before, masses, 0.0), axis=0)
            mass += tl.sum(masses, axis=0)
        if top_k > 0.0:
            mass = top_mass
        is_kept = (num_before == 0) | (
            ((top_k == 0.0) | (num_before < top_k)) & ((top_p >= 1.0) | (mass_before < top_p.to(tl.float64) * mass))
        )
        is_open = tl.where(is_kept, 0, 1)
        if is_open != 0:
            winner = _draw_before(logits, best, key, temperature, margin, limit, winner, NUM_TOKENS, SIZE)
    return winner


@triton.jit
def _draw_before(logits, best, key, temperature, margin, limit, excluded, NUM_TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """The winner among tokens ranked before `excluded`, whose score is `limit`."""
    value = tl.full([], -_INFINITY, tl.float64)
    winner = excluded
    for first in range(0, NUM_TOKENS, SIZE):
        token_ids = first + tl.arange(0, SIZE)
        scores = _scores(logits, token_ids, best, temperature, NUM_TOKENS)
        is_before = (scores > limit) | ((scores == limit) & (token_ids < excluded))
        is_drawn = is_before & (scores >= margin)
        if tl.max(is_drawn.to(tl.int32), axis=0) > 0:
            perturbed = tl.where(is_drawn, _noise(key, token_ids) + scores.to(tl.float64), -_INFINITY)
            part_value, part_winner = _argmax(perturbed, token_ids)
            winner = tl.where(part_value > value, part_winner, winner)
            value = tl.maximum(value, part_value)
    return winner


@triton.jit
def _scores(logits, token_ids, best, temperature, NUM_TOKENS: tl.constexpr):
    values = tl.load(logits + token_ids, mask=token_ids < NUM_TOKENS, other=-_INFINITY).to(tl.float32)
    return tl.math.div_rn(values - best, temperature)


@triton.jit
def _best_of(part_best, row, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr):
    """The best logit of a row, and whether there is a NaN (1) or not (0)."""
    parts = tl.arange(0, PADDED_PARTS)
    values = tl.load(part_best + row * PARTS + parts, mask=parts < PARTS, other=-_INFINITY)
    has_nan = tl.max((values != values).to(tl.int32), axis=0)
    return tl.max(tl.where(values != values, -_INFINITY, values), axis=0), has_nan


@triton.jit
def _argmax(values, token_ids):
    """The largest value and its token, the first if there are several."""
    place = tl.argmax(values, axis=0)
    return tl.max(values, axis=0), (tl.min(token_ids, axis=0) + place).to(tl.int64)


@triton.jit
def _noise(key, token_ids):
    """Standard Gumbel noise in float64, as `common.engine.sampling.noise` has it."""
    bits = token_ids.to(tl.int64) * _GOLDEN + key
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * _MIX_1
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    bits = bits ^ ((bits >> 31) & 0x1FFFFFFFF)
    uniform = (((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return -tl.log(-tl.log(uniform))
