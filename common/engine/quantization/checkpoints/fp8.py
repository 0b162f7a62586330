"""FP8: numbers of 8 bits (e4m3), with a scale for the whole weight, for each output, or for each block of both.

weight = number * scale. DeepSeek's checkpoints have scales for blocks of 128 x 128 (`weight_block_size`), named
weight_scale_inv, others one or one for each output, named weight_scale. Scales of activations are of no use here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from common.engine.quantization.checkpoints.base import Packed, setting, unsupported
from common.engine.quantization.checkpoints.packing import numbers_layer
from common.engine.quantization.grouped import GroupedLinear

_METHOD = "fp8"
_SCALES = ("weight_scale_inv", "weight_scale")


class FP8:
    """See CheckpointFormat."""

    suffixes = frozenset({"weight", *_SCALES})

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError for what is not supported."""
        kind = setting(settings, "fmt", str, "e4m3")
        if kind != "e4m3":
            raise unsupported(_METHOD, f"has numbers of kind {kind!r}, not 'e4m3'")
        self._block = setting(settings, "weight_block_size", list)

    def is_quantized(self, suffixes: Iterable[str]) -> bool:
        """See CheckpointFormat."""
        return not set(suffixes).isdisjoint(_SCALES)

    def linear(self, tensors: Mapping[str, torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> GroupedLinear:
        """See CheckpointFormat."""
        packed = Packed(tensors)
        weight = packed.take("weight", shape, torch.float8_e4m3fn)
        scale = packed.find(*_SCALES)
        assert scale is not None
        return numbers_layer(weight, scale, None, self._block, dtype)
