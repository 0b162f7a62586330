"""Attention of decodes to latents in a paged cache, in the absorbed form: a token's key is what is cached of it, and
its value the first RANK numbers of that, which are read once for both.

The rows of a program's matrices are heads of one sequence. The sequence's tokens are split in parts that are computed
side by side, and joined by `attention.join_parts_kernel`; see there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_width", "parts"], do_not_specialize_on_alignment=["seq_lens", "block_tables"])
def attend_latents_kernel(
    query,  # [sequences, NUM_HEADS, RANK + ROTARY_DIM]
    cache,  # of one layer: from its first number in block 0
    seq_lens,  # [sequences] int64
    block_tables,  # [sequences, ...] int64, `table_width` numbers from one row to the next
    out,  # [sequences, NUM_HEADS, RANK]
    partial_out,  # [sequences, NUM_HEADS, parts, RANK] float32, if there are parts
    partial_weight,  # [sequences, NUM_HEADS, parts] float32: log2 of the sum of weights
    scale,  # of query . key
    table_width,
    block_stride,  # numbers from one block to the next
    parts,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PADDED_RANK: tl.constexpr,  # power of two
    PADDED_ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    FACTOR_TYPE: tl.constexpr,  # of what is multiplied
):
    """Grid: (tiles of heads, sequences, parts)."""
    DIM: tl.constexpr = RANK + ROTARY_DIM
    sequence = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    end = tl.load(seq_lens + sequence)
    begin = end * 0
    if HAS_PARTS:
        part_size = tl.cdiv(tl.cdiv(end, parts), KEYS) * KEYS
        begin = part * part_size
        end = tl.minimum(begin + part_size, end)

    heads = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ranks = tl.arange(0, PADDED_RANK)
    turns = tl.arange(0, PADDED_ROTARY)
    is_head = heads < NUM_HEADS
    is_rank = ranks < RANK
    is_turn = turns < ROTARY_DIM
    rows = sequence * NUM_HEADS + heads
    own = query + rows[:, None] * DIM
    q_latent = tl.load(own + ranks[None, :], mask=is_head[:, None] & is_rank[None, :], other=0.0).to(FACTOR_TYPE)
    q_rotary = tl.load(own + RANK + turns[None, :], mask=is_head[:, None] & is_turn[None, :], other=0.0)
    q_rotary = q_rotary.to(FACTOR_TYPE)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, PADDED_RANK], tl.float32)
    factor = scale * 1.4426950408889634
    table = block_tables + sequence * table_width
    for start in range(begin, end, KEYS):
        tokens = start + tl.arange(0, KEYS)
        is_token = tokens < end
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=is_token, other=0)
        places = cache + blocks * block_stride + tokens % BLOCK_SIZE * DIM
        # What a block holds beyond its sequence may be anything, NaN included.
        latents = tl.load(places[:, None] + ranks[None, :], mask=is_token[:, None] & is_rank[None, :], other=0.0)
        rotary = tl.load(places[:, None] + RANK + turns[None, :], mask=is_token[:, None] & is_turn[None, :], other=0.0)
        latents = latents.to(FACTOR_TYPE)
        scores = tl.dot(q_latent, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_rotary, tl.trans(rotary.to(FACTOR_TYPE)), acc=scores, input_precision="ieee")
        scores = tl.where(is_token[None, :], scores * factor, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, axis=1)
        values = values * shrink[:, None]
        values = tl.dot(weights.to(FACTOR_TYPE), latents, acc=values, input_precision="ieee")
        best = new_best

    is_stored = is_head[:, None] & is_rank[None, :]
    values = values / tl.where(total > 0.0, total, 1.0)[:, None]
    if HAS_PARTS:
        row_parts = rows * parts + part
        is_used = is_stored & (begin < end)
        tl.store(partial_out + row_parts[:, None] * RANK + ranks[None, :], values, mask=is_used)
        weight = tl.where(total > 0.0, best + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(partial_weight + row_parts, weight, mask=is_head)
    else:
        tl.store(out + rows[:, None] * RANK + ranks[None, :], values.to(out.dtype.element_ty), mask=is_stored)
