"""RMS norms of modelling code.

A module counts as one if x * w / sqrt(mean(x^2) + eps), with its own weight and epsilon, is what it computes: the
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


@torch.no_grad()
def rms_norm_of(module: nn.Module) -> RMSNorm | None:
    """Returns what `module` computes, if that is an RMS norm over the last dimension. A weight that is a buffer (Falcon
    Mamba) is not used, and may be of another size than what is normed."""
    weight = getattr(module, "weight", None)
    epsilon = next((value for name in _EPSILON_NAMES if isinstance(value := getattr(module, name, None), float)), None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter) or epsilon is None:
        return None
    if weight.dim() != 1 or weight.dtype not in _TOLERANCES:
        return None
    inputs = torch.linspace(-2.0, 3.0, 3 * len(weight), device=weight.device).view(1, 3, -1).to(weight.dtype)
    expected = module(inputs).float()
    normed = nn.functional.rms_norm(inputs.float(), weight.shape, eps=epsilon)
    tolerance = _TOLERANCES[weight.dtype]
    for own_weight in (weight.detach().float(), weight.detach().float() + 1.0):
        if torch.allclose(normed * own_weight, expected, rtol=tolerance, atol=tolerance):
            return RMSNorm(own_weight, epsilon)
    return None
