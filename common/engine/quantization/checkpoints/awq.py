"""AWQ: integers of 4 bits, with a scale and a zero point for each group of inputs of an output.

weight = (code - zero) * scale. Codes and zero points are packed along outputs, eight in an int32, in the order 0, 2, 4,
6, 1, 3, 5, 7 from its lowest bits: qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from common.engine.quantization.checkpoints.base import Packed, bad_weight, setting, unsupported
from common.engine.quantization.checkpoints.packing import integers_layer, unpack
from common.engine.quantization.grouped import GroupedLinear

_METHOD = "AWQ"
_BITS, _PER_WORD = 4, 8
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of eight outputs in a word


class AWQ:
    """See CheckpointFormat."""

    suffixes = frozenset({"qweight", "qzeros", "scales", "weight"})

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError for what is not supported."""
        bits = settings.get("bits", settings.get("w_bit"))
        if bits != _BITS:
            raise unsupported(_METHOD, f"has weights of {bits} bits, not 4")
        version = str(setting(settings, "version", str, "gemm")).lower()
        if version != "gemm":
            raise unsupported(_METHOD, f"is in the form {version!r}, not 'gemm'")

    def is_quantized(self, suffixes: Iterable[str]) -> bool:
        """See CheckpointFormat."""
        return "qweight" in suffixes

    def linear(self, tensors: Mapping[str, torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> GroupedLinear:
        """See CheckpointFormat."""
        packed = Packed(tensors)
        num_outputs, num_inputs = shape
        words = packed.take("qweight", (num_inputs, num_outputs // _PER_WORD), torch.int32)
        scales = packed.take("scales", None, torch.float16, torch.bfloat16, torch.float32)
        num_groups = len(scales)
        packed.take("scales", (num_groups, num_outputs))
        zeros = packed.take("qzeros", (num_groups, words.shape[1]), torch.int32)
        if not num_groups or num_inputs % num_groups:
            bad_weight(f"{num_groups} groups of {num_inputs} inputs are not of one size")
        return integers_layer(_unpack(words), scales, _unpack(zeros), _BITS, dtype)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    return unpack(words, _BITS, dim=1).view(*words.shape, _PER_WORD)[:, :, _PLACES].flatten(1)
