"""Layers of which each rank has a part, in place of those of a model's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from common.engine.devices.operators import rows_of_part
from common.engine.quantization.base import OverRanks, of_one_rank

Collect = Callable[[torch.Tensor], torch.Tensor]
"""From a rank's outputs [..., size] to those of the whole layer [..., another size]."""


class CutLayer(NamedTuple):
    """The linear layer of which a rank's layer, whose attribute `whole` this is, is a part."""

    dim: int  # of its weight [out_features, in_features], that is cut
    start: int
    stop: int
    in_features: int
    out_features: int


class CollectedLinear(nn.Module):
    """A linear layer that gives the outputs of all ranks."""

    def __init__(
        self, local: nn.Linear, collect: Collect, takes: slice | None = None, over_ranks: OverRanks = of_one_rank
    ) -> None:
        """`takes` are the inputs of this rank; None: it gets no others. `over_ranks`: where each has some inputs."""
        super().__init__()
        self.over_ranks = over_ranks
        self.local: nn.Module = local  # devices may replace it
        self.collect = collect
        self.takes = takes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs of the whole layer]"""
        if self.takes is not None:
            inputs = inputs[..., self.takes].contiguous()
        return self.collect(self.local(inputs))


class CutEmbedding(nn.Module):
    """An embedding of which each rank has some tokens. The last row of its table is zeros, for the tokens of others."""

    def __init__(self, local: nn.Embedding, first: int, num_embeddings: int, collect: Collect) -> None:
        """`first` is the token of the table's first row, of `num_embeddings` in the whole model."""
        super().__init__()
        self.local = local
        self.collect = collect
        self.num_embeddings = num_embeddings
        self.first = first

    @property
    def weight(self) -> torch.Tensor:
        """The rank's rows. The code of some models asks for their device."""
        return self.local.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., size]"""
        return self.collect(self.local(rows_of_part(token_ids, self.first, len(self.local.weight) - 1)))


class CollectedExperts(nn.Module):
    """Experts of which each rank has a part, with the outputs of all ranks."""

    def __init__(self, local: nn.Module, collect: Collect) -> None:
        super().__init__()
        self.local = local
        self.collect = collect

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Sums the outputs of the ranks' experts."""
        return self.collect(self.local(*inputs))


class OwnHeads:
    """A rank's heads of an attention that is given those of all ranks, and gives them back."""

    def __init__(self, rank: int, size: int, gather: Collect) -> None:
        self._rank = rank
        self._size = size
        self._gather = gather

    def take(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The rank's of all query heads or KV heads; one, where there are fewer than ranks."""
        num_heads = tensor.shape[dim]
        return tensor.narrow(dim, self._rank * num_heads // self._size, max(1, num_heads // self._size))

    def collect(self, attended: torch.Tensor) -> torch.Tensor:
        """[1, tokens, heads of the rank, dim] -> [1, tokens, all heads, dim]"""
        return self._gather(attended.flatten(2)).view(*attended.shape[:2], -1, attended.shape[3])
