"""compressed-tensors: integers of 4 or 8 bits, or numbers of 8 (e4m3), with scales of any granularity.

weight = (code - zero) * scale. Codes of 8 bits are the weight itself, int8 or float8 [out, in]. Packed ones
(weight_packed) stand from 0 on, along inputs in int32 words, the first in the lowest bits; zero points likewise, along
outputs. weight_scale is one number, one for each output, [out, groups], or one for each block of outputs and inputs;
weight_g_idx has the group of each input. Some schemes (W8A8) round activations as well, which is not done here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from common.engine.quantization.checkpoints.base import Packed, bad_weight, setting, unsupported
from common.engine.quantization.checkpoints.packing import input_order, integers_layer, numbers_layer, unpack
from common.engine.quantization.grouped import GroupedLinear

_METHOD = "compressed-tensors"
_KINDS = {("int", 4), ("int", 8), ("float", 8)}
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision", "dense")
_PACKED = "weight_packed"
_SCALE = "weight_scale"


class CompressedTensors:
    """See CheckpointFormat."""

    suffixes = frozenset({"weight", _PACKED, _SCALE, "weight_zero_point", "weight_shape", "weight_g_idx"})

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError for what is not supported."""
        self._block: list[int] | None = None
        sparsity = setting(settings, "sparsity_config", dict) or {}
        formats = [setting(settings, "format", str, "dense"), sparsity.get("format", "dense")]
        for group in (setting(settings, "config_groups", dict) or {}).values():
            weights = group.get("weights") if isinstance(group, dict) else None
            if not isinstance(weights, dict):
                continue
            kind = (weights.get("type", "int"), weights.get("num_bits", 8))
            if kind not in _KINDS:
                raise unsupported(_METHOD, f"has weights of {kind[1]} bits and type {kind[0]}")
            formats.append(group.get("format") or "dense")
            self._block = weights.get("block_structure") or self._block
        if settings.get("transform_config"):
            raise unsupported(_METHOD, "has transforms of weights or activations (transform_config)")
        for each in formats:
            if each not in _FORMATS:
                raise unsupported(_METHOD, f"is in the form {each!r}, not one of {', '.join(_FORMATS)}")

    def is_quantized(self, suffixes: Iterable[str]) -> bool:
        """See CheckpointFormat."""
        return _SCALE in suffixes

    def linear(self, tensors: Mapping[str, torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> GroupedLinear:
        """See CheckpointFormat."""
        packed = Packed(tensors)
        scale, zero = packed.take(_SCALE), packed.find("weight_zero_point")
        if packed.find(_PACKED) is None:
            weight = packed.take("weight", shape, torch.int8, torch.float8_e4m3fn)
            return numbers_layer(weight, scale, zero, self._block, dtype)
        num_outputs, num_inputs = shape
        words = packed.take(_PACKED, None, torch.int32)
        bits = 32 * words.shape[-1] // num_inputs
        if bits not in (4, 8):
            bad_weight(f"its {_PACKED} is {list(words.shape)}, which {num_inputs} inputs of 4 or 8 bits do not fill")
        packed.take(_PACKED, (num_outputs, num_inputs * bits // 32))
        num_groups = scale.shape[-1] if scale.dim() else 1
        packed.take(_SCALE, (num_outputs, num_groups))
        if not num_groups or num_inputs % num_groups:
            bad_weight(f"{num_groups} groups of {num_inputs} inputs are not of one size")
        middle = torch.full_like(scale.T, 1 << (bits - 1), dtype=torch.int32)
        if zero is not None:
            packed.take("weight_zero_point", (-(-num_outputs * bits // 32), num_groups), torch.int32)
            middle = unpack(zero, bits, dim=0)[:num_outputs].T
        order = input_order(packed.find("weight_g_idx"), num_inputs, num_groups)
        return integers_layer(unpack(words, bits, dim=1).T, scale.T, middle, bits, dtype, order)
