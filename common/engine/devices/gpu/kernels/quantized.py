"""Quantised KV in kernels, see `kv_quantization`. LIMIT is the largest number of the type: 127 of int8, whose bytes are
read and written as int8, and 448 of float8, whose bytes are uint8, so that any GPU can convert them; 0 where KV is not
quantised."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_of(largest, poison, LIMIT: tl.constexpr):
    """Scales of vectors, as float32 numbers that bfloat16 holds. `largest`: the largest magnitude of each, but for NaN.
    `poison`: NaN for vectors with NaN or infinity, else 0."""
    scale = tl.maximum(largest * (1.0 / LIMIT), 7.888609052210118e-31) + poison  # 2**-100
    bits = scale.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536  # to the nearest even one
    # Rounding would carry a NaN with all bits set, as GPUs have it, over into a zero.
    return tl.where(scale == scale, rounded.to(tl.float32, bitcast=True), scale)


@triton.jit
def bytes_of(vectors, scale, LIMIT: tl.constexpr):
    """Bytes of float32 numbers, divided by their scale."""
    scaled = vectors * tl.div_rn(1.0, scale)
    scaled = tl.where(scaled == scaled, tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT), 0.0)
    if LIMIT == 127.0:
        return _rounded(scaled).to(tl.int8)
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        size = bits & 0x7FFFFFFF
        biased = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        magnitude = size.to(tl.float32, bitcast=True)
        multiple = _rounded(magnitude * 512.0).to(tl.int32)  # of 2**-9, below the smallest normal number
        return (sign | tl.where(magnitude < 0.015625, multiple, biased)).to(tl.uint8)


@triton.jit
def _rounded(numbers):
    """Numbers below 2**22, rounded to even."""
    return (numbers + 12582912.0) - 12582912.0


@triton.jit
def numbers_of(read, LIMIT: tl.constexpr):
    """The numbers that were read from the cache; those of float8 by way of float16, which has one more bit of the
    exponent."""
    if LIMIT == 448.0:
        wide = read.to(tl.int32)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.int16)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        return read


@triton.jit
def scales_at(run, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Addresses of the scales of a head's tokens in a block. `run`: where the head's numbers begin."""
    return (run + BLOCK_SIZE * HEAD_DIM).to(tl.pointer_type(tl.bfloat16))
