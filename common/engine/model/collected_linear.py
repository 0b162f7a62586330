"""Linear layers whose outputs ranks put together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Collect = Callable[[torch.Tensor], torch.Tensor]
"""From a rank's outputs [..., size] to those of the whole layer [..., another size]."""


class CollectedLinear(nn.Module):
    """A rank's part of a linear layer, which gives the outputs of the whole layer."""

    def __init__(self, local: nn.Linear, collect: Collect) -> None:
        super().__init__()
        self.local: nn.Module = local  # devices may replace it
        self.collect = collect

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., inputs of this rank] -> [..., outputs of the whole layer]"""
        return self.collect(self.local(inputs))
