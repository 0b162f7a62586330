"""RMS normalisation in four operators where modelling code takes six and a copy.

    x * w / sqrt(mean(x^2) + eps)  =  x * (w * sqrt(d)) / hypot(norm(x), sqrt(d * eps)),  d the size of x

Measured on CPU in float32 it takes half of the time of `torch.nn.functional.rms_norm` for a few tokens, and less for
many.

A module counts as an RMS norm if this, with the module's own weight and epsilon, computes what the module does: the
weight as it is (Llama and most others) or with one added (Gemma). Nothing else is assumed of the module.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

_EPSILON_NAMES = ("variance_epsilon", "eps")
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.03}


class RMSNorm(NamedTuple):
    """x * weight / sqrt(mean(x^2) + epsilon)"""

    weight: torch.Tensor  # [size] float32
    epsilon: float


class FusedRMSNorm(nn.Module):
    """RMS norm over the last dimension, for inference in float32 on CPU."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        size = len(weight)
        self._scaled_weight = weight * size**0.5
        self._root_epsilon = torch.tensor((size * epsilon) ** 0.5, dtype=weight.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same."""
        norm: torch.Tensor = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True)
        scaled: torch.Tensor = inputs * self._scaled_weight
        return scaled.div_(torch.hypot(norm, self._root_epsilon))

    __call__ = forward  # without nn.Module's hooks, which take as long as a small operator


def fuse_norms(model: nn.Module) -> int:
    """Replaces the model's RMS norms in float32 on CPU; returns how many were replaced."""
    num_fused = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (fused := _fused(child)) is not None:
                setattr(parent, name, fused)
                num_fused += 1
    return num_fused


def _fused(module: nn.Module) -> FusedRMSNorm | None:
    """Returns the fused equivalent of `module`, if it is an RMS norm in float32 on CPU."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    norm = rms_norm_of(module)
    return None if norm is None else FusedRMSNorm(norm.weight, norm.epsilon)


@torch.no_grad()
def rms_norm_of(module: nn.Module) -> RMSNorm | None:
    """Returns what `module` computes, if that is an RMS norm over the last dimension."""
    weight = getattr(module, "weight", None)
    epsilon = next((value for name in _EPSILON_NAMES if isinstance(value := getattr(module, name, None), float)), None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or epsilon is None:
        return None
    if weight.dim() != 1 or weight.dtype not in _TOLERANCES:
        return None
    inputs = torch.linspace(-2.0, 3.0, 3 * len(weight), device=weight.device).view(1, 3, -1).to(weight.dtype)
    expected = module(inputs).float()
    tolerance = _TOLERANCES[weight.dtype]
    for own_weight in (weight.detach().float(), weight.detach().float() + 1.0):
        if torch.allclose(FusedRMSNorm(own_weight, epsilon)(inputs.float()), expected, rtol=tolerance, atol=tolerance):
            return RMSNorm(own_weight, epsilon)
    return None
