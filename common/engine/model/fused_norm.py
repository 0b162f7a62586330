"""RMS normalisation in four operators where modelling code takes six and a copy.

    x * w / sqrt(mean(x^2) + eps)  =  x * (w * sqrt(d)) / hypot(norm(x), sqrt(d * eps)),  d the size of x

Measured on CPU in float32 it takes half of the time of `torch.nn.functional.rms_norm` for a few tokens, and less for
many.

A module counts as an RMS norm if this, with the module's own weight and epsilon, computes what the module does: the
weight as it is (Llama and most others) or with one added (Gemma). Nothing else is assumed of the module.
"""

from __future__ import annotations

import torch
from torch import nn

_EPSILON_NAMES = ("variance_epsilon", "eps")
_TOLERANCE = 1e-5


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


@torch.no_grad()
def _fused(module: nn.Module) -> FusedRMSNorm | None:
    """Returns the fused equivalent of `module`, if it is an RMS norm."""
    weight = getattr(module, "weight", None)
    epsilon = next((value for name in _EPSILON_NAMES if isinstance(value := getattr(module, name, None), float)), None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or epsilon is None:
        return None
    if weight.dim() != 1 or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    inputs = torch.linspace(-2.0, 3.0, 3 * len(weight)).view(1, 3, -1)
    expected = module(inputs)
    for own_weight in (weight.detach(), weight.detach() + 1.0):
        fused = FusedRMSNorm(own_weight, epsilon)
        if torch.allclose(fused(inputs), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            return fused
    return None
