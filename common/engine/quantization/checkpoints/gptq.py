"""GPTQ: integers of 4 or 8 bits, with a scale and a zero point for each group of inputs of an output.

weight = (code - zero) * scale. Codes are packed along inputs and zero points along outputs, the first one in the lowest
bits of an int32: qweight [in / per_word, out], qzeros [groups, out / per_word], scales [groups, out]. In the format's
first version, which most checkpoints are in, zero points are stored less one. g_idx [in] has the group of each input:
with `desc_act` not in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from common.engine.quantization.checkpoints.base import Packed, bad_weight, setting, unsupported
from common.engine.quantization.checkpoints.packing import input_order, integers_layer, unpack
from common.engine.quantization.grouped import GroupedLinear

_METHOD = "GPTQ"
_BITS = (4, 8)
_STORED_LESS = {"gptq": 1, "gptq_v2": 0}  # zero points, by the format's version


class GPTQ:
    """See CheckpointFormat."""

    suffixes = frozenset({"qweight", "qzeros", "scales", "g_idx", "weight"})

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError for what is not supported."""
        self._bits = setting(settings, "bits", int)
        if self._bits not in _BITS:
            raise unsupported(_METHOD, f"has weights of {self._bits} bits, not 4 or 8")
        version = setting(settings, "checkpoint_format", str, "gptq")
        if version not in _STORED_LESS:
            raise unsupported(_METHOD, f"is in the form {version!r}, not one of {', '.join(_STORED_LESS)}")
        self._stored_less = _STORED_LESS[version]
        for pattern, own in (setting(settings, "dynamic", dict) or {}).items():
            if isinstance(own, dict) and own.get("bits", self._bits) != self._bits:
                raise unsupported(_METHOD, f"has weights of other bits for {pattern}")

    def is_quantized(self, suffixes: Iterable[str]) -> bool:
        """See CheckpointFormat."""
        return "qweight" in suffixes

    def linear(self, tensors: Mapping[str, torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> GroupedLinear:
        """See CheckpointFormat."""
        packed, per_word = Packed(tensors), 32 // self._bits
        num_outputs, num_inputs = shape
        if num_inputs % per_word:
            bad_weight(f"{num_inputs} inputs do not fill words of {per_word}")
        words = packed.take("qweight", (num_inputs // per_word, num_outputs), torch.int32)
        scales = packed.take("scales", None, torch.float16, torch.bfloat16, torch.float32)
        num_groups = len(scales)
        packed.take("scales", (num_groups, num_outputs))
        zeros = packed.take("qzeros", (num_groups, -(-num_outputs // per_word)), torch.int32)
        if not num_groups or num_inputs % num_groups:
            bad_weight(f"{num_groups} groups of {num_inputs} inputs are not of one size")
        codes = unpack(words, self._bits, dim=0)
        zero = (unpack(zeros, self._bits, dim=1)[:, :num_outputs] + self._stored_less) % (1 << self._bits)
        order = input_order(packed.find("g_idx"), num_inputs, num_groups)
        return integers_layer(codes, scales, zero, self._bits, dtype, order)
