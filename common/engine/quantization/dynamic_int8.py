"""Linear layers with int8 weights that multiply int8 activations.

Weights are rounded as in `int8`. The inputs of each token are rounded as well: the largest is 127 steps of the token's
scale. Sums of integers are exact, so that a token's outputs do not depend on what is computed beside it.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from common.engine.quantization.int8 import Int8Linear

LARGEST = 127


class DynamicInt8Linear(Int8Linear):
    """See QuantizedLinear."""

    rounds_inputs = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """See QuantizedLinear."""
        rounded, scale = rounded_rows(inputs)
        out = functional.linear(rounded.double(), self.integers.double()).float() * self.scale * scale
        return (out if self.bias is None else out.add_(self.bias)).to(inputs.dtype)


def rounded_rows(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers [..., size] and scales [..., 1], float32, whose products the inputs nearly are."""
    largest = inputs.float().abs().amax(-1, keepdim=True)
    steps = torch.where(largest > 0, torch.full_like(largest, LARGEST) / largest, 0.0)
    return (inputs.float() * steps).round_(), largest / LARGEST
