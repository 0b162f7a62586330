"""RMS normalisation in four operators where modelling code takes six and a copy.

    x * w / sqrt(mean(x^2) + eps)  =  x * (w * sqrt(d)) / hypot(norm(x), sqrt(d * eps)),  d the size of x

Measured on CPU in float32 it takes half of the time of `torch.nn.functional.rms_norm` for a few tokens, and less for
many.
"""

from __future__ import annotations

import torch
from torch import nn

from common.engine.devices.rms_norm import rms_norm_of


class FusedRMSNorm(nn.Module):
    """RMS norm over the last dimension, for inference in float32."""

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
    """Replaces the model's RMS norms in float32; returns how many were replaced."""
    num_fused = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            norm = rms_norm_of(child)
            if norm is not None and child.weight.dtype == torch.float32:
                setattr(parent, name, FusedRMSNorm(norm.weight, norm.epsilon))
                num_fused += 1
    return num_fused
