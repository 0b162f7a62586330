"""Linear layers with int8 weights, made from a checkpoint's own while the model is loaded.

Each output has a scale: its largest weight is 127 of them. Activations and sums keep their type, so that rounding the
weights is all that changes. `QuantizedLinear` computes with torch's operators, and is what the compiled kernels are
compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from common.errors import ConfigError

_LARGEST = 127


class QuantizedLinear(nn.Module):
    """nn.Linear for inference with an int8 weight. `weight` keeps shape and type of the layer's own but no data."""

    integers: torch.Tensor  # int8 [out_features, in_features]
    scale: torch.Tensor  # float32 [out_features]

    def __init__(
        self, integers: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = integers.shape
        self.weight = nn.Parameter(torch.empty(integers.shape, dtype=dtype, device="meta"), requires_grad=False)
        self.register_buffer("integers", integers)
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def of(cls, linear: nn.Linear) -> QuantizedLinear:
        """The layer with its weight rounded."""
        weight = linear.weight.detach()
        scale = weight.abs().amax(dim=1).float() / _LARGEST
        scale[scale == 0] = 1.0
        integers = (weight.float() / scale[:, None]).round_().to(torch.int8)
        return cls(integers, scale, None if linear.bias is None else linear.bias.detach(), weight.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        out = functional.linear(inputs.float(), self.integers.float()).mul_(self.scale)
        return (out if self.bias is None else out.add_(self.bias)).to(inputs.dtype)


AnyLinear = nn.Linear | QuantizedLinear


def quantize_linears(model: nn.Module) -> float:
    """Quantises the model's linear layers, one after the other; returns their share of the weights that are multiplied.
    Raises ConfigError if there are none."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, QuantizedLinear.of(child))
    modules = list(model.modules())
    num_quantized = sum(module.weight.numel() for module in modules if isinstance(module, QuantizedLinear))
    if not num_quantized:
        reason = f"quantization: {type(model).__name__} has no linear layers that int8 is for"
        raise ConfigError(reason, param="quantization")
    others = (module for module in modules if not isinstance(module, nn.Embedding))
    weights = (weight for module in others for weight in module.parameters(recurse=False))
    return num_quantized / sum(weight.numel() for weight in weights if weight.dim() > 1)


def joined(linears: Sequence[QuantizedLinear]) -> QuantizedLinear:
    """One layer with the outputs of several."""
    return QuantizedLinear(
        torch.cat([linear.integers for linear in linears]),
        torch.cat([linear.scale for linear in linears]),
        joined_bias(linears),
        linears[0].weight.dtype,
    )


def joined_bias(linears: Sequence[AnyLinear]) -> torch.Tensor | None:
    """The biases of several layers, with zeros where some have none; None if all have none."""
    some = next((linear.bias for linear in linears if linear.bias is not None), None)
    if some is None:
        return None
    biases = [some.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
    return torch.cat([bias.detach() for bias in biases])
