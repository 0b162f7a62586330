"""Kernels around the linear layers of a decoder: residual and RMS norm, SwiGLU, and what is between projections and
attention. `element` below is the type of weights and activations; sums are float32."""

from __future__ import annotations

import triton
import triton.language as tl

from common.engine.devices.gpu.kernels.quantized import bytes_of, scale_of, scales_at


@triton.jit
def add_norm_kernel(
    hidden,  # [tokens, SIZE] float32, changed in place
    delta,  # [tokens, SIZE] element
    weight,  # [SIZE] float32
    out,  # [tokens, SIZE] element
    epsilon,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
):
    """hidden += delta, then out = RMS norm of hidden, times weight. Grid: (tokens,)."""
    places = tl.arange(0, PADDED_SIZE)
    is_place = places < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + places
    values = tl.load(hidden + offsets, mask=is_place, other=0.0)
    values += tl.load(delta + offsets, mask=is_place, other=0.0).to(tl.float32)
    tl.store(hidden + offsets, values, mask=is_place)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + epsilon)
    scaled = values * inverse * tl.load(weight + places, mask=is_place, other=0.0)
    tl.store(out + offsets, scaled.to(out.dtype.element_ty), mask=is_place)


@triton.jit(do_not_specialize=["num_numbers"])
def silu_mul_kernel(
    gate_up,  # [tokens, 2 * SIZE] element
    out,  # [tokens, SIZE] element
    num_numbers,  # of `out`
    SIZE: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """out = silu(gate) * up, gate and up being the halves of gate_up. Grid: (numbers / NUMBERS,)."""
    places = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    is_place = places < num_numbers
    sources = places + places // SIZE * SIZE
    gate = tl.load(gate_up + sources, mask=is_place, other=0.0).to(tl.float32)
    up = tl.load(gate_up + sources + SIZE, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out + places, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=is_place)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def prepare_kernel(
    qkv,  # [tokens, (heads + 2 * KV heads) * HEAD_DIM] element; queries are changed in place
    cache,  # of one layer: from its first number in block 0
    query_norm,  # [HEAD_DIM] float32, if there are norms
    key_norm,
    cosines,  # [positions, HEAD_DIM] float32
    sines,
    positions,  # [tokens] int64
    slots,  # [tokens] int64; below zero: not written
    epsilon,
    block_stride,  # numbers from one block to the next
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,  # of all three kinds
    HEAD_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,  # of a head's dimensions
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,  # numbers that a token takes in a head's run: HEAD_DIM, and its scale
    LIMIT: tl.constexpr,  # see `quantized`
    HAS_NORMS: tl.constexpr,
):
    """Norms of queries and keys, rotary embedding, and keys and values to their slots. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, PADDED_HEADS)
    halves = tl.arange(0, PADDED_HALF)
    HALF: tl.constexpr = HEAD_DIM // 2
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    is_half = halves < HALF
    is_number = (heads < ALL_HEADS)[:, None] & is_half[None, :]
    row = qkv + token * (ALL_HEADS * HEAD_DIM)
    places = heads[:, None] * HEAD_DIM + halves[None, :]
    first = tl.load(row + places, mask=is_number, other=0.0)
    second = tl.load(row + places + HALF, mask=is_number, other=0.0)
    plain_first, plain_second = first, second
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum(first * first + second * second, axis=1)
        inverse = tl.rsqrt(squares / HEAD_DIM + epsilon)[:, None]
        query_first = tl.load(query_norm + halves, mask=is_half, other=0.0)
        query_second = tl.load(query_norm + halves + HALF, mask=is_half, other=0.0)
        key_first = tl.load(key_norm + halves, mask=is_half, other=0.0)
        key_second = tl.load(key_norm + halves + HALF, mask=is_half, other=0.0)
        first = first * inverse * tl.where(is_query[:, None], query_first[None, :], key_first[None, :])
        second = second * inverse * tl.where(is_query[:, None], query_second[None, :], key_second[None, :])
    turn = tl.load(positions + token) * HEAD_DIM + halves
    turned_first = (
        first * tl.load(cosines + turn, mask=is_half, other=0.0)[None, :]
        - second * tl.load(sines + turn, mask=is_half, other=0.0)[None, :]
    )
    turned_second = (
        second * tl.load(cosines + turn + HALF, mask=is_half, other=0.0)[None, :]
        + first * tl.load(sines + turn + HALF, mask=is_half, other=0.0)[None, :]
    )
    is_own = is_number & is_query[:, None]
    tl.store(row + places, turned_first.to(qkv.dtype.element_ty), mask=is_own)
    tl.store(row + places + HALF, turned_second.to(qkv.dtype.element_ty), mask=is_own)
    slot = tl.load(slots + token)
    # Keys of all heads, then values of all heads, a block's run of tokens for each.
    runs = cache + slot // BLOCK_SIZE * block_stride + (heads - NUM_HEADS) * (BLOCK_SIZE * ROW)
    cached = runs[:, None] + slot % BLOCK_SIZE * HEAD_DIM + halves[None, :]
    is_kept = (heads >= NUM_HEADS) & (heads < ALL_HEADS) & (slot >= 0)
    is_cached = is_kept[:, None] & is_half[None, :]
    kept_first = tl.where(is_value[:, None], plain_first.to(tl.float32), turned_first)
    kept_second = tl.where(is_value[:, None], plain_second.to(tl.float32), turned_second)
    if LIMIT > 0.0:
        largest = tl.maximum(tl.max(tl.abs(kept_first), axis=1), tl.max(tl.abs(kept_second), axis=1))
        poison = tl.sum(kept_first * 0.0 + kept_second * 0.0, axis=1)
        scale = scale_of(largest, poison, LIMIT)
        scale_addresses = scales_at(runs, BLOCK_SIZE, HEAD_DIM) + slot % BLOCK_SIZE
        tl.store(scale_addresses, scale.to(tl.bfloat16), mask=is_kept)
        tl.store(cached, bytes_of(kept_first, scale[:, None], LIMIT), mask=is_cached)
        tl.store(cached + HALF, bytes_of(kept_second, scale[:, None], LIMIT), mask=is_cached)
    else:
        tl.store(cached, kept_first.to(cache.dtype.element_ty), mask=is_cached)
        tl.store(cached + HALF, kept_second.to(cache.dtype.element_ty), mask=is_cached)


@triton.jit(do_not_specialize=["key_stride", "value_stride"], do_not_specialize_on_alignment=["slots"])
def store_kernel(
    key,  # [tokens, KV heads, HEAD_DIM], `key_stride` numbers from one token to the next
    value,  # the same, if there are values
    cache,  # of one layer: from its first number in block 0
    slots,  # [tokens] int64; below zero: not written
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    block_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,  # see `prepare_kernel`, as for the next
    LIMIT: tl.constexpr,
    HAS_VALUES: tl.constexpr,
):
    """Keys and values to their slots. Grid: (tokens, KV heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, PADDED_DIM)
    slot = tl.load(slots + token)
    is_stored = (dims < HEAD_DIM) & (slot >= 0)
    run = cache + slot // BLOCK_SIZE * block_stride + head * (BLOCK_SIZE * ROW)
    read = tl.load(key + token * key_stride + head * key_head_stride + dims, mask=is_stored, other=0.0)
    _store_vector(read, run, slot, dims, is_stored, HEAD_DIM, BLOCK_SIZE, LIMIT)
    if HAS_VALUES:
        read = tl.load(value + token * value_stride + head * value_head_stride + dims, mask=is_stored, other=0.0)
        run += NUM_KV_HEADS * BLOCK_SIZE * ROW
        _store_vector(read, run, slot, dims, is_stored, HEAD_DIM, BLOCK_SIZE, LIMIT)


@triton.jit
def _store_vector(
    vector, run, slot, dims, is_stored, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, LIMIT: tl.constexpr
):
    target = run + slot % BLOCK_SIZE * HEAD_DIM + dims
    if LIMIT > 0.0:
        vector = vector.to(tl.float32)
        scale = scale_of(tl.max(tl.abs(vector), axis=0), tl.sum(vector * 0.0, axis=0), LIMIT)
        tl.store(scales_at(run, BLOCK_SIZE, HEAD_DIM) + slot % BLOCK_SIZE, scale.to(tl.bfloat16), mask=slot >= 0)
        tl.store(target, bytes_of(vector, scale, LIMIT), mask=is_stored)
    else:
        tl.store(target, vector, mask=is_stored)
