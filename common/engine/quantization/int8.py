"""Linear layers with int8 weights.

Each output has a scale: its largest weight is 127 of them. Activations and sums keep their type, so that rounding the
weights is all that changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from common.engine.quantization.base import OverRanks, QuantizedLinear, joined_bias, of_one_rank

_LARGEST = 127


class Int8Linear(QuantizedLinear):
    """See QuantizedLinear."""

    needs_kernels = True

    integers: torch.Tensor  # int8 [out_features, in_features]
    scale: torch.Tensor  # float32 [out_features]

    def __init__(
        self, integers: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__(integers.shape, bias, dtype)
        self.register_buffer("integers", integers)
        self.register_buffer("scale", scale)

    @classmethod
    def of(cls, linear: nn.Linear, over_ranks: OverRanks = of_one_rank) -> Int8Linear:
        """See QuantizedLinear."""
        weight = linear.weight.detach()
        scale = over_ranks(weight.abs().amax(dim=1).float()) / _LARGEST
        scale[scale == 0] = 1.0
        integers = (weight.float() / scale[:, None]).round_().to(torch.int8)
        return cls(integers, scale, None if linear.bias is None else linear.bias.detach(), weight.dtype)

    @classmethod
    def joined(cls, linears: Sequence[Int8Linear]) -> Int8Linear:
        """See QuantizedLinear."""
        integers = torch.cat([linear.integers for linear in linears])
        scale = torch.cat([linear.scale for linear in linears])
        return cls(integers, scale, joined_bias(linears), linears[0].weight.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """See QuantizedLinear."""
        out = functional.linear(inputs.float(), self.integers.float()).mul_(self.scale)
        return (out if self.bias is None else out.add_(self.bias)).to(inputs.dtype)
