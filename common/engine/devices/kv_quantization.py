"""Quantised KV: keys and values as 8-bit numbers with scales.

The keys, or the values, of a token and head have one scale. It follows from them alone, so that a token has the same
bytes whatever it is computed beside, however its prompt is cut, and on whichever pod. One scale for all tokens of a
block, which fills token by token, would not have that: with each larger token, those before it would be rounded once
more.

In a block, the numbers of a head's tokens come first, [block_size, head_dim], and then their scales, [block_size]
bfloat16. Together they are as large as [block_size, row_numbers], which is the shape of the KV cache. So whatever moves
or digests blocks needs to know nothing of scales.

These functions are the reference of the kernels, which give the same bytes.
"""

from __future__ import annotations

import torch

from common.engine.contract.kv_groups import KV_SCALE_BYTES

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest number of each type
MIN_SCALE = 2.0**-100  # its inverse is finite
QUANTIZED = frozenset(LIMITS)


def head_dim_of(kv_cache: torch.Tensor) -> int:
    """Numbers of a token's key or value."""
    return kv_cache.shape[-1] - (KV_SCALE_BYTES if kv_cache.dtype in QUANTIZED else 0)


def quantize(vectors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [..., head_dim] of `dtype` and scales [...] in bfloat16. Vectors with NaN or infinity get a scale that is
    NaN."""
    limit, vectors = LIMITS[dtype], vectors.float()
    largest = vectors.abs().amax(dim=-1, keepdim=True) + (vectors * 0.0).sum(dim=-1, keepdim=True)
    scales = (largest * (1.0 / limit)).clamp(min=MIN_SCALE).bfloat16()
    scaled = (vectors * scales.float().reciprocal()).nan_to_num(nan=-limit).clamp(-limit, limit)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales.squeeze(-1)


def rounded(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The vectors as they come back from blocks in which their numbers are of `dtype`."""
    numbers, scales = quantize(vectors, dtype)
    return (numbers.float() * scales.float()[..., None]).to(vectors.dtype)


def pack(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantises vectors [..., block_size, head_dim] as they lie in blocks, [..., block_size, row_numbers]."""
    numbers, scales = quantize(vectors, dtype)
    runs = torch.cat([numbers.view(torch.uint8).flatten(-2), scales.view(torch.uint8)], dim=-1)
    return runs.view(dtype).view(*vectors.shape[:-1], -1)


def unpack(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decodes the rows of blocks, [..., block_size, row_numbers], to vectors [..., block_size, head_dim] of `dtype`."""
    runs, num_numbers = packed.flatten(-2), packed.shape[-2] * head_dim_of(packed)
    scales = runs[..., num_numbers:].contiguous().view(torch.bfloat16).float()
    numbers = runs[..., :num_numbers].float().view(*packed.shape[:-1], -1)
    return (numbers * scales[..., None]).to(dtype)


class QuantizedVectors:
    """The keys, or the values, of one layer in a quantised KV cache."""

    def __init__(self, kv_cache: torch.Tensor, layer: int, plane: int) -> None:
        """`kv_cache` [num_blocks, num_layers, planes, num_kv_heads, block_size, row_numbers]."""
        block_size, head_dim = kv_cache.shape[4], head_dim_of(kv_cache)
        runs = kv_cache[:, layer, plane].flatten(2)  # [num_blocks, num_kv_heads, bytes]
        self._numbers = runs[..., : block_size * head_dim].view(*runs.shape[:2], block_size, head_dim)
        self._scales = runs[..., block_size * head_dim :].view(torch.bfloat16)

    def write(self, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        """Quantises vectors [tokens, num_kv_heads, head_dim] and writes them to their slots."""
        numbers, scales = quantize(vectors, self._numbers.dtype)
        block_size = self._scales.shape[-1]
        block_ids, offsets = torch.div(slots, block_size, rounding_mode="floor"), slots % block_size
        self._numbers[block_ids, :, offsets] = numbers
        self._scales[block_ids, :, offsets] = scales
