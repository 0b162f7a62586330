"""A quantised format as someone outside the project would add it: 4 bits, and a scale for each 16 inputs of an output.

--quantization tests.extensions.quantization:Int4Linear
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from common.engine.quantization.base import OverRanks, QuantizedLinear, joined_bias, of_one_rank

GROUP = 16  # inputs
LARGEST = 7  # steps of the scale


class Int4Linear(QuantizedLinear):
    """See QuantizedLinear."""

    packed: torch.Tensor  # uint8 [out_features, in_features / 2]
    scale: torch.Tensor  # float32 [out_features, in_features / GROUP]

    def __init__(
        self, packed: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__(torch.Size((len(packed), 2 * packed.shape[1])), bias, dtype)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)

    @classmethod
    def of(cls, linear: nn.Linear, over_ranks: OverRanks = of_one_rank) -> Int4Linear:
        groups = linear.weight.detach().float().unflatten(1, (-1, GROUP))
        scale = groups.abs().amax(2).clamp(min=1e-9) / LARGEST
        steps = (groups / scale[:, :, None]).round().flatten(1).to(torch.uint8) & 15
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(steps[:, ::2] | steps[:, 1::2] << 4, scale, bias, linear.weight.dtype)

    @classmethod
    def joined(cls, linears: Sequence[Int4Linear]) -> Int4Linear:
        packed, scale = (torch.cat([getattr(each, name) for each in linears]) for name in ("packed", "scale"))
        return cls(packed, scale, joined_bias(linears), linears[0].weight.dtype)

    def rounded(self) -> torch.Tensor:
        """The weight, float32."""
        steps = torch.stack([self.packed & 15, self.packed >> 4], 2).flatten(1).to(torch.int8)
        steps = torch.where(steps > LARGEST, steps - 16, steps)
        return (steps.unflatten(1, (-1, GROUP)) * self.scale[:, :, None]).flatten(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(inputs, self.rounded().to(inputs.dtype), self.bias)
