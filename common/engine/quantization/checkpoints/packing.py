"""Integers of a few bits in words of 32, and layers of such integers."""

from __future__ import annotations

import torch

from common.engine.quantization.grouped import MIDDLE, GroupedLinear, pack_words

_WORD = 32  # bits


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Integers from 0 on, int32, with as many times the words along `dim`. The first is in a word's lowest bits."""
    places = torch.arange(0, _WORD, bits, dtype=torch.int32)
    wide = words.unsqueeze(dim + 1) >> places.view([-1] + [1] * (words.dim() - dim - 1))
    return (wide & ((1 << bits) - 1)).flatten(dim, dim + 1)


def integers_layer(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    bits: int,
    dtype: torch.dtype,
    order: torch.Tensor | None = None,
) -> GroupedLinear:
    """The layer with weights (codes - zero) * scale. Codes from 0 on are [in_features, out_features] and, with an
    `order`, of inputs in their own; scale and zero [groups, out_features]."""
    if order is not None:
        codes = codes[order]
    middle = MIDDLE if bits == 4 else 1 << (bits - 1)
    numbers = codes - middle
    packed = pack_words(numbers) if bits == 4 else numbers.to(torch.int8)
    scale = scale.float()
    return GroupedLinear(packed, scale, (middle - zero) * scale, None, dtype, order)
