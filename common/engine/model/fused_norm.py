"""RMS normalisation in one operator where modelling code spells it out in six.

A module counts as an RMS norm if torch's operator, with the module's own weight and epsilon, computes what the module
does: the weight as it is (Llama and most others) or with one added (Gemma). Nothing else is assumed of it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

_EPSILON_NAMES = ("variance_epsilon", "eps")
_TOLERANCE = 1e-5


class FusedRMSNorm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._shape = weight.shape
        self._epsilon = epsilon

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., dimension] -> the same."""
        return functional.rms_norm(inputs, self._shape, self.weight, self._epsilon)


def fuse_norms(model: nn.Module) -> int:
    """Replace the model's RMS norms in float32; return how many were replaced."""
    num_fused = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (fused := _fused(child)) is not None:
                setattr(parent, name, fused)
                num_fused += 1
    return num_fused


def _fused(module: nn.Module) -> FusedRMSNorm | None:
    """What computes the same as `module`, if it is an RMS norm."""
    weight = getattr(module, "weight", None)
    epsilon = next((value for name in _EPSILON_NAMES if isinstance(value := getattr(module, name, None), float)), None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or epsilon is None:
        return None
    if weight.dim() != 1 or weight.dtype != torch.float32:  # rounding of lower precision is each architecture's own
        return None
    inputs = torch.linspace(-2.0, 3.0, 3 * len(weight), device=weight.device).view(1, 3, -1)
    expected = module(inputs)
    for own_weight in (weight.detach(), weight.detach() + 1.0):
        fused = FusedRMSNorm(own_weight, epsilon)
        if torch.allclose(fused(inputs), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            return fused
    return None
