"""Integers of a few bits in words of 32, and layers of such integers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from common.engine.quantization.checkpoints.base import bad_weight
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


def numbers_layer(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    block: Sequence[int] | None,
    dtype: torch.dtype,
) -> GroupedLinear:
    """The layer with weights (weight - zero) * scale, of int8 or float8_e4m3fn [out_features, in_features]. Scale and
    zero are one number, one for each output, [out_features, groups], or one for each `block` of outputs and inputs."""
    num_outputs, num_inputs = weight.shape
    if zero is not None and zero.shape != scale.shape:
        bad_weight(f"its scales are {list(scale.shape)}, and its zero points {list(zero.shape)}")
    if scale.numel() == 1:
        sizes = [num_outputs, num_inputs]
    elif list(scale.shape) in ([num_outputs], [num_outputs, 1]):  # by shape: blocks may be as many as outputs
        sizes = [1, num_inputs]
    elif scale.dim() != 2:
        bad_weight(f"its scales are {list(scale.shape)}")
    elif len(scale) == num_outputs and num_inputs % scale.shape[1] == 0:
        sizes = [1, num_inputs // scale.shape[1]]
    else:
        sizes = list(block or [])
        if len(sizes) != 2 or list(scale.shape) != [-(-num_outputs // sizes[0]), -(-num_inputs // sizes[1])]:
            bad_weight(f"its scales are {list(scale.shape)}, for blocks of {block}")
    group = math.gcd(num_inputs, sizes[1])
    rows, columns = torch.arange(num_outputs) // sizes[0], torch.arange(0, num_inputs, group) // sizes[1]
    blocks = (-(-num_outputs // sizes[0]), -(-num_inputs // sizes[1]))
    scale, *zeros = (each.float().view(blocks)[rows][:, columns].T for each in (scale, zero) if each is not None)
    return GroupedLinear(weight.T, scale, -zeros[0] * scale if zeros else None, None, dtype)


def input_order(groups: torch.Tensor | None, num_inputs: int, num_groups: int) -> torch.Tensor | None:
    """Inputs in the order of their groups; None if that is their own."""
    if groups is None:
        return None
    if list(groups.shape) != [num_inputs]:
        bad_weight(f"its groups are of {list(groups.shape)} inputs instead of [{num_inputs}]")
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], torch.arange(num_groups).repeat_interleave(num_inputs // num_groups)):
        bad_weight("its groups are not of one size")
    return None if torch.equal(order, torch.arange(num_inputs)) else order
