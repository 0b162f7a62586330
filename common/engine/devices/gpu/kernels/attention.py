"""Attention over a paged KV cache, read in place.

The query tokens of a tile belong to one sequence. All query heads that share a KV head are computed together, as the
rows of one matrix: row r is query token r // GROUP and head r % GROUP of the group. Keys are taken KEYS at a time, with
a running maximum and sum per row (Milakov, Gimelshein: Online normalizer calculation for softmax, 2018; Dao:
FlashAttention-2, 2023).

The few rows of a decode would leave most of a GPU idle, so its keys are split in parts that are computed side by side
and joined by a second kernel. How many parts there are does not depend on lengths: the launch is the same for each step
of so many sequences, as a CUDA graph needs it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.engine.devices.gpu.kernels.quantized import numbers_of, scales_at


@triton.jit(
    do_not_specialize=["table_width", "query_stride"],
    do_not_specialize_on_alignment=["tiles", "seq_lens", "block_tables"],
)
def attend_kernel(
    query,  # [tokens, ...], `query_stride` numbers from one token to the next, heads in a row
    cache,  # of one layer: from its first number in block 0
    sinks,  # [heads], of any float type
    tiles,  # [tiles, 4] int64: sequence, first query token, number of query tokens, position of the first
    seq_lens,  # [sequences] int64
    block_tables,  # [sequences, table_width] int64
    out,  # [tokens, heads, HEAD_DIM]
    partial_out,  # [sequences, heads, PARTS, HEAD_DIM] float32, if there are parts
    partial_weight,  # [sequences, heads, PARTS] float32: log2 of the sum of weights
    scale,  # of query . key
    query_stride,
    table_width,
    block_stride,  # numbers from one block to the next
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,  # power of two
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,  # numbers that a token takes in a head's run: HEAD_DIM, and its scale
    LIMIT: tl.constexpr,  # see `quantized`
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    IS_CHUNKED: tl.constexpr,  # windows begin at multiples of their size
    SOFTCAP: tl.constexpr,  # 0: none
    HAS_SINKS: tl.constexpr,
    FACTOR_TYPE: tl.constexpr,  # of what is multiplied
    IS_DECODE: tl.constexpr,  # tile i is the last token of sequence i
):
    """Grid: (tiles, KV heads, PARTS)."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    if IS_DECODE:
        sequence = tile.to(tl.int64)
        first_token = sequence
        num_tokens = 1
        seq_len = tl.load(seq_lens + sequence)
        first_position = seq_len - 1
        end = seq_len
    else:
        sequence = tl.load(tiles + tile * 4)
        first_token = tl.load(tiles + tile * 4 + 1)
        num_tokens = tl.load(tiles + tile * 4 + 2)
        first_position = tl.load(tiles + tile * 4 + 3)
        end = first_position + num_tokens
    begin = end * 0
    if WINDOW > 0:
        first_seen = _first_seen(first_position, WINDOW, IS_CHUNKED)
        begin = tl.maximum(first_seen, 0) // KEYS * KEYS  # the same keys are taken together always
    if PARTS > 1:
        part_size = tl.cdiv(tl.cdiv(end - begin, PARTS), KEYS) * KEYS
        begin += part * part_size
        end = tl.minimum(begin + part_size, end)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    row_tokens = rows // GROUP
    row_heads = kv_head * GROUP + rows % GROUP
    positions = first_position + row_tokens
    is_row = row_tokens < num_tokens
    is_dim = dims < HEAD_DIM
    row_offsets = (first_token + row_tokens) * query_stride + row_heads * HEAD_DIM
    q = tl.load(query + row_offsets[:, None] + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    q = q.to(FACTOR_TYPE)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # a key of its own, whose value is zero
        if part == 0:
            best = tl.load(sinks + row_heads, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
    values = tl.zeros([ROWS, PADDED_DIM], tl.float32)

    keys_of_head = cache + kv_head * (BLOCK_SIZE * ROW)
    table = block_tables + sequence * table_width
    masked_from = begin
    if WINDOW == 0:  # all rows see the keys up to the first one's own
        seen_by_all = tl.minimum(first_position + 1, end)
        masked_from = begin + tl.maximum(seen_by_all - begin, 0) // KEYS * KEYS
        for start in range(begin, masked_from, KEYS):
            best, total, values = _take_keys(
                best, total, values, q, positions, keys_of_head, table, start, end, scale, block_stride, dims,
                NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, ROW, LIMIT, KEYS, WINDOW, IS_CHUNKED, SOFTCAP,
                FACTOR_TYPE, False,
            )  # fmt: skip
    MASKED_KEYS: tl.constexpr = KEYS if KEYS <= 64 else 64  # masks take registers
    for start in range(masked_from, end, MASKED_KEYS):
        best, total, values = _take_keys(
            best, total, values, q, positions, keys_of_head, table, start, end, scale, block_stride, dims,
            NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, ROW, LIMIT, MASKED_KEYS, WINDOW, IS_CHUNKED, SOFTCAP,
            FACTOR_TYPE, True,
        )  # fmt: skip

    is_stored = is_row[:, None] & is_dim[None, :]
    values = values / tl.where(total > 0.0, total, 1.0)[:, None]
    if PARTS > 1:
        row_parts = ((sequence * NUM_KV_HEADS * GROUP + row_heads) * PARTS) + part
        tl.store(partial_out + row_parts[:, None] * HEAD_DIM + dims[None, :], values, mask=is_stored)
        weight = tl.where(total > 0.0, best + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(partial_weight + row_parts, weight, mask=is_row)
    else:
        out_offsets = ((first_token + row_tokens) * (NUM_KV_HEADS * GROUP) + row_heads) * HEAD_DIM
        tl.store(out + out_offsets[:, None] + dims[None, :], values.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def _first_seen(positions, WINDOW: tl.constexpr, IS_CHUNKED: tl.constexpr):
    """The first position in the windows of tokens; may be below 0."""
    return positions // WINDOW * WINDOW if IS_CHUNKED else positions - (WINDOW - 1)


@triton.jit
def _take_keys(
    best, total, values, q, positions, keys_of_head, table, start, end, scale, block_stride, dims,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr, LIMIT: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, IS_CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr, FACTOR_TYPE: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """The next KEYS keys, from `start` on, of those before `end`."""
    tokens = start + tl.arange(0, KEYS)
    is_token = tokens < end
    if IS_MASKED:
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=is_token, other=0)
    else:
        blocks = tl.load(table + tokens // BLOCK_SIZE)
    runs = keys_of_head + blocks * block_stride
    token_keys = runs + (tokens % BLOCK_SIZE) * HEAD_DIM
    token_values = token_keys + NUM_KV_HEADS * BLOCK_SIZE * ROW
    key_addresses = token_keys[None, :] + dims[:, None]
    value_addresses = token_values[:, None] + dims[None, :]
    if IS_MASKED or HEAD_DIM != PADDED_DIM:
        is_dim = dims < HEAD_DIM
        keys = tl.load(key_addresses, mask=is_token[None, :] & is_dim[:, None], other=0.0)
    else:
        keys = tl.load(key_addresses)
    scores = tl.dot(q, numbers_of(keys, LIMIT).to(FACTOR_TYPE), input_precision="ieee")
    if LIMIT > 0.0:
        key_scales = scales_at(runs, BLOCK_SIZE, HEAD_DIM) + tokens % BLOCK_SIZE
        scores *= tl.load(key_scales, mask=is_token, other=0.0).to(tl.float32)[None, :]
    factor = scale * 1.4426950408889634
    if SOFTCAP > 0.0:
        scores = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * factor / SOFTCAP)) + 1.0)  # tanh
        factor = SOFTCAP * 1.4426950408889634
    if IS_MASKED:
        is_seen = is_token[None, :] & (tokens[None, :] <= positions[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (tokens[None, :] >= _first_seen(positions, WINDOW, IS_CHUNKED)[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1) * factor)
    if IS_MASKED:
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)  # of rows that have seen no key
    else:
        shift = new_best
    weights = tl.exp2(scores * factor - shift[:, None])
    shrink = tl.exp2(best - shift)
    total = total * shrink + tl.sum(weights, axis=1)
    if IS_MASKED or HEAD_DIM != PADDED_DIM:
        is_dim = dims < HEAD_DIM
        # What a block holds beyond its sequence may be anything, NaN included.
        read = tl.load(value_addresses, mask=is_token[:, None] & is_dim[None, :], other=0.0)
    else:
        read = tl.load(value_addresses)
    if LIMIT > 0.0:
        value_scales = scales_at(runs + NUM_KV_HEADS * BLOCK_SIZE * ROW, BLOCK_SIZE, HEAD_DIM) + tokens % BLOCK_SIZE
        weights *= tl.load(value_scales, mask=is_token, other=0.0).to(tl.float32)[None, :]
    values = values * shrink[:, None]
    factors = numbers_of(read, LIMIT).to(FACTOR_TYPE)
    values = tl.dot(weights.to(FACTOR_TYPE), factors, acc=values, input_precision="ieee")
    return new_best, total, values


@triton.jit
def join_parts_kernel(
    partial_out,  # [sequences, heads, PARTS, HEAD_DIM] float32
    partial_weight,  # [sequences, heads, PARTS] float32
    out,  # [sequences, heads, HEAD_DIM]
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # of a program
):
    """Joins the parts of a decode. Grid: (sequences * heads, dimensions / DIMS)."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PADDED_PARTS)
    dims = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    is_dim = dims < HEAD_DIM
    logs = tl.load(partial_weight + row * PARTS + parts, mask=parts < PARTS, other=float("-inf"))
    best = tl.max(logs, axis=0)
    weights = tl.exp2(logs - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weights, axis=0)
    addresses = partial_out + (row * PARTS + parts)[:, None] * HEAD_DIM + dims[None, :]
    is_used = weights > 0.0  # nothing was written for sequences without tokens
    read = tl.load(addresses, mask=is_used[:, None] & is_dim[None, :], other=0.0)
    values = tl.sum(read * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * HEAD_DIM + dims, values.to(out.dtype.element_ty), mask=is_dim)
